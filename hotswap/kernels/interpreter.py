"""bfloat16 operations that are correct under Triton's interpreter too; imported by kernels only.

The interpreter runs kernels on a CPU and stores bfloat16 as 16-bit integers: it multiplies their bits,
truncates where it should round, and misreads subnormals (Triton 3.6 to 3.9; its maintainers do not plan to
support bfloat16). The functions here compile to the plain operation on a GPU and use float32 under the
interpreter, so that interpreted tests test the kernel.
"""

# mypy: ignore-errors
# pyright: basic, reportMissingImports=false
from __future__ import annotations

import os

import triton
import triton.language as tl

__all__ = ["INTERPRETED", "dot", "narrow", "widen"]

# Triton reads the variable when a kernel is defined, so it applies to a whole process.
INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET", "0") == "1")


@triton.jit
def dot(left, right, total):
    """Return `total + left @ right`, summed in float32; `left` and `right` have one dtype."""
    if INTERPRETED:
        return tl.dot(widen(left), widen(right), total, input_precision="ieee")
    else:
        return tl.dot(left, right, total, input_precision="ieee")


@triton.jit
def widen(values):
    """Convert values of any dtype to float32, exactly."""
    if INTERPRETED and values.dtype == tl.bfloat16:
        return (values.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    else:
        return values.to(tl.float32)


@triton.jit
def narrow(values, DTYPE: tl.constexpr):
    """Convert float32 values to `DTYPE`, rounded to nearest, ties to even."""
    if INTERPRETED and DTYPE == tl.bfloat16:
        bits = values.to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        kept = tl.where(values == values, rounded, (bits >> 16) | 0x40)  # NaN stays NaN
        return kept.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        return values.to(DTYPE)
