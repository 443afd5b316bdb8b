"""Draws from categorical distributions in linear time: exact cuts, and one uniform number per draw.

The weights of a row are its softmax at a temperature. A cut keeps every weight from a threshold on, so it
depends neither on an order of tokens nor on ties. A draw inverts the cumulative
sum in the order of tokens. Results are functions of the row alone: other rows do not change a bit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from hotswap.backends.torch.step_numbers import to_device

__all__ = [
    "Workspace",
    "cut_together",
    "draw",
    "invert",
    "keep_from",
    "to_weights",
    "top_k_threshold",
    "top_p_threshold",
    "uniform",
]

# Weights are summed in blocks: a draw finds its block by their sums, then its token in one block.
_BLOCK = 512
_MASK = (1 << 64) - 1
_LEAST_TEMPERATURE = torch.finfo(torch.float32).tiny
# A threshold is searched for by interpolation until so few weights can lie between its bounds.
_FEW, _MOST_BOUNDS = 2.5, 8
# What the sum of a row may be wrong by, as a part of it.
_ROUNDING = 1e-5
# Where the search begins comes from one weight in so many.
_SAMPLED = 256


class Workspace:
    """Memory for the rows of a step, kept from step to step: fresh memory takes longer than sampling."""

    def __init__(self) -> None:
        self._rows = torch.zeros(0, dtype=torch.float32)
        self._scratch = torch.zeros(0, dtype=torch.float32)

    def rows(self, rows: int, size: int, device: torch.device) -> Tensor:
        """Return `[rows, size]`, fp32; each row is followed by zeros up to a multiple of 512 numbers."""
        width = -(-size // _BLOCK) * _BLOCK
        if self._rows.device != device or self._rows.shape[1:] != (width,) or len(self._rows) < rows:
            self._rows = torch.zeros(rows, width, dtype=torch.float32, device=device)
        self._rows[:rows, size:] = 0.0
        return self._rows[:rows, :size]

    def scratch(self, like: Tensor) -> Tensor:
        """Return a row of the shape of another."""
        if self._scratch.shape != like.shape or self._scratch.device != like.device:
            self._scratch = torch.empty_like(like)
        return self._scratch


def to_weights(logits: Tensor, temperatures: Sequence[float], largest: Tensor) -> None:
    """Replace rows of logits by their weights, whose sum is 1.

    A softmax and not `exp`, which takes up to thirty times as long on a CPU where results are 0 or almost 0:
    at low temperatures, and of tokens that may not come.

    Args:
        logits: `[rows, vocabulary]`, fp32, in a `Workspace`.
        temperatures: Of each row, over 0.
        largest: The largest logit of each row, `[rows]`; finite.
    """
    size, width = logits.shape[1], logits.stride(0)
    whole = logits.as_strided((len(logits), width), (width, 1))
    whole[:, size:] = -math.inf
    whole -= largest[:, None]
    if any(temperature != 1.0 for temperature in temperatures):
        # One that fp32 has no number for would be 0.
        divisors = [max(temperature, _LEAST_TEMPERATURE) for temperature in temperatures]
        whole /= to_device(np.array(divisors, np.float32), logits.device)[:, None]
    torch.softmax(whole, -1, out=whole)


def top_k_threshold(weights: Tensor, k: int) -> float:
    """Return the `k`-th largest weight of a row."""
    if not 0 < k < len(weights):
        return 0.0
    return float(weights.kthvalue(len(weights) - k + 1).values if k > _BLOCK else weights.topk(k).values[-1])


def top_p_threshold(weights: Tensor, p: float, space: Workspace) -> float:
    """Return the largest threshold from which on the weights of a row reach the part `p` of their sum.

    On a CPU the threshold is searched for by sums of all weights over a bound, about a dozen of them: at
    150,000 tokens a sort takes as long as five hundred. Source: Holtzman et al., arXiv:1904.09751, 3.1.
    """
    total = float(weights.sum())
    target = p * total
    if weights.device.type != "cpu":
        return _reached(weights, target)
    scratch = space.scratch(weights)

    def sum_over(bound: float) -> float:
        return float(torch.threshold(weights, bound, 0.0, out=scratch).sum())

    # The sum over `low` reaches the target and that over `high` does not: all weights under (1 - p) / n of
    # the sum are together less than what may be left out, if p is not almost 1.
    low, over_low = total * (1 - p) / len(weights) * 0.5, total
    high, over_high = float(weights.amax()), 0.0
    if (1 - p) < _ROUNDING:
        low = 0.0
    guesses = _guesses(weights, p, total)
    num_bounds = 0
    while low > 0 and over_low - over_high > _FEW * low and num_bounds < _MOST_BOUNDS:
        part = (over_low - target) / (over_low - over_high)
        if num_bounds % 3 == 2:  # interpolation may approach from one side for long
            part = 0.5
        between = low * (high / low) ** min(max(part, 0.02), 0.98)
        between = next((guess for guess in guesses if low < guess < high), between)
        num_bounds += 1
        if (over := sum_over(between)) >= target:
            low, over_low = between, over
        else:
            high, over_high = between, over
    while True:  # from weight to weight: few are left, or many that are equal
        least = float(torch.threshold(weights, low, math.inf, out=scratch).amin())
        if least == math.inf:
            return low
        if sum_over(least) < target:
            return least
        low = least
        middle = (low * high) ** 0.5
        if low < middle < high:
            if sum_over(middle) >= target:
                low = middle
            else:
                high = middle


def keep_from(weights: Tensor, bound: float) -> None:
    """Set the weights of a row under a bound to 0."""
    if bound > 0:
        below = float(np.nextafter(np.float32(bound), np.float32(0.0)))
        torch.threshold(weights, below, 0.0, out=weights)


def cut_together(
    weights: Tensor, top_k: Sequence[int], top_p: Sequence[float], min_p: Sequence[float]
) -> None:
    """Set the weights that `top_k`, `top_p` and `min_p` cut to 0, of all rows in one pass.

    The host reads nothing, so it does not wait for a GPU. The weights that stay are those that stay with the
    thresholds above, one row at a time, which is faster on a CPU.

    Args:
        weights: `[rows, vocabulary]`, fp32; changed in place.
        top_k: Of each row; 0 cuts nothing.
        top_p: Of each row; 1 cuts nothing.
        min_p: Of each row, as a part of its largest weight; 0 cuts nothing.
    """
    size = weights.shape[1]
    counts = [k if 0 < k < size else size for k in top_k]
    last = to_device(np.array(counts, np.int64), weights.device)[:, None] - 1
    part, least = to_device(np.array([top_p, min_p]), weights.device)[:, :, None]
    ordered = weights.sort(-1, descending=True).values
    bound = ordered.gather(1, last)
    kept = torch.where(ordered >= bound, ordered, 0.0)
    sums = kept.double().cumsum(-1)
    place = (sums < part * sums[:, -1:]).sum(-1, keepdim=True).clamp_(max=size - 1)
    bound = torch.maximum(bound, torch.where(part < 1, kept.gather(1, place), 0.0))
    bound = torch.maximum(bound, (least * ordered[:, :1]).float())
    weights.copy_(torch.where(weights >= bound, weights, 0.0))


def draw(weights: Tensor, uniforms: Sequence[float]) -> Tensor:
    """Return the tokens that `invert` finds, `[rows]`, int64."""
    return invert(weights, to_device(np.array(uniforms, np.float64), weights.device))


def invert(weights: Tensor, uniforms: Tensor) -> Tensor:
    """Return the token of each row at which the cumulative sum of weights passes its part of the whole.

    Args:
        weights: `[rows, vocabulary]`, in a `Workspace`, with zeros for tokens that are cut.
        uniforms: Of each row, from 0 up to but not including 1: `[rows]`, fp64.

    Returns:
        `[rows]`, int64.
    """
    rows, size = weights.shape
    width = weights.stride(0)
    blocks = weights.as_strided((rows, width // _BLOCK, _BLOCK), (width, _BLOCK, 1))
    sums = blocks.sum(-1).double()
    reached = sums.cumsum(-1)
    goal = uniforms[:, None] * reached[:, -1:]
    block = torch.searchsorted(reached, goal, right=True).clamp_(max=sums.shape[1] - 1)
    # A block of zeros is never the first to pass a goal, but rounding may leave the goal at the very end.
    block = torch.minimum(block, _last_positive(sums)[:, None])
    within = blocks.gather(1, block[:, :, None].expand(-1, -1, _BLOCK))[:, 0].double().cumsum(-1)
    before = reached.gather(1, block) - sums.gather(1, block)
    part = ((goal - before) / sums.gather(1, block)).clamp_(0.0, 1.0)
    place = torch.searchsorted(within, part * within[:, -1:], right=True)
    last = torch.searchsorted(within, within[:, -1:].contiguous())  # the last one that is not zero
    tokens = block * _BLOCK + torch.minimum(place, last)
    return tokens[:, 0].clamp_(max=size - 1)


def uniform(seed: int, index: int) -> float:
    """Return a number from 0 up to but not including 1, of 53 bits, for position `index` of a seed.

    Source: SplitMix64 (Steele et al., Fast splittable pseudorandom number generators, 2014), used as a
    counter-based generator: numbers of neighbouring seeds and positions are independent.
    """
    mixed = _mix(_mix(seed & _MASK) + index)
    return (mixed >> 11) * 2.0**-53


def _mix(number: int) -> int:
    number = (number + 0x9E3779B97F4A7C15) & _MASK
    number = ((number ^ (number >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    number = ((number ^ (number >> 27)) * 0x94D049BB133111EB) & _MASK
    return number ^ (number >> 31)


def _reached(weights: Tensor, target: float) -> float:
    """Return the largest weight at which the sum of the weights, from the largest on, reaches a target."""
    ordered = weights.sort(descending=True).values
    place = int((ordered.double().cumsum(-1) < target).sum())
    return float(ordered[min(place, len(ordered) - 1)])


def _guesses(weights: Tensor, p: float, total: float) -> list[float]:
    """Return bounds that are probably close to the threshold, by the small weights of a part of the row."""
    if len(weights) < _SAMPLED * _BLOCK:
        return []
    some = weights[::_SAMPLED]
    ascending = some.sort().values
    place = int((ascending.cumsum(-1) < (1 - p) * total / _SAMPLED).sum())
    guess = float(ascending[min(place, len(some) - 1)])
    return [guess, guess * 1.05, guess / 1.05]


def _last_positive(sums: Tensor) -> Tensor:
    """Return the index of the last entry over 0 in each row."""
    numbers = torch.arange(sums.shape[-1], device=sums.device)
    return torch.where(sums > 0, numbers, 0).amax(-1)
