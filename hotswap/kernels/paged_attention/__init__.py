"""Paged attention on a CPU: rows of a step over the blocks of their requests, with the same bits in any step.

`call` is what callers call, `kernel`, `slots` and `vectors` what numba compiles, `reference` the truth that
they are tested against. Nothing here imports numba before a kernel is asked for.
"""

from __future__ import annotations

from hotswap.kernels.paged_attention.call import DTYPES, Rows, Seen, append, attend, compile_for

__all__ = ["DTYPES", "Rows", "Seen", "append", "attend", "compile_for"]
