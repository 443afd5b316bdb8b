# mypy: ignore-errors
# pyright: basic, reportMissingImports=false
"""The recipe for one-byte weights that is usually published, to compare with: one row of weights a step.

As in DeepSpeed's `fp_quantizer/fp8_gemm_triton.py`: weights lie `[K, N]`, one scale serves 128 columns of a
row and is multiplied into every weight, quantized values become numbers byte by byte with an addition to the
exponent, and the next tile of weights is fetched by hand one step ahead. Zeros and subnormals come out wrong.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from hotswap.kernels.interpreter import dot, narrow, widen

__all__ = ["SCALE_COLUMNS", "published_linear"]

SCALE_COLUMNS = 128


@triton.jit
def published_kernel(
    x_ptr,
    w_ptr,
    s_ptr,
    y_ptr,
    M,
    N,
    K,
    x_row,
    w_row,
    s_row,
    y_row,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """`y = x @ (quantized * scales)`; N a multiple of BLOCK_N, and that divides a scale's columns."""
    rm = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    rn = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    rk = tl.arange(0, BLOCK_K)
    x_at = x_ptr + tl.where(rm < M, rm, 0)[:, None] * x_row + rk[None, :]
    w_at = w_ptr + rk[:, None] * w_row + rn[None, :]
    s_at = s_ptr + rk * s_row + tl.program_id(1) * BLOCK_N // 128
    quantized = tl.load(w_at, mask=rk[:, None] < K, other=0)
    scales = tl.load(s_at, mask=rk < K, other=0.0)
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in range(0, K, BLOCK_K):
        x = tl.load(x_at + k, mask=rk[None, :] < K - k, other=0.0)
        # Triton keeps eight bits where a code is shifted, so that it must be widened first.
        bits = quantized.to(tl.uint16)
        bits = (((bits & 0x80) << 8) | ((bits & 0x7F) << 4)) + 0x3C00
        values = widen(bits.to(tl.bfloat16, bitcast=True)) * scales[:, None]
        weights = narrow(values, tl.bfloat16)
        w_at += BLOCK_K * w_row
        s_at += BLOCK_K * s_row
        quantized = tl.load(w_at, mask=rk[:, None] < K - k - BLOCK_K, other=0)
        scales = tl.load(s_at, mask=rk < K - k - BLOCK_K, other=0.0)
        total = dot(x, weights, total)
    inside = (rm[:, None] < M) & (rn[None, :] < N)
    tl.store(y_ptr + rm[:, None] * y_row + rn[None, :], narrow(total, tl.bfloat16), mask=inside)


def published_linear(
    x: torch.Tensor, quantized: torch.Tensor, scales: torch.Tensor, out: torch.Tensor
) -> None:
    """Write `x @ (quantized * scales)` to `out`, with the tiles that the recipe has for a number of rows.

    Args:
        x: `[M, K]` bfloat16.
        quantized: `[K, N]` uint8.
        scales: `[K, N / 128]` float32.
        out: `[M, N]` bfloat16.
    """
    (num_rows, width), num_columns = x.shape, quantized.shape[1]
    tall = next((rows for rows in (16, 32, 64) if num_rows <= rows), 128)
    block_m, block_n, warps, stages = (256, 128, 8, 3) if num_rows >= 256 else (tall, 64, 4, 4)
    published_kernel[(triton.cdiv(num_rows, block_m), num_columns // block_n)](
        x,
        quantized,
        scales,
        out,
        num_rows,
        num_columns,
        width,
        x.stride(0),
        quantized.stride(0),
        scales.stride(0),
        out.stride(0),
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_K=128,
        num_warps=warps,
        num_stages=stages,
    )
