"""The Triton kernels of FP8 weights: a matrix product that converts them in registers, and a dequantization.

e4m3 values are converted two at a time: both halves of a 32-bit register are shifted and masked at once,
which needs no float8 type, no inline assembly, and less than half the instructions of a conversion byte by
byte. A shifted value differs from the exact one by the exponent bias only; a multiplication by a power of two
corrects it, also for subnormals and zeros. The usual addition to the exponent makes zeros nonzero.

Scales are applied to the float32 sum of a group, not to the weights, which would be rounded to 16 bits.
"""

# mypy: ignore-errors
# pyright: basic, reportMissingImports=false, reportGeneralTypeIssues=false
from __future__ import annotations

import triton
import triton.language as tl

from hotswap.kernels.interpreter import INTERPRETED, dot, narrow, widen

__all__ = ["convert_words", "dequantize_kernel", "fp8_gemm_kernel"]

_SIGNS = tl.constexpr(-0x7FFF8000)  # 0x80008000 as int32
_BFLOATS = tl.constexpr(0x07F007F0)
_HALVES = tl.constexpr(0x3F803F80)
_BFLOAT_BIAS = tl.constexpr(2.0**120)
_HALF_BIAS = tl.constexpr(2.0**8)


@triton.jit
def convert_words(words, DTYPE: tl.constexpr, REBIAS: tl.constexpr):
    """Convert `[R, C]` words to `[R, 4 * C]` values; without `REBIAS` 2**8 (fp16) or 2**120 too small."""
    if DTYPE == tl.bfloat16:
        even = ((words << 8) & _SIGNS) | ((words << 4) & _BFLOATS)
        odd = (words & _SIGNS) | ((words >> 4) & _BFLOATS)
    else:
        even = ((words << 8) & _SIGNS) | ((words << 7) & _HALVES)
        odd = (words & _SIGNS) | ((words >> 1) & _HALVES)
    first = even.to(tl.int16).to(DTYPE, bitcast=True)
    second = (even >> 16).to(tl.int16).to(DTYPE, bitcast=True)
    third = odd.to(tl.int16).to(DTYPE, bitcast=True)
    fourth = (odd >> 16).to(tl.int16).to(DTYPE, bitcast=True)
    pairs = tl.join(tl.join(first, second), tl.join(third, fourth))
    values = tl.reshape(tl.permute(pairs, (0, 1, 3, 2)), (words.shape[0], words.shape[1] * 4))
    if REBIAS:
        values = _rebias(values, DTYPE)
    return values


@triton.jit
def _rebias(values, DTYPE: tl.constexpr):
    if DTYPE == tl.float16:
        return values * tl.full((), _HALF_BIAS, tl.float16)
    else:
        return _times_bfloat_bias(values)


@triton.jit
def _times_bfloat_bias(values):
    # The interpreter multiplies bf16 incorrectly.
    if INTERPRETED:
        return narrow(widen(values) * _BFLOAT_BIAS, tl.bfloat16)
    else:
        return values * tl.full((), _BFLOAT_BIAS, tl.bfloat16)


@triton.jit
def _tile_of(program, num_m, num_n, GROUP_M: tl.constexpr):
    """Return the tile of a program: `GROUP_M` tiles of rows at a time share weights in the L2 cache."""
    first = program // (GROUP_M * num_n) * GROUP_M
    size = tl.minimum(num_m - first, GROUP_M)
    place = program % (GROUP_M * num_n)
    return first + place % size, place // size


