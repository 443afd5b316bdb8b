"""Small operations between the products of a decoder layer, each as one pass over memory, on a CPU.

PyTorch takes eight operators for an RMSNorm and fourteen for a rotary embedding; for a few rows what it costs
to call them is most of their time. `call` is what callers call, `kernel` what numba compiles. Nothing here
imports numba before a kernel is asked for.
"""

from __future__ import annotations

from hotswap.kernels.fused.call import DTYPES, Scaling, compile_for, rms_norm, rotate

__all__ = ["DTYPES", "Scaling", "compile_for", "rms_norm", "rotate"]
