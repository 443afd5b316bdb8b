"""`rms_norm` and `rotate`: small operations of a decoder layer on a CPU, rounded as PyTorch's are."""

from __future__ import annotations

from enum import IntEnum
from functools import cache
from threading import Lock
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from hotswap.errors import ConfigError
from hotswap.kernels.team import float_bits, run_together

if TYPE_CHECKING:
    from hotswap.kernels.fused.kernel import Compiled

__all__ = ["DTYPES", "Scaling", "compile_for", "rms_norm", "rotate"]

DTYPES: Final[frozenset[torch.dtype]] = frozenset({torch.float32, torch.bfloat16})
"""That kernels are there for."""

_SHARED_NUMBERS: Final = 1 << 17  # of rows that are worth other threads' work, about 20 us of one

_compiling = Lock()


class Scaling(IntEnum):
    """How what is normed is scaled by the weights; in float32 the first two are the same."""

    CAST_FIRST = 0
    """Rounded to its dtype, then multiplied, as in Llama."""
    SCALE_FIRST = 1
    """Multiplied in float32, then rounded, as in OLMo 2."""
    ONE_PLUS = 2
    """Multiplied by one plus the weights in float32, then rounded, as in Gemma."""


def compile_for(dtype: torch.dtype) -> None:
    """Compile what this module runs for a dtype, once in a process, or find it on disk; in any thread.

    Raises:
        ConfigError: a dtype that is not in `DTYPES`.
    """
    _kernels(dtype)


def rms_norm(hidden: Tensor, weight: Tensor, *, epsilon: float, scaling: Scaling) -> Tensor:
    """Return `hidden / sqrt(mean(hidden ** 2) + epsilon)` of each row, scaled by the weights.

    A row has the same bits whatever others there are, and with any number of threads.

    Args:
        hidden: `[..., width]`, of one of `DTYPES`.
        weight: `[width]`, contiguous, of the same dtype.
        epsilon: What is added to the mean.
        scaling: How the weights are applied.

    Returns:
        As `hidden`, contiguous.

    Raises:
        ConfigError: a dtype that is not in `DTYPES`, or weights that do not fit.
    """
    width = hidden.shape[-1]
    if weight.dtype is not hidden.dtype or weight.shape != (width,) or not weight.is_contiguous():
        raise ConfigError(f"Weights {list(weight.shape)} of {weight.dtype} scale no {list(hidden.shape)}.")
    kernel = _kernels(hidden.dtype).norm
    rows = hidden.contiguous()
    out = torch.empty_like(rows)
    numbers = rows.numel()
    asked = (
        0, numbers // width, width, rows.data_ptr(), width, weight.data_ptr(), out.data_ptr(),
        float_bits(epsilon), scaling,
    )  # fmt: skip
    run_together(kernel, asked, _parts(numbers))
    return out


def rotate(queries: Tensor, keys: Tensor, cosines: Tensor, sines: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return queries and keys with rotary embeddings: `x * cosines + rotated(x) * sines`.

    `rotated(x)` is the second half of *x*, negated, and then the first. The bits are those of PyTorch.

    Args:
        queries: `[1, heads, T, width]`, of one of `DTYPES`; the last dimension is contiguous.
        keys: `[1, kv_heads, T, width]`, likewise, of the same dtype.
        cosines: `[1, T, width]`, contiguous, of the same dtype.
        sines: The same.

    Returns:
        The same shapes, the heads of a row side by side in memory; `None` for tensors that are otherwise.
    """
    dtype, shape = queries.dtype, cosines.shape
    fits = (
        dtype in DTYPES
        and keys.dtype is dtype
        and cosines.dtype is dtype
        and sines.dtype is dtype
        and len(shape) == 3
        and shape == sines.shape
        and shape[0] == 1
        and shape[2] % 2 == 0
        and cosines.is_contiguous()
        and sines.is_contiguous()
        and queries.dim() == 4 == keys.dim()
        and queries.shape[0] == 1 == keys.shape[0]
        and queries.shape[2:] == shape[1:] == keys.shape[2:]
        and queries.stride(3) == 1 == keys.stride(3)
    )
    if not fits:
        return None
    _, rows, width = shape
    q_heads, k_heads = queries.shape[1], keys.shape[1]
    turned_q = torch.empty((1, rows, q_heads, width), dtype=dtype, device="cpu")
    turned_k = torch.empty((1, rows, k_heads, width), dtype=dtype, device="cpu")
    asked = (
        0, rows, width, cosines.data_ptr(), sines.data_ptr(),
        queries.data_ptr(), turned_q.data_ptr(), q_heads, queries.stride(2), queries.stride(1),
        keys.data_ptr(), turned_k.data_ptr(), k_heads, keys.stride(2), keys.stride(1),
    )  # fmt: skip
    run_together(_kernels(dtype).rotate, asked, _parts(turned_q.numel()))
    return turned_q.transpose(1, 2), turned_k.transpose(1, 2)


def _parts(numbers: int) -> int:
    return torch.get_num_threads() if numbers >= _SHARED_NUMBERS else 1


@cache
def _kernels(dtype: torch.dtype) -> Compiled:
    if dtype not in DTYPES:
        raise ConfigError(f"There are no small operations of {dtype}; give float32 or bfloat16.")
    with _compiling:
        from hotswap.kernels.fused.kernel import build

        return build(str(dtype).removeprefix("torch."))
