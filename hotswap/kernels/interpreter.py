"""What kernels must not leave to Triton's interpreter, which gets bfloat16 wrong; imported by kernels alone.

The interpreter, which runs kernels on a CPU, keeps bfloat16 as 16-bit integers: it multiplies their bit
patterns, cuts where it should round, and misreads subnormals (Triton 3.6 to 3.9; its maintainers do not mean
to support them). What is here compiles to nothing else than the plain operation, and goes through float32
under the interpreter, so that what is tested there is the kernel.
"""

# mypy: ignore-errors
# pyright: basic, reportMissingImports=false
from __future__ import annotations

import os

import triton
import triton.language as tl

__all__ = ["INTERPRETED", "dot", "narrow", "widen"]

# Triton reads it when a kernel is defined: a process interprets, or it does not.
INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET", "0") == "1")


@triton.jit
def dot(left, right, total):
    """`total + left @ right`, summed in float32; all of one 16-bit dtype, or of float32."""
    if INTERPRETED:
        return tl.dot(widen(left), widen(right), total, input_precision="ieee")
    else:
        return tl.dot(left, right, total, input_precision="ieee")


@triton.jit
def widen(values):
    """Return values in float32, exactly, whatever their dtype."""
    if INTERPRETED and values.dtype == tl.bfloat16:
        return (values.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    else:
        return values.to(tl.float32)


@triton.jit
def narrow(values, DTYPE: tl.constexpr):
    """Return float32 values in `DTYPE`, rounded to the nearest, ties to even."""
    if INTERPRETED and DTYPE == tl.bfloat16:
        bits = values.to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        kept = tl.where(values == values, rounded, (bits >> 16) | 0x40)  # a NaN stays one
        return kept.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        return values.to(DTYPE)
