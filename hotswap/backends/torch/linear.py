# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# Of transformers, whose Conv1D has no types.
"""Linear layers on a CPU, from weights as stored or packed into a faster layout.

hotswap's kernel computes them where the CPU has the instructions for it (`packed_linear`), and elsewhere
oneDNN's inner product. Both take a weight as stored or packed, and give the same bits for either: oneDNN
wherever an input has two rows or more, measured for fp32 and bf16, one and several threads. So a layer may be
packed or unpacked at any moment, also in the middle of a stream; only the speed changes. Which of the two
computes depends on the CPU and the dtype alone.

On an x86 CPU without bf16 instructions, bf16 products take up to four times as long as fp32 ones. There a
bf16 layer is *widened*: packed as fp32, its input and output converted. The products of bf16 numbers are
exact in fp32 and were summed in it before, so nothing is less precise. Its bits differ from those of a bf16
kernel:

- With AVX-512 oneDNN has a bf16 kernel, and whether a model is widened depends on its size and the engine's
  settings alone.
- With AVX2 alone there is none, and bf16 layers are always computed in fp32. A weight that is not packed is
  converted in each product, with the same bits.

PyTorch has oneDNN's operators for its own compiler. Where they are missing, layers are computed by PyTorch.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from hotswap.backends.torch import throttle
from hotswap.backends.torch.buffers import host_bytes
from hotswap.backends.torch.device import multiplies_bf16
from hotswap.kernels import packed_linear

__all__ = [
    "LEAST_ROWS",
    "LinearLayer",
    "kernels",
    "linear_layers",
    "product",
    "widened",
    "widens",
]

log = logging.getLogger("hotswap")

# With a single row oneDNN takes other kernels. It keeps as many sums in registers as there are rows, and with
# fewer than four a core waits for each: on an AMD EPYC two rows take 1.3 to 1.4 times as long as four.
LEAST_ROWS = 4
# Rows that the blocks are laid out for: those of a decode batch. Bits do not depend on it.
_TYPICAL_ROWS = 32
# Outputs whose weights are converted together, so that they are still in the cache when they are multiplied.
_CONVERTED_OUTPUTS = 256


def _operators() -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    operators: Any = torch.ops.mkldnn
    return operators._linear_pointwise, operators._reorder_linear_weight


@cache
def kernels() -> frozenset[torch.dtype]:
    """The dtypes that `product` takes on this machine: fp32 and bf16, where there is a kernel for fp32."""
    return frozenset(
        dtype
        for dtype in (torch.float32, torch.bfloat16)
        if _has_kernel(dtype) or (dtype is torch.bfloat16 and _has_kernel(torch.float32))
    )


@cache
def _has_kernel(dtype: torch.dtype) -> bool:
    """Whether this CPU has a kernel that computes in the dtype itself; tried out once."""
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


def product(hidden: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return `hidden @ weight.T + bias` for `[..., in]` and `[out, in]`, all of one dtype of `kernels()`.

    A row has the same bits for any number of rows from two on.
    """
    if packed_linear.supported(hidden.dtype):
        return packed_linear.linear(hidden, weight, bias)
    if _has_kernel(hidden.dtype):
        return _by_onednn(hidden, weight, bias)
    return _in_fp32(hidden, weight, bias)


def _in_fp32(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The same, of bf16, with the bits of a widened layer; the weight is converted piece by piece."""
    out = hidden.new_empty(*hidden.shape[:-1], len(weight))
    wide = hidden.float()
    for first in range(0, len(weight), _CONVERTED_OUTPUTS):
        some = slice(first, first + _CONVERTED_OUTPUTS)
        out[..., some] = product(wide, weight[some].float(), None if bias is None else bias[some].float())
    return out


def _by_onednn(hidden: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """The same for a weight that may also be packed by oneDNN."""
    multiply, _ = _operators()
    return multiply(hidden, weight, bias, "none", [], "")


@cache
def _widens() -> bool:
    """Whether bf16 layers are faster in fp32 on this CPU."""
    x86 = torch.cpu.get_capabilities().get("architecture") == "x86_64"
    return x86 and not multiplies_bf16() and _has_kernel(torch.float32)


def widened() -> bool:
    """Whether bf16 layers are computed in fp32 on this CPU, where there is memory for it."""
    return _widens()


def widens(layers: Iterable[LinearLayer], limit_bytes: int) -> bool:
    """Whether the bf16 layers of a model are computed in fp32: by the CPU, their size and the limit alone.

    Args:
        layers: All linear layers of the model.
        limit_bytes: The most bytes that packed copies may take; never what is free, which varies.
    """
    if not _has_kernel(torch.bfloat16):
        return _has_kernel(torch.float32)
    narrow = [layer.weight for layer in layers if layer.weight.dtype is torch.bfloat16]
    return _widens() and sum(4 * weight.numel() for weight in narrow) <= limit_bytes


class LinearLayer:
    """Computes a linear layer in place of its `forward`; hooks of the layer run as before.

    Attributes:
        packed: The weight in the kernel's layout; `None` while the weight is used as stored.
        is_wide: Whether it computes in fp32 what is stored in bf16.
    """

    __slots__ = ("_parameters", "_transposed", "is_wide", "packed")

    def __init__(self, layer: nn.Module) -> None:
        self._parameters = cast("dict[str, Tensor | None]", layer._parameters)  # pyright: ignore[reportPrivateUsage]
        self._transposed = isinstance(layer, Conv1D)
        self.packed: Tensor | None = None
        self.is_wide = False

    @property
    def stored(self) -> Tensor:
        """The weight of the layer, as loaded."""
        weight = self._parameters["weight"]
        assert weight is not None, "these layers always have one"
        return weight

    @property
    def weight(self) -> Tensor:
        """The weight as `[out, in]`, a view of `stored`."""
        return self.stored.t() if self._transposed else self.stored

    @property
    def packable(self) -> bool:
        """Whether there is a kernel for the weight that is bound."""
        weight = self.stored
        return weight.dtype in kernels() and weight.device.type == "cpu" and weight.numel() > 0

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

        Pauses between pieces while other engines of the process are stepping (`throttle`). Returns `None` if
        the thread gets a command meanwhile.
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
        bias = self._parameters["bias"]
        if self.packed is None and not self.packable:
            return nn.functional.linear(hidden, self.weight, bias)
        if self.packed is None:
            return (_in_fp32 if self.is_wide else product)(hidden, self.weight, bias)
        if not self.is_wide:
            return self._multiply(hidden, self.packed, bias)
        wide_bias = None if bias is None else bias.float()
        return self._multiply(hidden.float(), self.packed, wide_bias).to(hidden.dtype)

    def _multiply(self, hidden: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
        if packed_linear.supported(hidden.dtype):
            return packed_linear.linear_packed(hidden, packed, self.weight.shape, bias)
        return _by_onednn(hidden, packed, bias)


def linear_layers(module: nn.Module) -> tuple[LinearLayer, ...]:
    """Replace `forward` of the linear layers of a module by `LinearLayer`s, and return these in order.

    Replaces `nn.Linear` and GPT-2's `Conv1D` alone: classes derived from them may compute something else.
    """
    made: list[LinearLayer] = []
    for layer in module.modules():
        if type(layer) in (nn.Linear, Conv1D):
            made.append(LinearLayer(layer))
            vars(layer)["forward"] = made[-1]  # what `nn.Module` calls, hooks before and after
    return tuple(made)
