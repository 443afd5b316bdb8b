"""Low-rank adapters of single rows on a CPU, compiled by numba.

A row is multiplied by eight ranks of its adapter at a time, and then these are added to all outputs, eight at
a time: either way ranks are read from start to end, and what is waited for is memory. Of rows that share an
adapter, as those of a prompt, four go together, to the same bits. Whoever works on it claims a few at a time.
"""

# mypy: ignore-errors
# pyright: basic, reportCallIssue=false, reportArgumentType=false
from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numba import njit, types

from hotswap.kernels.compiling import compiled_for_c, part
from hotswap.kernels.lanes import LANES, address, claim, dots
from hotswap.kernels.low_rank.sizes import ALIGNMENT, TOGETHER
from hotswap.kernels.low_rank.vectors import expand
from hotswap.kernels.numbers import rounding

__all__ = ["build"]

_FEW = 4  # ranks that rows together go through at once: sums of all stay in registers
_OPTIONS: Any = {"nogil": True, "error_model": "numpy"}

_integers = address(types.int64)
_ints = address(types.int32)
_singles = address(types.float32)


class Asked(NamedTuple):
    """What is asked, in the order in which it lies in memory, as int64.

    Attributes:
        claimed: How many spans have been, 0 at first.
        grain: How many are claimed at a time, at most `TOGETHER`.
        spans: Address of the spans, three int32 each: a row, its first rank and the one after its last.
        num_spans: How many there are.
        rows: Address of the rows.
        row_stride: How many numbers they lie apart.
        width_in: Numbers of each.
        out: Address of the results.
        width_out: Numbers of each, and how far they lie apart.
        down: Address of the ranks `[ranks, width_in]`.
        up: That of the ranks `[ranks, width_out]`.
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
    return Asked(it[0], it[1], it[2], it[3], it[4], it[5], it[6], it[7], it[8], it[9], it[10])


@njit(**_OPTIONS)
def _whole(width):
    """With room for vectors of sixteen."""
    return (width + LANES - 1) // LANES * LANES


@njit(**_OPTIONS)
def _most_ranks(it):
    spans, most = _ints(it.spans), np.int64(0)
    for number in range(it.num_spans):
        most = max(most, np.int64(spans[3 * number + 2]) - np.int64(spans[3 * number + 1]))
    return most


@njit(**_OPTIONS)
def _num_together(it, number, end):
    """How many spans from a number on go together: several only if all have the same ranks."""
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

    A function for C, of the address of what is `Asked`, of which it computes as many spans as it can claim.
    """
    half = dtype == "float16"
    numbers = address(types.float32 if dtype == "float32" else types.uint16)
    size = 4 if dtype == "float32" else 2
    widened, rounded = rounding(dtype)
    down_of_one, up_of_one = dots(1, ALIGNMENT, half=half), expand(1, ALIGNMENT, half=half)
    down_of_some, up_of_some = dots(TOGETHER, _FEW, half=half), expand(TOGETHER, _FEW, half=half)

    @part(dtype, **_OPTIONS)
    def take_row(source, row, width):
        for at in range(width):
            row[at] = widened(source[at])
        row[width:] = 0.0  # `dots` reads whole vectors

    @part(dtype, **_OPTIONS)
    def add_row(target, change, width):
        for at in range(width):
            target[at] = rounded(widened(target[at]) + widened(rounded(change[at])))

    @part(dtype, **_OPTIONS)
    def multiply(it, count, first, last, rows, inner, sums):
        """Rows by ranks `first` to `last` down and up, to sums, which are float32."""
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
        rows = np.empty((it.grain, _whole(it.width_in)), np.float32)
        inner = np.empty((it.grain, _most_ranks(it)), np.float32)
        sums = np.empty((it.grain, _whole(it.width_out)), np.float32)
        while True:
            number = claim(_integers(at), it.grain)
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
