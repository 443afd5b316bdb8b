"""Low-rank adapters of single rows on a CPU: each row by the ranks of its own adapter, and no others.

`call` is what callers call, `kernel` and `vectors` what numba compiles. Nothing here imports numba before a
kernel is asked for. On a GPU it is `segmented_lora`.
"""

from __future__ import annotations

from hotswap.kernels.low_rank.call import DTYPES, add_low_rank, compile_for
from hotswap.kernels.low_rank.sizes import ALIGNMENT

__all__ = ["ALIGNMENT", "DTYPES", "add_low_rank", "compile_for"]
