"""RMSNorm and rotary embedding on a CPU, compiled by numba.

Both round where PyTorch's operators round, to bfloat16 after each multiplication and addition; only the mean
square is summed in float32, in 16 SIMD lanes. The arguments are an array of int64, which the threads share.
Each thread takes some rows at a time from a shared counter.
"""

# mypy: ignore-errors
# pyright: basic, reportCallIssue=false, reportArgumentType=false
from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numba import types

from hotswap.kernels.compiling import compiled_for_c, specialized
from hotswap.kernels.conversion import converters
from hotswap.kernels.simd import fetch_add, pointer_to, sum_of_squares

__all__ = ["CAST_FIRST", "ONE_PLUS", "SCALE_FIRST", "Compiled", "build"]

CAST_FIRST, SCALE_FIRST, ONE_PLUS = range(3)  # values of `call.Scaling`

_GRAIN = 8  # rows that a thread takes at a time
_OPTIONS: Any = {"nogil": True, "error_model": "numpy"}
_ONE = np.float32(1.0)

_integers = pointer_to(types.int64)
_singles = pointer_to(types.float32)


class Compiled(NamedTuple):
    """The compiled kernels of a dtype: C functions that take the address of their int64 arguments.

    Attributes:
        norm: Takes the number of rows taken so far, the number of rows, their width, address and stride, the
            addresses of weights and results, the bits of epsilon as float32, and the scaling.
        rotate: Takes the number of rows taken so far, the number of rows, their width, the addresses of
            cosines and sines, and then for queries and for keys: the addresses of rows and results, the
            number of heads, and the strides of rows and heads.
    """

    norm: Any
    rotate: Any


@cache
def build(dtype: str) -> Compiled:
    """Return the kernels for float32 or bfloat16, compiled."""
    short = dtype == "bfloat16"
    numbers = pointer_to(types.uint16 if short else types.float32)
    size = 2 if short else 4

    widened, rounded = converters(dtype)

    @specialized(dtype, **_OPTIONS)
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
            begin = fetch_add(it, _GRAIN)
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

    @specialized(dtype, **_OPTIONS)
    def rotate_row(source, cosines, sines, target, width):
        half = width // 2
        for at in range(half):
            left, right = widened(source[at]), widened(source[half + at])
            rotated = widened(rounded(-right * widened(sines[at])))
            target[at] = rounded(widened(rounded(left * widened(cosines[at]))) + rotated)
            rotated = widened(rounded(left * widened(sines[half + at])))
            target[half + at] = rounded(widened(rounded(right * widened(cosines[half + at]))) + rotated)

    def rotate(at):
        it = _integers(at)
        num_rows, width, cosines, sines = it[1], it[2], it[3], it[4]
        while True:
            begin = fetch_add(it, _GRAIN)
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
