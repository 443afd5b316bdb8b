"""Fused RMSNorm and rotary embedding on a CPU, each in one pass over memory.

PyTorch takes eight operators for an RMSNorm and fourteen for a rotary embedding; for a few rows, calling them
takes most of the time. `call` is the public API; `kernel` is compiled by numba, which the first use imports.
"""

from __future__ import annotations

from hotswap.kernels.fused.call import DTYPES, Scaling, compile_for, rms_norm, rotate

__all__ = ["DTYPES", "Scaling", "compile_for", "rms_norm", "rotate"]
