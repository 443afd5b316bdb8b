"""LoRA on a CPU, row by row: each row is multiplied by the ranks of its own adapter only.

`call` is the public API; `kernel` and `vectors` are compiled by numba, which the first use imports. The GPU
kernel is `segmented_lora`.
"""

from __future__ import annotations

from hotswap.kernels.low_rank.call import DTYPES, add_low_rank, compile_for
from hotswap.kernels.low_rank.sizes import ALIGNMENT

__all__ = ["ALIGNMENT", "DTYPES", "add_low_rank", "compile_for"]
