"""Linear layers on a CPU, from weights packed in panels, with the same bits for any number of rows.

`call` is what callers call, `kernel` and `tiles` what numba compiles. Nothing here imports numba before a
kernel is asked for.
"""

from __future__ import annotations

from hotswap.kernels.packed_linear.call import (
    PANEL,
    compile_for,
    linear,
    linear_packed,
    pack,
    packed_bytes,
    supported,
)

__all__ = ["PANEL", "compile_for", "linear", "linear_packed", "pack", "packed_bytes", "supported"]
