"""`linear` and `linear_packed`: linear layers on a CPU, from weights as they lie or packed by `pack`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from threading import Lock
from typing import Any, Final

import torch
from torch import Tensor

from hotswap.errors import ConfigError
from hotswap.kernels.processor import instructions
from hotswap.kernels.team import run_together

__all__ = ["PANEL", "compile_for", "linear", "linear_packed", "pack", "packed_bytes", "supported"]

PANEL: Final = 32
"""Outputs whose weights lie together."""

_LEAST_ROWS: Final = 4  # of a tile
_SHARED_BYTES: Final = 1 << 20  # of weights that are worth other threads' work, about 50 us of one

_compiling = Lock()


@cache
def supported(dtype: torch.dtype) -> bool:
    """Whether this CPU has the instructions that make the kernel worth its while.

    Vectors of sixteen float32, and for bfloat16 their products, but no matrix unit, which would be faster.
    """
    known = instructions()
    if "avx512_f" not in known or not _compiles_for_this():
        return False
    return dtype is torch.float32 or (
        dtype is torch.bfloat16 and "avx512_bf16" in known and "amx_bf16" not in known
    )


def compile_for(dtype: torch.dtype) -> None:
    """Compile what this module runs for a dtype, once in a process: about a second, in any thread.

    Raises:
        ConfigError: a dtype that is not supported here.
    """
    _kernel(dtype)


def packed_bytes(outputs: int, inputs: int, dtype: torch.dtype) -> int:
    """What a packed weight takes."""
    return -(-outputs // PANEL) * PANEL * _depth(inputs, dtype) * 4


def pack(weight: Tensor, out: Tensor | None = None) -> Tensor:
    """Return a weight in panels, for `linear_packed`.

    Args:
        weight: `[outputs, inputs]`, of any strides and a supported dtype.
        out: Where to: `[packed_bytes]`, uint8, contiguous, from a word on. What lies in huge pages is read up
            to a fifth faster.

    Returns:
        `[panels, depth, PANEL]` in float32, whose bits are words of the weight's: one number or two.

    Raises:
        ConfigError: a dtype that is not supported here, or another `out`.
    """
    outputs, inputs = weight.shape
    depth, size_bytes = _depth(inputs, weight.dtype), packed_bytes(outputs, inputs, weight.dtype)
    if out is None:
        out = torch.empty(size_bytes, dtype=torch.uint8, device="cpu")
    fits = out.shape == (size_bytes,) and out.dtype is torch.uint8 and out.is_contiguous() and out.is_cpu
    if not fits or out.storage_offset() % 4:
        raise ConfigError(
            f"Give {size_bytes} contiguous uint8 on the CPU that begin at a word, not {list(out.shape)} of "
            f"{out.dtype}."
        )
    packed = out.view(torch.float32).view(-(-outputs // PANEL), depth, PANEL)
    asked = (
        0, packed.data_ptr(), weight.data_ptr(), 0, 0, 0, depth, inputs, outputs, 0, 0, *weight.stride(),
        1, 0,
    )  # fmt: skip
    run_together(_kernel(weight.dtype), asked, 1)
    return packed


def linear(hidden: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return `hidden @ weight.T + bias`, and pack the weight for it in every call.

    A result is summed in float32 from the first input to the last. It has the same bits whatever other rows
    there are, from a packed weight as from one that is not, and with any number of threads.

    Args:
        hidden: `[..., inputs]`, of a supported dtype.
        weight: `[outputs, inputs]`, of the same dtype and of any strides.
        bias: `[outputs]`, of the same dtype.

    Returns:
        `[..., outputs]`.

    Raises:
        ConfigError: a dtype that is not supported here, or tensors that do not fit.
    """
    outputs, inputs = weight.shape
    if weight.dtype is not hidden.dtype or hidden.shape[-1] != inputs:
        raise ConfigError(
            f"A weight {[outputs, inputs]} of {weight.dtype} multiplies no {list(hidden.shape)} of "
            f"{hidden.dtype}."
        )
    return _multiply(hidden, (0, weight.data_ptr()), weight.stride(), outputs, bias)


def linear_packed(
    hidden: Tensor, packed: Tensor, shape: tuple[int, int] | torch.Size, bias: Tensor | None = None
) -> Tensor:
    """Return what `linear` does, from what `pack` made of a weight of a shape, `(outputs, inputs)`.

    Raises:
        ConfigError: a dtype that is not supported here, or tensors that do not fit.
    """
    (panels, depth, _), (outputs, inputs) = packed.shape, shape
    fits = -(-outputs // PANEL) == panels and _depth(inputs, hidden.dtype) == depth
    if not fits or hidden.shape[-1] != inputs:
        raise ConfigError(
            f"A weight {[outputs, inputs]}, packed as {list(packed.shape)}, multiplies no "
            f"{list(hidden.shape)} of {hidden.dtype}."
        )
    return _multiply(hidden, (packed.data_ptr(), 0), (0, 0), outputs, bias)


def _multiply(
    hidden: Tensor, weights: tuple[int, int], strides: Sequence[int], outputs: int, bias: Tensor | None
) -> Tensor:
    dtype, inputs = hidden.dtype, hidden.shape[-1]
    kernel = _kernel(dtype)
    if bias is not None:
        if bias.dtype is not dtype or bias.shape != (outputs,):
            raise ConfigError(f"Give {outputs} biases of {dtype}, not {list(bias.shape)} of {bias.dtype}.")
        bias = bias.contiguous()
    shape, count, depth = (*hidden.shape[:-1], outputs), hidden.numel() // inputs, _depth(inputs, dtype)
    rows = _rows(hidden, count, inputs)
    num_rows = max(count, _LEAST_ROWS)
    out = torch.empty(shape if num_rows == count else (num_rows, outputs), dtype=dtype, device="cpu")
    parts = torch.get_num_threads() if 4 * depth * outputs >= _SHARED_BYTES else 1
    asked = (
        rows.data_ptr(), *weights, 0 if bias is None else bias.data_ptr(), out.data_ptr(), num_rows, depth,
        inputs, outputs, depth, outputs, *strides, -(-outputs // PANEL // (4 * parts)), 0,
    )  # fmt: skip
    run_together(kernel, asked, parts)
    return out if num_rows == count else out[:count].view(shape)


def _rows(hidden: Tensor, count: int, inputs: int) -> Tensor:
    """The rows in one piece, whole words each, and enough of them for a tile."""
    missing, odd = max(0, _LEAST_ROWS - count), inputs * hidden.itemsize % 4 != 0
    if missing or odd:
        return torch.nn.functional.pad(hidden.reshape(-1, inputs), (0, int(odd), 0, missing))
    hidden = hidden.contiguous()
    return hidden if hidden.data_ptr() % 4 == 0 else hidden.clone()


def _depth(inputs: int, dtype: torch.dtype) -> int:
    """Words of an output's weights."""
    return -(-inputs * dtype.itemsize // 4)


@cache
def _kernel(dtype: torch.dtype) -> Any:
    if not supported(dtype):
        raise ConfigError(f"This CPU has no kernel for linear layers of {dtype}.")
    with _compiling:
        from hotswap.kernels.packed_linear.kernel import build

        return build(str(dtype).removeprefix("torch."))


def _compiles_for_this() -> bool:
    """Whether numba's compiler uses what this CPU has, as it does if nobody told it otherwise."""
    try:
        from numba.core import config
    except ImportError:
        return False
    settings: Any = config
    return not (settings.CPU_NAME or settings.CPU_FEATURES)
