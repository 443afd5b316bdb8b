"""FP8 e4m3 with scales: how a row of weights becomes codes of one byte, and what the codes mean.

A weight is `code * scale`, where each group of consecutive weights of a row, along K, has one scale: at least
the largest magnitude of the group divided by 448, the largest code, and less than about twice that. So the
relative error is at most half a unit in the last of three stored bits, 2**-4, and the absolute error at most
`scale * 2**-10` where that is more.

Scales are float32 numbers of four significant bits, as many as codes have. Their products have eight, which
is what bfloat16 holds: a weight that is made whole for a bf16 product is the very one that a kernel computes
with, which multiplies its sums by the scale. An octave has eight such numbers, and a group gets that of the
eight which leaves its weights the least off, in the sum of squares. That is closer than the largest magnitude
divided by 448, by 8 % in groups of 128 of a normal distribution, and takes 15 times as long to code: 64
million weights a second on one thread of an AMD EPYC.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from hotswap.kernels.fp8_gemm import dequantize

__all__ = ["CODE_DTYPE", "SCALE_DTYPE", "SCALE_SUFFIX", "SCHEMES", "Scheme", "decode", "encode", "row_blocks"]

CODE_DTYPE: Final = torch.float8_e4m3fn
SCALE_DTYPE: Final = torch.float32
SCALE_SUFFIX: Final = ".scale"

_LARGEST = torch.finfo(CODE_DTYPE).max
# Under this, float32 loses bits, and some processors are set to lose all of them. It is also what a group of
# zeros has, so that no scale is ever 0. Weights of at most 2**-136 become zeros, which no sum notices.
_LEAST_SCALE = torch.finfo(SCALE_DTYPE).tiny
# Numbers of four significant bits between one power of two and the next.
_OCTAVE = 8
# A few such blocks fit the cache of a core, and the steps of a conversion then do not wait for memory. On a
# GPU, the steps must be long enough that it does not wait for the host.
_BLOCK_WEIGHTS: Final = {"cpu": 1 << 18}
_BLOCK_WEIGHTS_ELSEWHERE = 1 << 23


@dataclass(frozen=True, slots=True)
class Scheme:
    """How weights are grouped; `name` is what manifests and commands call it, and is never reused.

    `group` is the number of weights that share a scale, `None` for all of a row, which is one output channel
    of a linear layer. Where K is no multiple of it, the last group of each row is shorter.
    """

    name: str
    group: int | None

    def width(self, k: int) -> int:
        """The weights of a whole group in rows of `k`."""
        return max(k, 1) if self.group is None else self.group

    def num_groups(self, k: int) -> int:
        """The scales of a row of `k` weights."""
        return -(-k // self.width(k))


SCHEMES: Final[Mapping[str, Scheme]] = {
    scheme.name: scheme for scheme in (Scheme("fp8-e4m3", 128), Scheme("fp8-e4m3-channel", None))
}


def encode(weights: Tensor, scheme: Scheme) -> tuple[Tensor, Tensor]:
    """Return codes and scales of weights; rows do not depend on each other, so parts of them may come.

    On the meta device too, for dtypes and shapes. Beside the results it needs a few MiB, whatever the size.
    Rounds to nearest, ties to even; zeros keep their sign. A group with an infinity or a NaN gets a scale
    that is not finite, and codes that mean nothing.

    Args:
        weights: `[..., K]`, of a floating dtype.
        scheme: How they are grouped.

    Returns:
        `[..., K]` float8_e4m3fn and `[..., num_groups]` float32, both contiguous.
    """
    k = weights.shape[-1]
    codes = weights.new_empty(weights.shape, dtype=CODE_DTYPE)
    scales = weights.new_empty((*weights.shape[:-1], scheme.num_groups(k)), dtype=SCALE_DTYPE)
    if weights.is_meta or not weights.numel():
        return codes, scales
    rows, code_rows, scale_rows = weights.reshape(-1, k), codes.view(-1, k), scales.view(-1, scales.shape[-1])
    for block in row_blocks(rows):
        groups = _grouped(rows[block].float(), scheme.width(k))
        scale = _closest_scales(groups)
        # No quotient is over 448 by more than its last bit, which rounds to 448.
        code_rows[block] = (groups / scale[..., None]).flatten(-2)[:, :k].to(CODE_DTYPE)
        scale_rows[block] = scale
    return codes, scales


def decode(codes: Tensor, scales: Tensor, scheme: Scheme) -> Tensor:
    """Return `code * scale`, rounded once, to float32; exact for every code but the two NaNs.

    Args:
        codes: `[N, K]` float8_e4m3fn.
        scales: `[N, num_groups]` float32.
        scheme: How the weights are grouped.

    Returns:
        `[N, K]` float32.
    """
    return dequantize(codes, scales, scheme.group)


def _closest_scales(groups: Tensor) -> Tensor:
    """The scale of each of `[..., width]` groups with which its codes are the least off."""
    least, *others = _scales(groups)
    wanted = groups / least[..., None]  # so that no square is too small for a number
    scales, least_off = least, _off(wanted, torch.ones_like(least), wanted)
    for scale in others:
        off = _off(groups / scale[..., None], scale / least, wanted)
        closer = off < least_off
        scales, least_off = torch.where(closer, scale, scales), torch.where(closer, off, least_off)
    return scales


def _scales(groups: Tensor) -> Iterator[Tensor]:
    """What the scales of groups may be: the least that no weight is too large for, and seven more."""
    mantissa, exponent = torch.frexp((groups.abs().amax(-1) / _LARGEST).clamp_min(_LEAST_SCALE))
    steps = torch.ceil(mantissa * 2 * _OCTAVE)  # of which an octave has eight, from 8 to 16
    for more in range(_OCTAVE):
        count = steps + more
        count = torch.where(count > 2 * _OCTAVE, 2 * (count - _OCTAVE), count)
        yield torch.ldexp(count / (2 * _OCTAVE), exponent)


def _off(quotients: Tensor, scales: Tensor, wanted: Tensor) -> Tensor:
    """How far codes of `quotients`, times scales, are from what was wanted: the sum of squares of each group.

    In float64, where no order of the terms makes another of two the less.
    """
    codes = quotients.to(CODE_DTYPE).view(-1, wanted.shape[-1])
    found = dequantize(codes, scales.view(-1, 1), None).view_as(wanted)
    return found.sub_(wanted).square_().sum(-1, dtype=torch.float64)


def row_blocks(rows: Tensor) -> Iterator[slice]:
    """The first dimension of a tensor in parts of a size that its device computes with best."""
    block_weights = _BLOCK_WEIGHTS.get(rows.device.type, _BLOCK_WEIGHTS_ELSEWHERE)
    step = max(1, block_weights * len(rows) // max(1, rows.numel()))
    return (slice(start, start + step) for start in range(0, len(rows), step))


def _grouped(rows: Tensor, width: int) -> Tensor:
    """`[N, K]` as `[N, num_groups, width]`, with zeros where the last group is short."""
    lacking = -rows.shape[-1] % width
    padded = F.pad(rows, (0, lacking)) if lacking else rows
    return padded.view(len(rows), -1, width)
