"""Linear layers on a CPU from weights packed in panels; results have the same bits for any number of rows.

`call` is the public API; `kernel` and `tiles` are compiled by numba, which the first use imports.
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
