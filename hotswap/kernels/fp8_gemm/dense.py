"""One-byte weights on any device: some rows are made whole, multiplied, and forgotten, then the next.

So what is whole at a time fits a cache, and nothing of a weight's size is ever taken. A code becomes a number
by integer operations: a conversion from float8 takes PyTorch many times as long on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from hotswap.kernels.fp8_gemm.pack import Fp8Weight

__all__ = ["Multiply", "decode_codes", "decode_rows", "dense_linear"]

Multiply: TypeAlias = Callable[[Tensor, Tensor, Tensor | None], Tensor]

# What is whole at a time. On a CPU a few such blocks fit the caches of its cores; a GPU has to be kept busy.
_BLOCK_WEIGHTS: Final = {"cpu": 1 << 18}
_BLOCK_WEIGHTS_ELSEWHERE: Final = 1 << 25


def dense_linear(
    x: Tensor,
    weight: Fp8Weight,
    bias: Tensor | None = None,
    *,
    multiply: Multiply = F.linear,
    decode: Callable[[Fp8Weight, slice, torch.dtype], Tensor] | None = None,
) -> Tensor:
    """Return `x @ weight.T + bias`, as if the weights were whole: rounded to what they were, then as `x` is.

    Args:
        x: `[M, K]`, of a floating dtype.
        weight: Packed or as stored.
        bias: `[N]`.
        multiply: What multiplies by some rows of the weight, in the way of `torch.nn.functional.linear`.
        decode: What makes rows whole; `decode_rows` if it was not said.
    """
    make, out = decode or decode_rows, x.new_empty((len(x), len(weight.codes)))
    for rows in _blocks(weight):
        out[:, rows] = multiply(x, make(weight, rows, x.dtype), None if bias is None else bias[rows])
    return out


def decode_rows(weight: Fp8Weight, rows: slice, dtype: torch.dtype) -> Tensor:
    """Return some rows of a weight whole, `[rows, K]`, contiguous.

    The product of code and scale is rounded to float32, then to what the weight was, then to `dtype`.
    """
    codes = weight.codes[rows]
    values = _halves_of_words(codes)[:, : weight.width] if weight.is_packed else _halves(codes)
    return decode_codes(values, weight.scales[rows], weight.group).to(weight.dtype).to(dtype)


def decode_codes(codes: Tensor, scales: Tensor, group: int | None) -> Tensor:
    """Return `code * scale`, rounded once, to float32; exact for every code but the two NaNs.

    Args:
        codes: `[N, K]` float8_e4m3fn, or float16 that holds the codes' values times 2**-8.
        scales: `[N, groups]` float32.
        group: The neighbours along K that share a scale; `None` for all of a row.
    """
    halves = codes if codes.dtype is torch.float16 else _halves(codes)
    width = halves.shape[-1]
    wanted = max(width, 1) if group is None else group
    lacking = -width % wanted
    values = F.pad(halves.float(), (0, lacking)) if lacking else halves.float()
    grouped = values.view(len(values), -1, wanted).mul_((scales * 2.0**8)[..., None])
    whole = grouped.view(len(values), -1)
    return whole[:, :width].contiguous() if lacking else whole


def _halves(codes: Tensor) -> Tensor:
    """Codes as float16, 2**8 too small, subnormals and zeros included: their bits, moved to the same places.

    Ten times as fast on a CPU as a conversion from float8, and right also where float32 subnormals are
    flushed.
    """
    bits = codes.view(torch.int8).to(torch.int16)
    return bits.bitwise_left_shift_(7).bitwise_and_(-0x4001).view(torch.float16)


def _halves_of_words(words: Tensor) -> Tensor:
    """The same of packed codes, `[N, 4 * words]`."""
    even = (words << 8 & -0x7FFF8000) | (words << 7 & 0x3F803F80)
    odd = (words & -0x7FFF8000) | (words >> 1 & 0x3F803F80)
    return torch.stack((even, odd), dim=-1).view(torch.float16).view(len(words), -1)


def _blocks(weight: Fp8Weight) -> list[slice]:
    num_rows = len(weight.codes)
    block_weights = _BLOCK_WEIGHTS.get(weight.codes.device.type, _BLOCK_WEIGHTS_ELSEWHERE)
    step = max(1, block_weights // max(1, weight.width))
    return [slice(start, start + step) for start in range(0, num_rows, step)]
