"""The latency model of a device, fitted to measurements of an engine on it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf
from statistics import fmean, median

from hotswap.errors import ConfigError
from hotswap.hardware import DeviceProfile
from hotswap.profiling.least_squares import nonnegative
from hotswap.profiling.profiles import Profile

__all__ = ["Fit", "Measurements", "StepSample", "fit_profile", "fit_steps"]

# Samples without which there is nothing to fit.
_FEWEST = 10
# Parts that the samples are cut into; each is predicted by a fit of the others.
_FOLDS = 5
# Of what a load takes, at least this share is the device's own, however long the store alone takes.
_LEAST_SHARE = 0.1
# How often the errors of samples are weighed anew by what the fit before predicts.
_WEIGHINGS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSample:
    """How long one kind of step took.

    Attributes:
        seconds: The mean of several.
        num_decodes: Requests that got their next token.
        context: Tokens in KV blocks that these attended to, all together.
        prompts: Tokens of each prompt that was computed whole, to its first token.
        joined: How many of the decodes were their requests' first.
        left: How many requests had left since the others decoded last.
    """

    seconds: float
    num_decodes: int = 0
    context: int = 0
    prompts: tuple[int, ...] = ()
    joined: int = 0
    left: int = 0

    def predicted_s(self, device: DeviceProfile) -> float:
        """What the step would take on a device."""
        steady_s = device.step_s(
            tokens=self.num_tokens,
            batch=self.num_decodes + len(self.prompts),
            context=self.context,
            prefill=sum(self.prompts),
            prefill_squares=self.num_squares,
            chunks=len(self.prompts),
        )
        return steady_s + device.turnover_s(joined=self.joined, left=self.left)

    @property
    def num_tokens(self) -> int:
        """Decodes, and all tokens of prompts."""
        return self.num_decodes + sum(self.prompts)

    @property
    def num_squares(self) -> int:
        """The sum of squares of the prompts' lengths."""
        return sum(tokens * tokens for tokens in self.prompts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurements:
    """What was seen of an engine with one model; see `measure_engine`.

    Attributes:
        engine: Its name.
        model: The model's.
        weight_bytes: Of the model.
        kv_tokens: What all its KV blocks hold.
        kv_bytes_per_token: Of the model.
        memory_bytes: Of the engine.
        steps: Kinds of steps.
        load_s: Seconds of each load.
        read_s: Seconds in which the store alone gave the same bytes, each time.
        unload_s: Seconds of each unload.
    """

    engine: str
    model: str
    weight_bytes: int
    kv_tokens: int
    kv_bytes_per_token: int
    memory_bytes: int
    steps: tuple[StepSample, ...]
    load_s: tuple[float, ...] = ()
    read_s: tuple[float, ...] = ()
    unload_s: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """A profile, and how far it is off.

    Attributes:
        profile: What was fitted.
        mean_error: The mean of how far off, relative, steps were that the fit had not seen.
        max_error: The largest of these.
        num_steps: How many kinds of steps there were.
    """

    profile: Profile
    mean_error: float
    max_error: float
    num_steps: int


def fit_profile(measured: Measurements, *, name: str = "", like: DeviceProfile | None = None) -> Fit:
    """Fit the latency model to measurements, and say how well it predicts steps that it has not seen.

    Steps are fitted by `fit_steps`. Its error is taken over five parts of the samples, each predicted by a
    fit of the other four. Of a load, what the store needs for the same bytes alone is the store's; what is
    left, a tenth at least, is the device's bandwidth. Adapters and KV blocks that move were not measured:
    their times are those of `like`.

    Args:
        measured: What was seen.
        name: What the device is called; the engine's name if left out.
        like: Where what was not measured comes from.

    Raises:
        ConfigError: there are too few kinds of steps.
    """
    device = fit_steps(measured.steps, replace(like or DeviceProfile(), name=name or measured.engine))
    if measured.load_s:
        load_s = median(measured.load_s)
        own_s = max(load_s - (median(measured.read_s) if measured.read_s else 0.0), _LEAST_SHARE * load_s)
        device = replace(device, load_bytes_per_s=max(measured.weight_bytes, 1) / own_s)
    if measured.unload_s:
        device = replace(device, unload_s=median(measured.unload_s))
    errors = _unseen_errors(measured.steps, device)
    num_blocks = max(1, measured.kv_tokens // 16)
    room = measured.weight_bytes + num_blocks * 16 * measured.kv_bytes_per_token
    profile = Profile(
        device=replace(device, memory_bytes=max(measured.memory_bytes, room)),
        weight_bytes=measured.weight_bytes,
        kv_blocks=num_blocks,
        kv_bytes_per_token=measured.kv_bytes_per_token,
        source=f"measured on engine {measured.engine!r} with model {measured.model!r}",
        error=f"steps it was not fitted to: {fmean(errors):.1%} in the mean, {max(errors):.1%} at most",
    )
    return Fit(
        profile=profile, mean_error=fmean(errors), max_error=max(errors), num_steps=len(measured.steps)
    )


def fit_steps(steps: Sequence[StepSample], like: DeviceProfile | None = None) -> DeviceProfile:
    """Return the device whose steps are nearest to the samples, each counted by its relative error.

    The model is that of `DeviceProfile`, without `prefill_token_s`, which prompts that are computed whole
    cannot tell from `token_s`. Which samples lie on the weight-bound floor is tried for every size of step,
    and then corrected until the fit agrees with itself; for each choice the rest is linear, and solved with
    no coefficient below zero. An error is relative to the time that was predicted: one relative to the time
    that was seen would have what was disturbed count for less, and come out too quick in the mean.
    Coefficients that the samples cannot tell apart are shared out somehow: what counts is the sum.

    Raises:
        ConfigError: there are fewer than ten samples, or one took no time.
    """
    if len(steps) < _FEWEST:
        raise ConfigError(f"{len(steps)} kinds of steps are too few for a fit; measure {_FEWEST} or more.")
    if any(not 0 < step.seconds < inf for step in steps):
        raise ConfigError("A step took no time, or for ever; measure again.")
    return _nearest(steps, like or DeviceProfile())


def _nearest(steps: Sequence[StepSample], like: DeviceProfile) -> DeviceProfile:
    sizes = sorted({step.num_tokens for step in steps})
    tried: set[tuple[bool, ...]] = set()
    best, least, chosen = like, inf, list[bool]()
    seen_s = [step.seconds for step in steps]
    for edge in (0, *(size + 1 for size in sizes)):
        on_floor = tuple(step.num_tokens < edge for step in steps)
        while on_floor not in tried:
            tried.add(on_floor)
            device = _fitted(steps, on_floor, like, seen_s)
            error = sum((step.predicted_s(device) / step.seconds - 1) ** 2 for step in steps)
            if error < least:
                best, least, chosen = device, error, list(on_floor)
            on_floor = tuple(_is_on_floor(step, device) for step in steps)
    for _ in range(_WEIGHINGS):
        predicted_s = [step.predicted_s(best) for step in steps]
        if min(predicted_s) <= 0:
            break
        best = _fitted(steps, chosen, like, predicted_s)
    return best


def _fitted(
    steps: Sequence[StepSample], on_floor: Sequence[bool], like: DeviceProfile, scales_s: Sequence[float]
) -> DeviceProfile:
    """The least squares of errors in shares of a scale for each sample."""
    rows = [
        [value / scale_s for value in _row(step, is_floor)]
        for step, is_floor, scale_s in zip(steps, on_floor, scales_s, strict=True)
    ]
    targets = [step.seconds / scale_s for step, scale_s in zip(steps, scales_s, strict=True)]
    floor_s, floor_token_s, base_s, token_s, *shared = nonnegative(rows, targets)
    request_s, context_token_s, decode_s, square_s, chunk_s, join_s, leave_s = shared
    return replace(
        like,
        floor_s=floor_s,
        floor_token_s=floor_token_s,
        base_s=base_s,
        token_s=token_s,
        request_s=request_s,
        context_token_s=context_token_s,
        decode_s=decode_s,
        prefill_token_s=0.0,
        prefill_square_s=square_s,
        chunk_s=chunk_s,
        join_s=join_s,
        leave_s=leave_s,
    )


def _row(step: StepSample, is_floor: bool) -> tuple[float, ...]:
    """What each coefficient counts in a step: those of the floor, those of the line, and what both share."""
    work = (1.0, float(step.num_tokens))
    neither = (0.0, 0.0)
    batch = step.num_decodes + len(step.prompts)
    shared = (batch, step.context, step.num_decodes > 0, step.num_squares)
    turnover = (len(step.prompts), step.joined, step.left)
    return (
        *(work if is_floor else neither),
        *(neither if is_floor else work),
        *map(float, (*shared, *turnover)),
    )


def _is_on_floor(step: StepSample, device: DeviceProfile) -> bool:
    floor_s = device.floor_s + step.num_tokens * device.floor_token_s
    return floor_s >= device.base_s + step.num_tokens * device.token_s


def _unseen_errors(steps: Sequence[StepSample], like: DeviceProfile) -> list[float]:
    """How far off, relative, a fit of four parts is on the fifth; neighbours go into different parts."""
    ordered = sorted(steps, key=lambda step: (step.num_decodes, step.num_tokens, step.context))
    parts = [ordered[first::_FOLDS] for first in range(_FOLDS)]
    errors: list[float] = []
    for number, part in enumerate(parts):
        others = [*itertools.chain.from_iterable(parts[:number] + parts[number + 1 :])]
        device = _nearest(others, like)
        errors += [abs(step.predicted_s(device) / step.seconds - 1) for step in part]
    return errors
