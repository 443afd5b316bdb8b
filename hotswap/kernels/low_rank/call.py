"""`add_low_rank`: the LoRA update of a layer's output on a CPU, with an adapter for each row."""

from __future__ import annotations

from functools import cache
from threading import Lock
from typing import Any, Final

import torch
from torch import Tensor

from hotswap.errors import ConfigError
from hotswap.kernels.low_rank.sizes import ALIGNMENT, TOGETHER
from hotswap.kernels.threads import run_threads

__all__ = ["DTYPES", "add_low_rank", "compile_for"]

DTYPES: Final[frozenset[torch.dtype]] = frozenset({torch.float32, torch.bfloat16, torch.float16})
"""Supported dtypes."""

_SHARED_NUMBERS: Final = 1 << 18  # elements of eight ranks per row, from which several threads are used

_compiling = Lock()


def compile_for(dtype: torch.dtype) -> None:
    """Compile the kernel for a dtype, or load it from the disk cache, once per process; in any thread.

    Raises:
        ConfigError: the dtype is not in `DTYPES`.
    """
    _kernel(dtype)


def add_low_rank(hidden: Tensor, out: Tensor, down: Tensor, up: Tensor, spans: Tensor) -> None:
    """Add `hidden @ down.T @ up` to some rows of `out` in place, each row with its own range of ranks.

    Both products are summed in float32 and rounded to the dtype, and so is the sum. A row has the same bits
    for any other rows, any position of its ranks, and any number of threads.

    Args:
        hidden: `[T, in]`, of one of `DTYPES`.
        out: `[T, out]`, contiguous, of the same dtype.
        down: `[ranks, in]`, likewise.
        up: `[ranks, out]`, likewise.
        spans: `[n, 3]`, int32: a row, its first rank and the end of its ranks. Each row is in one span at
            most; the number of ranks is a positive multiple of `ALIGNMENT`. The values are not checked.

    Raises:
        ConfigError: the dtype is not in `DTYPES`, or the tensors do not match.
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
            f"Tensors {shapes} do not fit together; give contiguous tensors of one dtype on the CPU."
        )
    kernel = _kernel(hidden.dtype)
    rows = hidden if hidden.stride(1) == 1 else hidden.contiguous()
    shares = count * (width_in + width_out) * ALIGNMENT >= _SHARED_NUMBERS
    threads = min(count, torch.get_num_threads()) if shares else 1
    grain = TOGETHER if count >= 4 * TOGETHER * threads else 1
    arguments = (
        0, grain, spans.data_ptr(), count, rows.data_ptr(), rows.stride(0), width_in, out.data_ptr(),
        width_out, down.data_ptr(), up.data_ptr(),
    )  # fmt: skip
    run_threads(kernel, arguments, threads)


@cache
def _kernel(dtype: torch.dtype) -> Any:
    if dtype not in DTYPES:
        raise ConfigError(f"There is no LoRA kernel for {dtype}; give float32, bfloat16 or float16.")
    with _compiling:
        from hotswap.kernels.low_rank.kernel import build

        return build(str(dtype).removeprefix("torch."))
