"""Paged attention on a CPU, over the KV blocks of requests; a row has the same bits in any batch.

`call` is the public API; `kernel`, `slots` and `vectors` are compiled by numba, which the first use imports;
`reference` is the definition in float64 that the tests compare with.
"""

from __future__ import annotations

from hotswap.kernels.paged_attention.call import DTYPES, Rows, Seen, append, attend, compile_for

__all__ = ["DTYPES", "Rows", "Seen", "append", "attend", "compile_for"]
