# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# Of transformers, whose Conv1D has no types.
"""Batch-invariant linear layers on a CPU, with weights as stored or packed into a faster layout.

hotswap's kernel (`packed_linear`) computes them if the CPU has the instructions for it, else oneDNN's inner
product. Both accept a weight as stored or packed, with the same bits for either; oneDNN does so for inputs of
two rows or more, measured for fp32 and bf16 with one and several threads, and with AMX for 32 rows at a time.
So a layer may be packed or unpacked at any time, also during a stream: only the speed changes. The choice of
the kernel depends on the CPU and the dtype alone.

On an x86 CPU without bf16 instructions, bf16 products take up to four times as long as fp32 ones. There a
bf16 layer is *widened*: packed as fp32, its input and output converted. The products of bf16 numbers are
exact in fp32 and were summed in it before, so nothing is less precise. Its bits differ from those of a bf16
kernel:

- With AVX-512 oneDNN has a bf16 kernel, and whether a model is widened depends on its size and the engine's
  settings alone: `products_of` tells it, and engines whose bits differ do not exchange KV blocks.
- With AVX2 alone there is none, and bf16 layers are always computed in fp32. A weight that is not packed is
  converted in each product, with the same bits.

PyTorch has oneDNN's operators for its own compiler. If they are missing, PyTorch computes the layers.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

from hotswap.backends.torch import throttle
from hotswap.backends.torch.buffers import host_bytes
from hotswap.backends.torch.device import multiplies_bf16
from hotswap.kernels import packed_linear
from hotswap.kernels.processor import instructions

__all__ = [
    "MIN_ROWS",
    "LinearLayer",
    "invariant_linear",
    "linear_layers",
    "products_of",
    "supported_dtypes",
    "widened",
    "widens",
]

log = logging.getLogger("hotswap")

# With a single row oneDNN uses other kernels, with other bits. It keeps as many sums in registers as there
# are rows, and fewer than four stall a core: on an AMD EPYC two rows take 1.3 to 1.4 times as long as four.
MIN_ROWS = 4
# The number of rows for which oneDNN packs a weight: that of a decode batch. It does not change bits.
_TYPICAL_ROWS = 32
# oneDNN sums in another order for another number of rows with AMX, so it always gets this many. Then a row
# has the same bits wherever it stands, with one thread and with two; of 64 rows it has not.
_MATRIX_UNIT_ROWS = 32
# Outputs whose weights are converted to fp32 at once, so that they are in the cache when they are multiplied.
_CONVERTED_OUTPUTS = 256


def _operators() -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    operators: Any = torch.ops.mkldnn
    return operators._linear_pointwise, operators._reorder_linear_weight


@cache
def supported_dtypes() -> frozenset[torch.dtype]:
    """Return the dtypes that `invariant_linear` accepts on this CPU: fp32 and bf16, if fp32 has a kernel."""
    return frozenset(
        dtype
        for dtype in (torch.float32, torch.bfloat16)
        if _has_kernel(dtype) or (dtype is torch.bfloat16 and _has_kernel(torch.float32))
    )


@cache
def _has_kernel(dtype: torch.dtype) -> bool:
    """Whether this CPU has a kernel that computes in the dtype itself; tested once per process."""
    return packed_linear.supported(dtype) or _onednn_works(dtype)


def _onednn_works(dtype: torch.dtype) -> bool:
    try:
        _, pack = _operators()
        weight = torch.ones(16, 16, dtype=dtype)
        out = _by_onednn(weight, pack(weight, _TYPICAL_ROWS))
        return bool((out == 16).all())
    except (AttributeError, RuntimeError) as exc:
        log.info("oneDNN has no kernel for linear layers in %s on this CPU (%s).", dtype, exc)
        return False


def invariant_linear(hidden: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return `hidden @ weight.T + bias`, with the same bits of a row for any number of rows from two on.

    Args:
        hidden: `[..., in]`, of a dtype of `supported_dtypes()`, like the others.
        weight: `[out, in]`.
        bias: `[out]`, or `None`.
    """
    if packed_linear.supported(hidden.dtype):
        return packed_linear.linear(hidden, weight, bias)
    if _has_kernel(hidden.dtype):
        return _by_onednn(hidden, weight, bias)
    return _in_fp32(hidden, weight, bias)


