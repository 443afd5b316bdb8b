"""Attention over pools of KV blocks on a GPU, for prompts and decodes, and the writing of keys and values.

`call` has the public functions, `kernel` the Triton kernels, `tiles` their tiles, and `reference` the
definition in float64 that the tests compare with.
"""

from __future__ import annotations

from hotswap.kernels.paged_attention_gpu.call import (
    DTYPES,
    Rows,
    Visible,
    append,
    attend,
    has_kernels,
    rows_per_tile,
)

__all__ = ["DTYPES", "Rows", "Visible", "append", "attend", "has_kernels", "rows_per_tile"]
