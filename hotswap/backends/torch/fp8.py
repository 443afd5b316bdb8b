"""FP8 e4m3 with scales: how a row of weights becomes codes of one byte, and what the codes mean.

A weight is `code * scale`, where each group of consecutive weights of a row, along K, has one scale: the
largest magnitude of the group divided by 448, the largest code. So the relative error is at most half a unit
in the last of three stored bits, 2**-4, and the absolute error at most `scale * 2**-10` where that is more.

Scales are float32. bfloat16 would save another 0.8 % of a bf16 model's bytes, and lose no accuracy worth
naming; but with float32 the largest weight of a group comes back as it was, and kernels multiply their fp32
sums by scales as they are stored.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from hotswap.kernels.fp8_gemm import decode_codes

__all__ = ["CODE_DTYPE", "SCALE_DTYPE", "SCALE_SUFFIX", "SCHEMES", "Scheme", "decode", "encode", "row_blocks"]

CODE_DTYPE: Final = torch.float8_e4m3fn
SCALE_DTYPE: Final = torch.float32
SCALE_SUFFIX: Final = ".scale"

_LARGEST = torch.finfo(CODE_DTYPE).max
# Under this, float32 loses bits, and some processors are set to lose all of them. It is also what a group of
# zeros has, so that no scale is ever 0. Weights of at most 2**-136 become zeros, which no sum notices.
_LEAST_SCALE = torch.finfo(SCALE_DTYPE).tiny
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
        scale = (groups.abs().amax(-1) / _LARGEST).clamp_min(_LEAST_SCALE)
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
    return decode_codes(codes, scales, scheme.group)


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
