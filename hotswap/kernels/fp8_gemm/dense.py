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
from hotswap.kernels.fp8_gemm.workspace import Workspace

__all__ = ["Decode", "Multiply", "decode_codes", "decode_rows", "dense_linear"]

Multiply: TypeAlias = Callable[[Tensor, Tensor, Tensor | None], Tensor]
Decode: TypeAlias = Callable[[Fp8Weight, slice, torch.dtype, Workspace | None], Tensor]

# What is whole at a time. On a CPU it stays in the caches, and each step on it takes longer than to begin it;
# a GPU has to be kept busy.
_BLOCK_WEIGHTS: Final = {"cpu": 1 << 19}
_BLOCK_WEIGHTS_ELSEWHERE: Final = 1 << 25
# A code whose bits are moved to the places of a half is so much too small.
_HALF_BIAS: Final = 2.0**8


def decode_rows(
    weight: Fp8Weight, rows: slice, dtype: torch.dtype, workspace: Workspace | None = None
) -> Tensor:
    """Return some rows of a weight whole, `[rows, K]`, contiguous.

    The product of code and scale is rounded to float32, then to what the weight was, then to `dtype`. What is
    returned lies in the workspace, if there is one, and is valid until the next call.
    """
    codes, space = weight.codes[rows], workspace or Workspace(weight.codes.device)
    bits = space.rows(len(codes), weight.width, torch.int16)
    if weight.is_packed:
        bits.copy_(_bits_of_words(codes)[:, : weight.width])
    else:
        _move_bits(codes, bits)
    floats = space.rows(len(codes), weight.width, torch.float32)
    values = _scaled(bits, weight.scales[rows], weight.group, floats)
    for wanted in (weight.dtype, dtype):
        if wanted is not values.dtype:
            values = space.rows(len(codes), weight.width, wanted).copy_(values)
    return values


def dense_linear(
    x: Tensor,
    weight: Fp8Weight,
    bias: Tensor | None = None,
    *,
    workspace: Workspace | None = None,
    multiply: Multiply = F.linear,
    decode: Decode = decode_rows,
) -> Tensor:
    """Return `x @ weight.T + bias`, as if the weights were whole: rounded to what they were, then as `x` is.

    Args:
        x: `[M, K]`, of a floating dtype.
        weight: Packed or as stored.
        bias: `[N]`.
        workspace: Where rows are made whole; memory of its own if it was not said.
        multiply: What multiplies by some rows of the weight, in the way of `torch.nn.functional.linear`.
        decode: What makes rows whole.
    """
    space = workspace or Workspace(x.device)
    out = x.new_empty((len(x), len(weight.codes)))
    for rows in _blocks(weight):
        whole = decode(weight, rows, x.dtype, space)
        out[:, rows] = multiply(x, whole, None if bias is None else bias[rows])
    return out


def decode_codes(codes: Tensor, scales: Tensor, group: int | None) -> Tensor:
    """Return `code * scale`, rounded once, to float32; exact for every code but the two NaNs.

    Args:
        codes: `[N, K]` float8_e4m3fn.
        scales: `[N, groups]` float32.
        group: The neighbours along K that share a scale; `None` for all of a row.
    """
    bits = torch.empty(codes.shape, dtype=torch.int16, device=codes.device)
    _move_bits(codes, bits)
    return _scaled(bits, scales, group, torch.empty(codes.shape, dtype=torch.float32, device=codes.device))


def _move_bits(codes: Tensor, bits: Tensor) -> None:
    """Fill `bits` with codes as halves, 2**8 too small, subnormals and zeros included.

    Ten times as fast on a CPU as a conversion from float8, and right also where float32 subnormals are
    flushed.
    """
    bits.copy_(codes.view(torch.int8))
    bits.bitwise_left_shift_(7).bitwise_and_(-0x4001)


def _bits_of_words(words: Tensor) -> Tensor:
    """The same of packed codes, `[N, 4 * words]` int16."""
    even = (words << 8 & -0x7FFF8000) | (words << 7 & 0x3F803F80)
    odd = (words & -0x7FFF8000) | (words >> 1 & 0x3F803F80)
    return torch.stack((even, odd), dim=-1).view(torch.int16).view(len(words), -1)


def _scaled(bits: Tensor, scales: Tensor, group: int | None, values: Tensor) -> Tensor:
    """Fill `values`, float32, with halves times the scale of their group, and return them."""
    values.copy_(bits.view(torch.float16))
    scales, width = scales * _HALF_BIAS, values.shape[1]
    whole = 0 if group is None else width - width % group
    if group is not None and whole:
        values[:, :whole].view(len(values), -1, group).mul_(scales[:, : whole // group, None])
    if whole < width:
        values[:, whole:].mul_(scales[:, -1:])
    return values


def _blocks(weight: Fp8Weight) -> list[slice]:
    num_rows = len(weight.codes)
    block_weights = _BLOCK_WEIGHTS.get(weight.codes.device.type, _BLOCK_WEIGHTS_ELSEWHERE)
    step = max(1, block_weights // max(1, weight.width))
    return [slice(start, start + step) for start in range(0, num_rows, step)]