def _in_fp32(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute a bf16 layer in fp32, with the bits of a widened layer; converts the weight piece by piece."""
    out = hidden.new_empty(*hidden.shape[:-1], len(weight))
    wide = hidden.float()
    for first in range(0, len(weight), _CONVERTED_OUTPUTS):
        some = slice(first, first + _CONVERTED_OUTPUTS)
        out[..., some] = invariant_linear(
            wide, weight[some].float(), None if bias is None else bias[some].float()
        )
    return out


def _by_onednn(hidden: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute a layer with oneDNN; its weight is as stored or packed by oneDNN."""
    multiply, _ = _operators()
    if hidden.dtype is not torch.bfloat16 or not _has_matrix_unit():
        return multiply(hidden, weight, bias, "none", [], "")
    rows = hidden.reshape(-1, hidden.shape[-1])
    num_rows = len(rows)
    rows = functional.pad(rows, (0, 0, 0, -num_rows % _MATRIX_UNIT_ROWS))
    blocks = torch.split(rows, _MATRIX_UNIT_ROWS)
    parts = [multiply(block, weight, bias, "none", [], "") for block in blocks]
    out = parts[0] if len(parts) == 1 else torch.cat(parts)
    return out[:num_rows].view(*hidden.shape[:-1], out.shape[-1])


@cache
def _has_matrix_unit() -> bool:
    """Whether oneDNN multiplies bf16 by AMX."""
    return "amx_bf16" in instructions()


@cache
def _widens() -> bool:
    """Whether bf16 layers are faster in fp32 on this CPU."""
    x86 = torch.cpu.get_capabilities().get("architecture") == "x86_64"
    return x86 and not multiplies_bf16() and _has_kernel(torch.float32)


def widened() -> bool:
    """Whether bf16 layers are computed in fp32 on this CPU if the packed copies have enough memory."""
    return _widens()


def widens(layers: Iterable[LinearLayer], limit_bytes: int) -> bool:
    """Whether the bf16 layers of a model are computed in fp32; depends on CPU, size and limit alone.

    Args:
        layers: All linear layers of the model.
        limit_bytes: The limit of packed copies, not the free part of it, which varies.
    """
    if not _has_kernel(torch.bfloat16):
        return _has_kernel(torch.float32)
    narrow = [layer.weight for layer in layers if layer.weight.dtype is torch.bfloat16]
    return _widens() and sum(4 * weight.numel() for weight in narrow) <= limit_bytes


def products_of(layers: Iterable[LinearLayer]) -> str:
    """Return how this CPU multiplies by the weights of a model: engines for which it differs have other bits.

    Args:
        layers: The bound linear layers of the model.
    """
    capability = torch.backends.cpu.get_cpu_capability()
    ways = {_product(layer.stored.dtype, is_wide=layer.is_wide) for layer in layers if layer.packable}
    return f"{capability}: {', '.join(sorted(ways))}"


def _product(dtype: torch.dtype, *, is_wide: bool) -> str:
    computed = torch.float32 if is_wide or not _has_kernel(dtype) else dtype
    kernel = "hotswap" if packed_linear.supported(computed) else "oneDNN"
    unit = " with AMX" if _has_matrix_unit() else ""
    return f"{dtype} in {computed} by {kernel}{unit}".replace("torch.", "")


class LinearLayer:
    """Replaces the `forward` of a linear layer; hooks of the layer still run.

    Attributes:
        packed: The weight in the kernel's layout; `None` while the weight is used as stored.
        is_wide: Whether a layer stored in bf16 is computed in fp32.
    """

    __slots__ = ("_parameters", "_transposed", "is_wide", "packed")

    def __init__(self, layer: nn.Module) -> None:
        self._parameters = cast("dict[str, Tensor | None]", layer._parameters)  # pyright: ignore[reportPrivateUsage]  # as in `modeling`
        self._transposed = isinstance(layer, Conv1D)
        self.packed: Tensor | None = None
        self.is_wide = False

    @property
    def stored(self) -> Tensor:
        """The weight of the layer, as loaded."""
        weight = self._parameters["weight"]
        assert weight is not None, "linear layers have a weight"
        return weight

    @property
    def weight(self) -> Tensor:
        """The weight as `[out, in]`, a view of `stored`."""
        return self.stored.t() if self._transposed else self.stored

    @property
    def packable(self) -> bool:
        """Whether there is a kernel for the bound weight."""
        weight = self.stored
        return weight.dtype in supported_dtypes() and weight.device.type == "cpu" and weight.numel() > 0

    @property
    def packed_bytes(self) -> int:
        """The size of the packed weight, whether it is packed or not."""
        dtype = self.dtype
        if packed_linear.supported(dtype):
            outputs, inputs = self.weight.shape
            return packed_linear.packed_bytes(outputs, inputs, dtype)
        return self.stored.numel() * dtype.itemsize

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that the layer is computed in."""
        return torch.float32 if self.is_wide else self.stored.dtype

    def pack(self) -> Tensor | None:
        """Return the weight in the kernel's layout, without attaching it to the layer.

        Pauses between pieces while other engines of the process run steps (`throttle`). Returns `None` if the
        thread receives a command meanwhile.
        """
        weight = self.weight.detach()
        if not packed_linear.supported(self.dtype):
            _, pack = _operators()
            return pack(weight.to(self.dtype), _TYPICAL_ROWS)
        outputs, inputs = weight.shape
        out, panel = host_bytes(self.packed_bytes), packed_linear.PANEL
        at_once = max(1, throttle.PIECE_BYTES // (panel * inputs * self.dtype.itemsize)) * panel
        at, worked_s = 0, 0.0
        for first in range(0, outputs, at_once):
            if first and not throttle.pause(worked_s):
                return None
            began_s = time.perf_counter()
            piece = weight[first : first + at_once].to(self.dtype)
            end = at + packed_linear.packed_bytes(len(piece), inputs, self.dtype)
            packed_linear.pack(piece, out[at:end])
            at, worked_s = end, time.perf_counter() - began_s
        return out.view(torch.float32).view(-(-outputs // panel), -1, panel)

    def __call__(self, hidden: Tensor) -> Tensor:
        """Return `hidden @ weight.T + bias` for `[..., in]`."""
        bias, packed = self._parameters["bias"], self.packed  # which another thread may drop meanwhile
        if packed is None and not self.packable:
            return nn.functional.linear(hidden, self.weight, bias)
        if packed is None:
            return (_in_fp32 if self.is_wide else invariant_linear)(hidden, self.weight, bias)
        if not self.is_wide:
            return self._multiply(hidden, packed, bias)
        wide_bias = None if bias is None else bias.float()
        return self._multiply(hidden.float(), packed, wide_bias).to(hidden.dtype)

    def _multiply(self, hidden: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
        if packed_linear.supported(hidden.dtype):
            return packed_linear.linear_packed(hidden, packed, self.weight.shape, bias)
        return _by_onednn(hidden, packed, bias)


def linear_layers(module: nn.Module) -> tuple[LinearLayer, ...]:
    """Replace the `forward` of a module's linear layers with `LinearLayer`s, and return these in order.

    Only `nn.Linear` and GPT-2's `Conv1D`, not classes derived from them, which may compute something else.
    """
    made: list[LinearLayer] = []
    for layer in module.modules():
        if type(layer) in (nn.Linear, Conv1D):
            made.append(LinearLayer(layer))
            vars(layer)["forward"] = made[-1]  # `nn.Module.__call__` calls it, with hooks before and after
    return tuple(made)
