"""`add_low_rank`: what the adapters of single rows add to a layer's output, on a CPU."""

from __future__ import annotations

from functools import cache
from threading import Lock
from typing import Any, Final

import torch
from torch import Tensor

from hotswap.errors import ConfigError
from hotswap.kernels.low_rank.sizes import ALIGNMENT, TOGETHER
from hotswap.kernels.team import run_together

__all__ = ["DTYPES", "add_low_rank", "compile_for"]

DTYPES: Final[frozenset[torch.dtype]] = frozenset({torch.float32, torch.bfloat16, torch.float16})
"""That there are kernels for."""

_SHARED_NUMBERS: Final = 1 << 18  # of matrices, if each row read eight ranks, worth other threads' work

_compiling = Lock()


def compile_for(dtype: torch.dtype) -> None:
    """Compile what this module runs for a dtype, once in a process, or find it on disk; in any thread.

    Raises:
        ConfigError: a dtype that is not in `DTYPES`.
    """
    _kernel(dtype)


def add_low_rank(hidden: Tensor, out: Tensor, down: Tensor, up: Tensor, spans: Tensor) -> None:
    """Add `hidden @ down.T @ up` to some rows of `out`, each by ranks of its own, in place.

    Both products are summed in float32, and rounded to the dtype, as is the sum. A row has the same bits
    whatever else is asked, wherever its ranks lie, and with any number of threads.

    Args:
        hidden: `[T, in]`, of one of `DTYPES`.
        out: `[T, out]`, contiguous, of the same dtype.
        down: `[ranks, in]`, likewise.
        up: `[ranks, out]`, likewise.
        spans: `[n, 3]`, int32: a row, which is in one of them only, its first rank and the one after its
            last; the number of ranks is a positive multiple of `ALIGNMENT`. The numbers are not looked at.

    Raises:
        ConfigError: a dtype that is not in `DTYPES`, or tensors that do not fit.
    """
    (num_rows, width_in), width_out, count = hidden.shape, out.shape[-1], len(spans)
    fits = (
        out.shape == (num_rows, width_out)
        and down.shape[1:] == (width_in,)
        and up.shape == (len(down), width_out)
        and spans.shape == (count, 3)
        and spans.dtype is torch.int32
        and out.dtype is down.dtype is up.dtype is hidden.dtype
        and all(tensor.is_contiguous() and tensor.is_cpu for tensor in (out, down, up, spans))
    )
    if not fits:
        shapes = [list(tensor.shape) for tensor in (hidden, out, down, up, spans)]
        raise ConfigError(
            f"Tensors {shapes} do not fit together, or are not contiguous, of one dtype and on the CPU."
        )
    kernel = _kernel(hidden.dtype)
    rows = hidden if hidden.stride(1) == 1 else hidden.contiguous()
    shares = count * (width_in + width_out) * ALIGNMENT >= _SHARED_NUMBERS
    threads = min(count, torch.get_num_threads()) if shares else 1
    grain = TOGETHER if count >= 4 * TOGETHER * threads else 1
    asked = (
        0, grain, spans.data_ptr(), count, rows.data_ptr(), rows.stride(0), width_in, out.data_ptr(),
        width_out, down.data_ptr(), up.data_ptr(),
    )  # fmt: skip
    run_together(kernel, asked, threads)


@cache
def _kernel(dtype: torch.dtype) -> Any:
    if dtype not in DTYPES:
        raise ConfigError(f"No low-rank adapters of {dtype}; give float32, bfloat16 or float16.")
    with _compiling:
        from hotswap.kernels.low_rank.kernel import build

        return build(str(dtype).removeprefix("torch."))
