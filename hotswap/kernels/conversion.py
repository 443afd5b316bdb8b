"""Conversions between float32 and 16-bit floats, which numba lacks; kernels store them as uint16."""

# mypy: ignore-errors
# pyright: basic, reportCallIssue=false
from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from hotswap.kernels.compiling import specialized

__all__ = ["converters"]

_OPTIONS: Any = {"nogil": True, "error_model": "numpy", "inline": "always"}
_BIAS, _SIXTEEN, _LAST = np.uint32(0x7FFF), np.uint32(16), np.uint32(1)
_QUIET = np.uint16(0x7FC0)


@intrinsic
def _to_half(typing, number):
    def generate(context, builder, signature, arguments):
        return builder.bitcast(builder.fptrunc(arguments[0], ir.HalfType()), ir.IntType(16))

    return types.uint16(types.float32), generate


@intrinsic
def _of_half(typing, bits):
    def generate(context, builder, signature, arguments):
        return builder.fpext(builder.bitcast(arguments[0], ir.HalfType()), ir.FloatType())

    return types.float32(types.uint16), generate


@cache
def converters(dtype: str) -> tuple[Callable[[Any], Any], Callable[[Any], Any]]:
    """Return two functions that convert a dtype to float32 and back: "float32", "bfloat16" or "float16".

    16-bit floats are uint16. The second function rounds to nearest, ties to even; NaN stays NaN.
    """
    single, half = dtype == "float32", dtype == "float16"

    @specialized(dtype, **_OPTIONS)
    def widened(number):
        if single:
            return number
        if half:
            return _of_half(number)
        return np.uint32(np.uint32(number) << _SIXTEEN).view(np.float32)

    @specialized(dtype, **_OPTIONS)
    def rounded(number):
        if single:
            return number
        if half:
            return _to_half(number)
        bits = np.float32(number).view(np.uint32)
        odd = np.uint32(np.uint32(bits >> _SIXTEEN) & _LAST)
        upper = np.uint16(np.uint32(bits + _BIAS + odd) >> _SIXTEEN)
        return upper if number == number else _QUIET

    return widened, rounded
