"""`rms_norm` and `rotate`: RMSNorm and rotary embedding on a CPU, rounded like PyTorch's operators."""

from __future__ import annotations

from enum import IntEnum
from functools import cache
from threading import Lock
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from hotswap.errors import ConfigError
from hotswap.kernels.threads import float_bits, run_threads

if TYPE_CHECKING:
    from hotswap.kernels.fused.kernel import Compiled

__all__ = ["DTYPES", "Scaling", "compile_for", "rms_norm", "rotate"]

DTYPES: Final[frozenset[torch.dtype]] = frozenset({torch.float32, torch.bfloat16})
"""Supported dtypes."""

_SHARED_NUMBERS: Final = (
    1 << 17
)  # in the rows, from which several threads are used: about 20 us of one thread

_compiling = Lock()


class Scaling(IntEnum):
    """How an RMSNorm applies its weights; in float32 the first two are the same."""

    CAST_FIRST = 0
    """Round to the dtype, then multiply, as in Llama."""
    SCALE_FIRST = 1
    """Multiply in float32, then round, as in OLMo 2."""
    ONE_PLUS = 2
    """Multiply by one plus the weights in float32, then round, as in Gemma."""


def compile_for(dtype: torch.dtype) -> None:
    """Compile the kernels for a dtype, or load them from the disk cache, once per process; in any thread.

    Raises:
        ConfigError: the dtype is not in `DTYPES`.
    """
    _kernels(dtype)


def rms_norm(hidden: Tensor, weight: Tensor, *, epsilon: float, scaling: Scaling) -> Tensor:
    """Return `hidden / sqrt(mean(hidden ** 2) + epsilon)` for each row, scaled by the weights.

    A row has the same bits for any other rows and any number of threads.

    Args:
        hidden: `[..., width]`, of one of `DTYPES`.
        weight: `[width]`, contiguous, of the same dtype.
        epsilon: Added to the mean square.
        scaling: How the weights are applied.

    Returns:
        Shape and dtype of `hidden`, contiguous.

    Raises:
        ConfigError: the dtype is not in `DTYPES`, or the weights do not match.
    """
    width = hidden.shape[-1]
    if weight.dtype is not hidden.dtype or weight.shape != (width,) or not weight.is_contiguous():
        raise ConfigError(
            f"Weights {list(weight.shape)} of {weight.dtype} cannot scale {list(hidden.shape)}."
        )
    kernel = _kernels(hidden.dtype).norm
    rows = hidden.contiguous()
    out = torch.empty_like(rows)
    numbers = rows.numel()
    arguments = (
        0, numbers // width, width, rows.data_ptr(), width, weight.data_ptr(), out.data_ptr(),
        float_bits(epsilon), scaling,
    )  # fmt: skip
    run_threads(kernel, arguments, _parts(numbers))
    return out


def rotate(queries: Tensor, keys: Tensor, cosines: Tensor, sines: Tensor) -> tuple[Tensor, Tensor] | None:
    """Apply rotary embeddings to queries and keys: `x * cosines + rotate_half(x) * sines`.

    `rotate_half(x)` is the negated second half of *x*, then the first half. The bits are those of PyTorch.

    Args:
        queries: `[1, heads, T, width]`, of one of `DTYPES`; the last dimension is contiguous.
        keys: `[1, kv_heads, T, width]`, likewise, of the same dtype.
        cosines: `[1, T, width]`, contiguous, of the same dtype.
        sines: The same.

    Returns:
        The same shapes, with the heads of a row contiguous; `None` for tensors of other shapes or layouts.
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
    rotated_q = torch.empty((1, rows, q_heads, width), dtype=dtype, device="cpu")
    rotated_k = torch.empty((1, rows, k_heads, width), dtype=dtype, device="cpu")
    arguments = (
        0, rows, width, cosines.data_ptr(), sines.data_ptr(),
        queries.data_ptr(), rotated_q.data_ptr(), q_heads, queries.stride(2), queries.stride(1),
        keys.data_ptr(), rotated_k.data_ptr(), k_heads, keys.stride(2), keys.stride(1),
    )  # fmt: skip
    run_threads(_kernels(dtype).rotate, arguments, _parts(rotated_q.numel()))
    return rotated_q.transpose(1, 2), rotated_k.transpose(1, 2)


def _parts(numbers: int) -> int:
    return torch.get_num_threads() if numbers >= _SHARED_NUMBERS else 1


@cache
def _kernels(dtype: torch.dtype) -> Compiled:
    if dtype not in DTYPES:
        raise ConfigError(f"There are no fused kernels for {dtype}; give float32 or bfloat16.")
    with _compiling:
        from hotswap.kernels.fused.kernel import build

        return build(str(dtype).removeprefix("torch."))
