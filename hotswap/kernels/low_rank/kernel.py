"""LoRA of single rows on a CPU, compiled by numba.

A row is multiplied by eight ranks of its adapter at a time, and then eight ranks at a time are added to all
outputs: both steps read the ranks sequentially and are bound by memory bandwidth. Four rows with the same
adapter, as in a prompt, are computed together, with the same bits. Each thread takes a few spans at a time
from a shared counter.
"""

# mypy: ignore-errors
# pyright: basic, reportCallIssue=false, reportArgumentType=false
from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numba import njit, types

from hotswap.kernels.compiling import compiled_for_c, specialized
from hotswap.kernels.conversion import converters
from hotswap.kernels.low_rank.sizes import ALIGNMENT, TOGETHER
from hotswap.kernels.low_rank.vectors import expand
from hotswap.kernels.simd import LANES, dots, fetch_add, pointer_to

__all__ = ["build"]

_FEW = 4  # ranks at a time for several rows: all sums stay in registers
_OPTIONS: Any = {"nogil": True, "error_model": "numpy"}

_integers = pointer_to(types.int64)
_ints = pointer_to(types.int32)
_singles = pointer_to(types.float32)


class Arguments(NamedTuple):
    """The arguments, in the order of their int64 in memory.

    Attributes:
        claimed: Number of spans taken so far; starts at 0.
        grain: Number of spans that a thread takes at a time, at most `TOGETHER`.
        spans: Address of the spans, three int32 each: a row, its first rank and the end of its ranks.
        num_spans: Number of spans.
        rows: Address of the rows.
        row_stride: Stride of the rows, in elements.
        width_in: Elements of a row.
        out: Address of the results.
        width_out: Elements of a result row, and the stride of result rows.
        down: Address of the A matrices, `[ranks, width_in]`.
        up: Address of the B matrices, `[ranks, width_out]`.
    """

    claimed: int
    grain: int
    spans: int
    num_spans: int
    rows: int
    row_stride: int
    width_in: int
    out: int
    width_out: int
    down: int
    up: int


@njit(**_OPTIONS)
def _read(at):
    it = _integers(at)
    return Arguments(it[0], it[1], it[2], it[3], it[4], it[5], it[6], it[7], it[8], it[9], it[10])


@njit(**_OPTIONS)
def _padded(width):
    """Round up to a multiple of 16 elements."""
    return (width + LANES - 1) // LANES * LANES


@njit(**_OPTIONS)
def _most_ranks(it):
    spans, most = _ints(it.spans), np.int64(0)
    for number in range(it.num_spans):
        most = max(most, np.int64(spans[3 * number + 2]) - np.int64(spans[3 * number + 1]))
    return most


@njit(**_OPTIONS)
def _num_together(it, number, end):
    """Return how many spans from `number` on are computed together: several if all have the same ranks."""
    spans = _ints(it.spans)
    if number + TOGETHER > end:
        return 1
    for other in range(number + 1, number + TOGETHER):
        if spans[3 * other + 1] != spans[3 * number + 1] or spans[3 * other + 2] != spans[3 * number + 2]:
            return 1
    return TOGETHER


@cache
def build(dtype: str) -> Any:
    """Return the kernel for float32, bfloat16 or float16, compiled.

    A C function that takes the address of `Arguments` and computes spans until none is left.
    """
    half = dtype == "float16"
    numbers = pointer_to(types.float32 if dtype == "float32" else types.uint16)
    size = 4 if dtype == "float32" else 2
    widened, rounded = converters(dtype)
    down_of_one, up_of_one = dots(1, ALIGNMENT, half=half), expand(1, ALIGNMENT, half=half)
    down_of_some, up_of_some = dots(TOGETHER, _FEW, half=half), expand(TOGETHER, _FEW, half=half)

    @specialized(dtype, **_OPTIONS)
    def take_row(source, row, width):
        for at in range(width):
            row[at] = widened(source[at])
        row[width:] = 0.0  # `dots` reads whole vectors

    @specialized(dtype, **_OPTIONS)
    def add_row(target, change, width):
        for at in range(width):
            target[at] = rounded(widened(target[at]) + widened(rounded(change[at])))

    @specialized(dtype, **_OPTIONS)
    def multiply(it, count, first, last, rows, inner, sums):
        """Multiply rows by A and B of the ranks `first` to `last`, into float32 sums."""
        num_ranks = last - first
        at, between = _singles(rows.ctypes.data), rows.shape[1]
        at_once = ALIGNMENT if count == 1 else _FEW
        for rank in range(0, num_ranks, at_once):
            keys = numbers(it.down + (first + rank) * it.width_in * size)
            to = _singles(inner.ctypes.data + 4 * rank)
            if count == 1:
                down_of_one(at, keys, to, it.width_in, between, it.width_in, inner.shape[1])
            else:
                down_of_some(at, keys, to, it.width_in, between, it.width_in, inner.shape[1])
        for number in range(count):
            for rank in range(num_ranks):
                inner[number, rank] = widened(rounded(inner[number, rank]))
            sums[number, :] = 0.0
        at, between = _singles(sums.ctypes.data), sums.shape[1]
        for rank in range(0, num_ranks, at_once):
            values = numbers(it.up + (first + rank) * it.width_out * size)
            weights = _singles(inner.ctypes.data + 4 * rank)
            if count == 1:
                up_of_one(weights, values, at, it.width_out, inner.shape[1], it.width_out, between)
            else:
                up_of_some(weights, values, at, it.width_out, inner.shape[1], it.width_out, between)

    def add(at):
        it = _read(at)
        spans = _ints(it.spans)
        rows = np.empty((it.grain, _padded(it.width_in)), np.float32)
        inner = np.empty((it.grain, _most_ranks(it)), np.float32)
        sums = np.empty((it.grain, _padded(it.width_out)), np.float32)
        while True:
            number = fetch_add(_integers(at), it.grain)
            if number >= it.num_spans:
                return
            end = min(number + it.grain, it.num_spans)
            while number < end:
                count = _num_together(it, number, end)
                for beside in range(count):
                    row = np.int64(spans[3 * (number + beside)])
                    take_row(numbers(it.rows + row * it.row_stride * size), rows[beside], it.width_in)
                first, last = np.int64(spans[3 * number + 1]), np.int64(spans[3 * number + 2])
                multiply(it, count, first, last, rows, inner, sums)
                for beside in range(count):
                    row = np.int64(spans[3 * (number + beside)])
                    add_row(numbers(it.out + row * it.width_out * size), sums[beside], it.width_out)
                number += count

    return compiled_for_c(add, f"low-rank-{dtype}", error_model="numpy")
