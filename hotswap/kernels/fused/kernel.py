"""RMSNorm and rotary embedding on a CPU, compiled by numba.

Both are rounded where PyTorch's operators round: a bfloat16 result of each multiplication and addition, but
for the mean of squares, which is summed in float32 by vectors of sixteen. What is asked comes as a list of
integers in memory, and whoever works on it claims some rows at a time.
"""

# mypy: ignore-errors
# pyright: basic, reportCallIssue=false, reportArgumentType=false
from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numba import types

from hotswap.kernels.compiling import compiled_for_c, part
from hotswap.kernels.lanes import address, claim, sum_of_squares
from hotswap.kernels.numbers import rounding

__all__ = ["CAST_FIRST", "ONE_PLUS", "SCALE_FIRST", "Compiled", "build"]

CAST_FIRST, SCALE_FIRST, ONE_PLUS = range(3)  # ways to scale what is normed

_GRAIN = 8  # rows that are claimed at a time
_OPTIONS: Any = {"nogil": True, "error_model": "numpy"}
_ONE = np.float32(1.0)

_integers = address(types.int64)
_singles = address(types.float32)


class Compiled(NamedTuple):
    """What was compiled for a dtype: functions for C of the address of what is asked.

    Attributes:
        norm: Of the rows claimed so far, their number and width, the address of the rows, how far they lie
            apart, the addresses of weights and results, the bits of epsilon as float32, and how to scale.
        rotate: Of the rows claimed so far, their number and width, the addresses of cosines and sines, and
            twice, for queries and keys: addresses of rows and results, the number of heads, and how far rows
            and heads lie apart.
    """

    norm: Any
    rotate: Any


@cache
def build(dtype: str) -> Compiled:
    """Return the kernels for float32 or bfloat16, compiled."""
    short = dtype == "bfloat16"
    numbers = address(types.uint16 if short else types.float32)
    size = 2 if short else 4

    widened, rounded = rounding(dtype)

    @part(dtype, **_OPTIONS)
    def norm_row(source, weight, target, row, width, epsilon, scaling):
        for at in range(width):
            row[at] = widened(source[at])
        mean = sum_of_squares(_singles(row.ctypes.data), width) / np.float32(width)
        scale = _ONE / np.sqrt(mean + epsilon)
        if scaling == CAST_FIRST:
            for at in range(width):
                target[at] = rounded(widened(rounded(row[at] * scale)) * widened(weight[at]))
        elif scaling == SCALE_FIRST:
            for at in range(width):
                target[at] = rounded(row[at] * scale * widened(weight[at]))
        else:
            for at in range(width):
                target[at] = rounded(row[at] * scale * (_ONE + widened(weight[at])))

    def norm(at):
        it = _integers(at)
        num_rows, width, source, stride, weight, target = it[1], it[2], it[3], it[4], it[5], it[6]
        epsilon, scaling = np.int32(it[7]).view(np.float32), it[8]
        row = np.empty(width, np.float32)
        while True:
            begin = claim(it, _GRAIN)
            if begin >= num_rows:
                return
            for number in range(begin, min(begin + _GRAIN, num_rows)):
                to = numbers(target + number * width * size)
                norm_row(
                    numbers(source + number * stride * size),
                    numbers(weight),
                    to,
                    row,
                    width,
                    epsilon,
                    scaling,
                )

    @part(dtype, **_OPTIONS)
    def rotate_row(source, cosines, sines, target, width):
        half = width // 2
        for at in range(half):
            left, right = widened(source[at]), widened(source[half + at])
            turned = widened(rounded(-right * widened(sines[at])))
            target[at] = rounded(widened(rounded(left * widened(cosines[at]))) + turned)
            turned = widened(rounded(left * widened(sines[half + at])))
            target[half + at] = rounded(widened(rounded(right * widened(cosines[half + at]))) + turned)

    def rotate(at):
        it = _integers(at)
        num_rows, width, cosines, sines = it[1], it[2], it[3], it[4]
        while True:
            begin = claim(it, _GRAIN)
            if begin >= num_rows:
                return
            for number in range(begin, min(begin + _GRAIN, num_rows)):
                angles = number * width * size
                for side in range(5, 15, 5):
                    source, target, heads, row_stride, head_stride = (
                        it[side], it[side + 1], it[side + 2], it[side + 3], it[side + 4],
                    )  # fmt: skip
                    for head in range(heads):
                        rotate_row(
                            numbers(source + (number * row_stride + head * head_stride) * size),
                            numbers(cosines + angles),
                            numbers(sines + angles),
                            numbers(target + (number * heads + head) * width * size),
                            width,
                        )

    return Compiled(
        compiled_for_c(norm, f"norm-{dtype}", error_model="numpy"),
        compiled_for_c(rotate, f"rotate-{dtype}", error_model="numpy"),
    )