@triton.jit
def _accumulate(total, x, w, s_at, k, GROUP: tl.constexpr, WEIGHTS_LEFT: tl.constexpr):
    """Return `total + x @ w.T`, or its transpose, with the scale of the step's group if `GROUP` is not 0."""
    if GROUP > 0:
        scale = tl.load(s_at + k // GROUP)
        none = tl.zeros(total.shape, tl.float32)
        if WEIGHTS_LEFT:
            return total + dot(w, x, none) * scale[:, None]
        else:
            return total + dot(x, tl.trans(w), none) * scale[None, :]
    elif WEIGHTS_LEFT:
        return dot(w, x, total)
    else:
        return dot(x, tl.trans(w), total)


@triton.jit
def _write(y_ptr, total, b_at, rm, rn, M, N, y_row, HAS_BIAS: tl.constexpr):
    if HAS_BIAS:
        total += widen(tl.load(b_at))[None, :]
    y_at = y_ptr + rm.to(tl.int64)[:, None] * y_row + rn[None, :]
    inside = (rm[:, None] < M) & (rn[None, :] < N)
    tl.store(y_at, narrow(total, y_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["M"])
def fp8_gemm_kernel(
    x_ptr,
    w_ptr,
    s_ptr,
    b_ptr,
    y_ptr,
    part_ptr,
    count_ptr,
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
    GROUP: tl.constexpr,
    SPLIT: tl.constexpr,
    WEIGHTS_LEFT: tl.constexpr,
    REBIAS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    EVEN_N: tl.constexpr,
    EVEN_K: tl.constexpr,
    STAGES: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """`y[M, N] = x[M, K] @ W[N, K].T + b`, with W as rows of `w_row` words and float32 scales.

    A scale applies to `GROUP` values along K, or to the row if that is 0. Grid: (tiles, parts of K). With
    several parts, each program stores its float32 sums in `part_ptr`; the program that increments the tile's
    counter last adds them in the order of K, so the bits do not depend on the order of the programs, and
    resets the counter to zero, which it must be at the start. M is not specialised on, so a new batch size
    compiles nothing.
    """
    tile = tl.program_id(0)
    part = tl.program_id(1)
    num_parts = tl.num_programs(1)
    tile_m, tile_n = _tile_of(tile, tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N), 8)
    rm = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    rn = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    rk = tl.arange(0, BLOCK_K)
    rw = tl.arange(0, BLOCK_K // 4)
    # Rows beyond M and N read row 0 instead; their results are never written.
    row_m = tl.where(rm < M, rm, 0).to(tl.int64)
    if EVEN_N:
        row_n = rn.to(tl.int64)
    else:
        row_n = tl.where(rn < N, rn, 0).to(tl.int64)
    w_at = w_ptr + row_n[:, None] * w_row
    s_at = s_ptr + row_n * s_row
    if WEIGHTS_LEFT:
        x_at = x_ptr + row_m[None, :] * x_row + rk[:, None]
        x_rk = rk[:, None]
        total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    else:
        x_at = x_ptr + row_m[:, None] * x_row + rk[None, :]
        x_rk = rk[None, :]
        total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    steps = tl.cdiv(tl.cdiv(K, BLOCK_K), num_parts)
    start = part * steps * BLOCK_K
    for k in tl.range(start, tl.minimum(start + steps * BLOCK_K, K), BLOCK_K, num_stages=STAGES):
        if EVEN_K:
            words = tl.load(w_at + (k // 4 + rw)[None, :])
            x = tl.load(x_at + k)
        else:
            words = tl.load(w_at + (k // 4 + rw)[None, :], mask=(k // 4 + rw)[None, :] < w_row, other=0)
            x = tl.load(x_at + k, mask=k + x_rk < K, other=0.0)
        w = convert_words(words, DTYPE, REBIAS)
        total = _accumulate(total, x, w, s_at, k, GROUP, WEIGHTS_LEFT)
    if WEIGHTS_LEFT:
        total = tl.trans(total)
    if GROUP == 0:
        total *= tl.load(s_at)[None, :]
    if not REBIAS:
        total *= _HALF_BIAS
    if SPLIT:
        # Sums are stored tile by tile, so that they are copied 16 bytes at a time for any N.
        is_row = (rm < M)[:, None]
        part_at = part_ptr + tile.to(tl.int64) * (BLOCK_M * BLOCK_N)
        part_at += tl.arange(0, BLOCK_M)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
        plane = tl.num_programs(0).to(tl.int64) * (BLOCK_M * BLOCK_N)
        tl.store(part_at + part * plane, total, mask=is_row)
        tl.debug_barrier()
        before = tl.atomic_add(count_ptr + tile, 1, sem="acq_rel", scope="gpu")
        if before == num_parts - 1:
            total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
            for other in range(0, num_parts):
                # Bypass the L1 cache, which may have stale data.
                total += tl.load(part_at + other * plane, mask=is_row, other=0.0, cache_modifier=".cg")
            _write(y_ptr, total, b_ptr + row_n, rm, rn, M, N, y_row, HAS_BIAS)
            tl.store(count_ptr + tile, 0)
    else:
        _write(y_ptr, total, b_ptr + row_n, rm, rn, M, N, y_row, HAS_BIAS)


@triton.jit(do_not_specialize=["N"])
def dequantize_kernel(
    w_ptr,
    s_ptr,
    y_ptr,
    N,
    K,
    w_row,
    s_row,
    y_row,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Dequantize: `y[N, K]` = value times scale, rounded to `DTYPE`. Grid: (blocks of K, blocks of N)."""
    k = tl.program_id(0) * BLOCK_K
    rn = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    rw = tl.arange(0, BLOCK_K // 4)
    rk = k + tl.arange(0, BLOCK_K)
    there = rn < N
    row_n = rn.to(tl.int64)
    words = tl.load(
        w_ptr + row_n[:, None] * w_row + (k // 4 + rw)[None, :],
        mask=there[:, None] & (k // 4 + rw < w_row)[None, :],
        other=0,
    )
    if GROUP > 0:
        scale = tl.load(s_ptr + row_n * s_row + k // GROUP, mask=there, other=0.0)
    else:
        scale = tl.load(s_ptr + row_n * s_row, mask=there, other=0.0)
    values = widen(convert_words(words, DTYPE, True)) * scale[:, None]
    y_at = y_ptr + row_n[:, None] * y_row + rk[None, :]
    tl.store(y_at, narrow(values, DTYPE), mask=there[:, None] & (rk < K)[None, :])
