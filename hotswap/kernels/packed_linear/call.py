"""`linear` and `linear_packed`: linear layers on a CPU, from plain weights or weights packed by `pack`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from threading import Lock
from typing import Any, Final

import torch
from torch import Tensor

from hotswap.errors import ConfigError
from hotswap.kernels.processor import instructions
from hotswap.kernels.threads import run_threads

__all__ = ["PANEL", "compile_for", "linear", "linear_packed", "pack", "packed_bytes", "supported"]

PANEL: Final = 32
"""Number of outputs in a panel."""

_LEAST_ROWS: Final = 4  # of the smallest tile
_SHARED_BYTES: Final = 1 << 20  # of weights from which several threads are used, about 50 us of one thread

_compiling = Lock()


@cache
def supported(dtype: torch.dtype) -> bool:
    """Whether this CPU has the instructions with which the kernel is faster than oneDNN.

    AVX-512, and for bfloat16 also AVX512-BF16 but not AMX, with which oneDNN is faster.
    """
    known = instructions()
    if "avx512_f" not in known or not _compiles_for_this():
        return False
    return dtype is torch.float32 or (
        dtype is torch.bfloat16 and "avx512_bf16" in known and "amx_bf16" not in known
    )


def compile_for(dtype: torch.dtype) -> None:
    """Compile the kernel for a dtype, once per process: about a second, in any thread.

    Raises:
        ConfigError: the dtype is not supported on this CPU.
    """
    _kernel(dtype)


def packed_bytes(outputs: int, inputs: int, dtype: torch.dtype) -> int:
    """Return the size of a packed weight in bytes."""
    return -(-outputs // PANEL) * PANEL * _depth(inputs, dtype) * 4


def pack(weight: Tensor, out: Tensor | None = None) -> Tensor:
    """Pack a weight into panels, for `linear_packed`.

    Args:
        weight: `[outputs, inputs]`, of any strides and a supported dtype.
        out: Memory for the result: `[packed_bytes]`, uint8, contiguous, aligned to 4 bytes. Huge pages make
            reading up to a fifth faster.

    Returns:
        `[panels, depth, PANEL]` float32 whose bits are the words of the weight: one float32 or two bfloat16.

    Raises:
        ConfigError: the dtype is not supported on this CPU, or `out` has the wrong size or layout.
    """
    outputs, inputs = weight.shape
    depth, size_bytes = _depth(inputs, weight.dtype), packed_bytes(outputs, inputs, weight.dtype)
    if out is None:
        out = torch.empty(size_bytes, dtype=torch.uint8, device="cpu")
    fits = out.shape == (size_bytes,) and out.dtype is torch.uint8 and out.is_contiguous() and out.is_cpu
    if not fits or out.storage_offset() % 4:
        raise ConfigError(
            f"Give {size_bytes} contiguous uint8 on the CPU, aligned to 4 bytes, not {list(out.shape)} of "
            f"{out.dtype}."
        )
    packed = out.view(torch.float32).view(-(-outputs // PANEL), depth, PANEL)
    arguments = (
        0, packed.data_ptr(), weight.data_ptr(), 0, 0, 0, depth, inputs, outputs, 0, 0, *weight.stride(),
        1, 0,
    )  # fmt: skip
    run_threads(_kernel(weight.dtype), arguments, 1)
    return packed


def linear(hidden: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return `hidden @ weight.T + bias`; the weight is packed again in each call.

    A result is summed in float32 in the order of the inputs. It has the same bits for any number of rows,
    with a packed or a plain weight, and with any number of threads.

    Args:
        hidden: `[..., inputs]`, of a supported dtype.
        weight: `[outputs, inputs]`, of the same dtype and of any strides.
        bias: `[outputs]`, of the same dtype.

    Returns:
        `[..., outputs]`.

    Raises:
        ConfigError: the dtype is not supported on this CPU, or the shapes do not match.
    """
    outputs, inputs = weight.shape
    if weight.dtype is not hidden.dtype or hidden.shape[-1] != inputs:
        raise ConfigError(
            f"A weight {[outputs, inputs]} of {weight.dtype} cannot multiply {list(hidden.shape)} of "
            f"{hidden.dtype}."
        )
    return _multiply(hidden, (0, weight.data_ptr()), weight.stride(), outputs, bias)


def linear_packed(
    hidden: Tensor, packed: Tensor, shape: tuple[int, int] | torch.Size, bias: Tensor | None = None
) -> Tensor:
    """Return the result of `linear` from a weight packed by `pack`; `shape` is `(outputs, inputs)`.

    Raises:
        ConfigError: the dtype is not supported on this CPU, or the shapes do not match.
    """
    (panels, depth, _), (outputs, inputs) = packed.shape, shape
    fits = -(-outputs // PANEL) == panels and _depth(inputs, hidden.dtype) == depth
    if not fits or hidden.shape[-1] != inputs:
        raise ConfigError(
            f"A weight {[outputs, inputs]}, packed as {list(packed.shape)}, cannot multiply "
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
    arguments = (
        rows.data_ptr(), *weights, 0 if bias is None else bias.data_ptr(), out.data_ptr(), num_rows, depth,
        inputs, outputs, depth, outputs, *strides, -(-outputs // PANEL // (4 * parts)), 0,
    )  # fmt: skip
    run_threads(kernel, arguments, parts)
    return out if num_rows == count else out[:count].view(shape)


def _rows(hidden: Tensor, count: int, inputs: int) -> Tensor:
    """Return contiguous rows of whole words, padded to the rows of the smallest tile."""
    missing, odd = max(0, _LEAST_ROWS - count), inputs * hidden.itemsize % 4 != 0
    if missing or odd:
        return torch.nn.functional.pad(hidden.reshape(-1, inputs), (0, int(odd), 0, missing))
    hidden = hidden.contiguous()
    return hidden if hidden.data_ptr() % 4 == 0 else hidden.clone()


def _depth(inputs: int, dtype: torch.dtype) -> int:
    """Return the number of words in the weights of one output."""
    return -(-inputs * dtype.itemsize // 4)


@cache
def _kernel(dtype: torch.dtype) -> Any:
    if not supported(dtype):
        raise ConfigError(f"This CPU has no kernel for linear layers of {dtype}.")
    with _compiling:
        from hotswap.kernels.packed_linear.kernel import build

        return build(str(dtype).removeprefix("torch."))


def _compiles_for_this() -> bool:
    """Whether numba compiles for the features of this CPU, which is its default."""
    try:
        from numba.core import config
    except ImportError:
        return False
    settings: Any = config
    return not (settings.CPU_NAME or settings.CPU_FEATURES)
