"""FP8 linear layers on any device: dequantizes a block of rows, multiplies by it, then takes the next block.

A block fits a cache, and no buffer of the size of the weight is allocated. e4m3 values are converted by
integer operations: PyTorch's conversion from float8 is many times slower on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeAlias

import torch
from torch import Tensor

from hotswap.kernels.fp8_gemm.pack import Fp8Weight
from hotswap.kernels.fp8_gemm.workspace import Workspace

__all__ = ["Dequantize", "Multiply", "dense_linear", "dequantize", "dequantize_rows"]

Multiply: TypeAlias = Callable[[Tensor, Tensor, Tensor | None], Tensor]
Dequantize: TypeAlias = Callable[[Fp8Weight, slice, torch.dtype, Workspace | None], Tensor]

# Weights of a block. On a CPU a block fits the caches and is large enough to hide the cost of operator calls.
# A GPU needs larger blocks to be busy. Blocks of twice the size, 128 MiB in bf16, are 3% faster on an H100
# (five layers of Llamas, 128 to 4,096 rows).
_BLOCK_WEIGHTS: Final = {"cpu": 1 << 19}
_BLOCK_WEIGHTS_ELSEWHERE: Final = 1 << 25
# Rows of a block on a GPU are a multiple of this: with 5,041 rows, say, cuBLAS takes a kernel for results
# that are not aligned: seven times slower.
_BLOCK_ROWS_ELSEWHERE: Final = 256
# The bits of an e4m3 value, shifted to the fields of a float16, are too small by this factor.
_HALF_BIAS: Final = 2.0**8


def dequantize_rows(
    weight: Fp8Weight, rows: slice, dtype: torch.dtype, workspace: Workspace | None = None
) -> Tensor:
    """Dequantize some rows of a weight, to `[rows, K]`, contiguous.

    The product of value and scale is rounded to float32, then to the weight's original dtype, then to
    `dtype`. If a workspace is given, the result is part of it, and valid until the next call.
    """
    quantized, space = weight.qweight[rows], workspace or Workspace(weight.qweight.device)
    bits = space.rows(len(quantized), weight.width, torch.int16)
    if weight.is_packed:
        bits.copy_(_bits_of_words(quantized)[:, : weight.width])
    else:
        _shift_bits(quantized, bits)
    floats = space.rows(len(quantized), weight.width, torch.float32)
    values = _scaled(bits, weight.scales[rows], weight.group, floats)
    for wanted in (weight.dtype, dtype):
        if wanted is not values.dtype:
            values = space.rows(len(quantized), weight.width, wanted).copy_(values)
    return values


def dense_linear(
    x: Tensor,
    weight: Fp8Weight,
    bias: Tensor | None = None,
    *,
    workspace: Workspace | None = None,
    multiply: Multiply | None = None,
    dequantize_block: Dequantize = dequantize_rows,
) -> Tensor:
    """Return `x @ weight.T + bias` with dequantized weights.

    Weights are rounded to their original dtype, then to that of `x`.

    Args:
        x: `[M, K]`, of a floating-point dtype.
        weight: Packed or plain.
        bias: `[N]`.
        workspace: Memory for dequantized rows; allocated if not given.
        multiply: Function for the product with a block, with the signature of `torch.nn.functional.linear`;
            by default PyTorch's product, which writes to its columns of the result.
        dequantize_block: Function that dequantizes a block of rows.
    """
    space = workspace or Workspace(x.device)
    out = x.new_empty((len(x), len(weight.qweight)))
    for rows in _blocks(weight):
        dequantized = dequantize_block(weight, rows, x.dtype, space)
        part, its_bias = out[:, rows], None if bias is None else bias[rows]
        if multiply is not None:
            part[:] = multiply(x, dequantized, its_bias)
        elif its_bias is None:
            torch.mm(x, dequantized.t(), out=part)
        else:
            torch.addmm(its_bias, x, dequantized.t(), out=part)
    return out


def dequantize(quantized: Tensor, scales: Tensor, group: int | None) -> Tensor:
    """Return `value * scale`, rounded once, to float32; the conversion is exact for all finite values.

    Args:
        quantized: `[N, K]` float8_e4m3fn.
        scales: `[N, groups]` float32.
        group: Number of adjacent values along K that share a scale; `None` for a whole row.
    """
    bits = torch.empty(quantized.shape, dtype=torch.int16, device=quantized.device)
    _shift_bits(quantized, bits)
    return _scaled(
        bits, scales, group, torch.empty(quantized.shape, dtype=torch.float32, device=quantized.device)
    )


def _shift_bits(quantized: Tensor, bits: Tensor) -> None:
    """Convert e4m3 to the bits of float16 values that are too small by 2**8, subnormals and zeros included.

    Ten times as fast on a CPU as a conversion from float8, and correct if float32 subnormals are flushed.
    """
    bits.copy_(quantized.view(torch.int8))
    bits.bitwise_left_shift_(7).bitwise_and_(-0x4001)


def _bits_of_words(words: Tensor) -> Tensor:
    """Convert packed e4m3 to the same bits, `[N, 4 * words]` int16."""
    even = (words << 8 & -0x7FFF8000) | (words << 7 & 0x3F803F80)
    odd = (words & -0x7FFF8000) | (words >> 1 & 0x3F803F80)
    return torch.stack((even, odd), dim=-1).view(torch.int16).view(len(words), -1)


def _scaled(bits: Tensor, scales: Tensor, group: int | None, values: Tensor) -> Tensor:
    """Fill `values`, float32, with the float16 in `bits` times their scales, and return `values`."""
    values.copy_(bits.view(torch.float16))
    scales, width = scales * _HALF_BIAS, values.shape[1]
    grouped = 0 if group is None else width - width % group
    if group is not None and grouped:
        values[:, :grouped].view(len(values), -1, group).mul_(scales[:, : grouped // group, None])
    if grouped < width:
        values[:, grouped:].mul_(scales[:, -1:])
    return values


def _blocks(weight: Fp8Weight) -> list[slice]:
    """Return rows that are dequantized at a time: on a GPU blocks of about equal size, aligned for cuBLAS."""
    num_rows, width = len(weight.qweight), max(1, weight.width)
    device = weight.qweight.device.type
    if device in _BLOCK_WEIGHTS:
        step = max(1, _BLOCK_WEIGHTS[device] // width)
    else:
        num_blocks = -(-num_rows * width // _BLOCK_WEIGHTS_ELSEWHERE)
        step = -(-num_rows // (max(1, num_blocks) * _BLOCK_ROWS_ELSEWHERE)) * _BLOCK_ROWS_ELSEWHERE
    return [slice(start, start + step) for start in range(0, num_rows, step)]
