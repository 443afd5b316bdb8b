# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# Of transformers, whose Conv1D has no types.
"""Linear layers on a CPU, whose weights are packed into another layout when there is time for it.

A kernel of hotswap's own computes them where the CPU has the instructions for it (`packed_linear`), and
elsewhere oneDNN's inner product. Both take a weight as it lies in memory or packed, and give the same bits
for either: oneDNN wherever an input has two rows or more, measured for fp32 and bf16, one and several
threads. So a layer may be packed or unpacked at any moment, also in the middle of a stream; only the speed
changes. Which of the two computes depends on the CPU and the dtype alone.

On an x86 CPU without bf16 instructions, bf16 products take up to four times as long as fp32 ones. There a
bf16 layer is *widened*: packed as fp32, its input and output converted. The products of bf16 numbers are
exact in fp32 and were summed in it before, so nothing is less precise. Its bits differ from those of a bf16
kernel:

- With AVX-512 oneDNN has a bf16 kernel, and whether a model is widened depends on its size and the engine's
  settings alone.
- With AVX2 alone there is none, and bf16 layers are always computed in fp32. A weight that is not packed is
  converted in each product, with the same bits.

PyTorch offers oneDNN's operators to its own compiler. Where they are missing, layers stay as they were.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Hashable, Iterable
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
    "Packs",
    "Shelf",
    "kernels",
    "linear_layers",
    "product",
    "widened",
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
    """Whether this CPU is better off with bf16 layers in fp32."""
    x86 = torch.cpu.get_capabilities().get("architecture") == "x86_64"
    return x86 and not multiplies_bf16() and _has_kernel(torch.float32)


def widened() -> bool:
    """Whether bf16 layers are computed in fp32 here, where there is memory for it."""
    return _widens()


class LinearLayer:
    """What computes a linear layer in place of its `forward`; hooks of the layer run as ever.

    Attributes:
        packed: The weight in the layout of what computes it; while it is `None` the layer's own is used.
        wide: Whether it computes in fp32 what is stored in bf16.
    """

    __slots__ = ("_parameters", "_transposed", "packed", "wide")

    def __init__(self, layer: nn.Module) -> None:
        self._parameters = cast("dict[str, Tensor | None]", layer._parameters)  # pyright: ignore[reportPrivateUsage]
        self._transposed = isinstance(layer, Conv1D)
        self.packed: Tensor | None = None
        self.wide = False

    @property
    def stored(self) -> Tensor:
        """The weight as the store has it."""
        weight = self._parameters["weight"]
        assert weight is not None, "these layers always have one"
        return weight

    @property
    def weight(self) -> Tensor:
        """`[out, in]`, a view of what is stored."""
        return self.stored.t() if self._transposed else self.stored

    @property
    def packable(self) -> bool:
        """Whether there is a kernel for the weight that is bound."""
        weight = self.stored
        return weight.dtype in kernels() and weight.device.type == "cpu" and weight.numel() > 0

    @property
    def packed_bytes(self) -> int:
        """What the packed weight takes, or would take."""
        dtype = self.dtype
        if packed_linear.supported(dtype):
            outputs, inputs = self.weight.shape
            return packed_linear.packed_bytes(outputs, inputs, dtype)
        return self.stored.numel() * dtype.itemsize

    @property
    def dtype(self) -> torch.dtype:
        """What it computes in."""
        return torch.float32 if self.wide else self.stored.dtype

    def pack(self) -> Tensor | None:
        """Return the weight in the layout of what computes it; the layer does not use it yet.

        Where other engines of the process step meanwhile, it rests between pieces, and returns `None` if the
        thread is wanted for something else.
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
            return (_in_fp32 if self.wide else product)(hidden, self.weight, bias)
        if not self.wide:
            return self._multiply(hidden, self.packed, bias)
        wide_bias = None if bias is None else bias.float()
        return self._multiply(hidden.float(), self.packed, wide_bias).to(hidden.dtype)

    def _multiply(self, hidden: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
        if packed_linear.supported(hidden.dtype):
            return packed_linear.linear_packed(hidden, packed, self.weight.shape, bias)
        return _by_onednn(hidden, packed, bias)


def linear_layers(module: nn.Module) -> tuple[LinearLayer, ...]:
    """Have the linear layers of a module computed by `LinearLayer`s, and return these in order.

    Only `nn.Linear` and GPT-2's `Conv1D` themselves: what is derived from them computes something else.
    """
    made: list[LinearLayer] = []
    for layer in module.modules():
        if type(layer) in (nn.Linear, Conv1D):
            made.append(LinearLayer(layer))
            vars(layer)["forward"] = made[-1]  # what `nn.Module` calls, hooks before and after
    return tuple(made)


class Packs:
    """The packed weights of one model, layer by layer; made and changed by its `Shelf` alone.

    Attributes:
        key: What the weights are, so that they are found again; `None` if nobody could tell.
        weights: One for each layer, `None` for what is not packed.
        layers: Those that use them now; empty while nobody does.
        complete: Whether there is no more to be packed, or no room for it.
    """

    def __init__(self, key: Hashable | None, layers: tuple[LinearLayer, ...]) -> None:
        self.key = key
        self.weights: list[Tensor | None] = [None] * len(layers)
        self.layers = layers
        self.complete = False

    @property
    def size_bytes(self) -> int:
        """Memory that they take."""
        return sum(weight.nbytes for weight in self.weights if weight is not None)


class Shelf:
    """Keeps packed weights, also of models that nobody runs, within a budget of memory.

    They are copies that can be made again: whoever needs the memory lowers `fit`, and they go, those of idle
    models first. All methods may be called from any thread.

    Args:
        limit_bytes: The most that they may take together.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self._room_bytes = limit_bytes
        self._used_bytes = 0
        self._shelf: list[Packs] = []  # the one used last is last
        self._lock = threading.Lock()

    @property
    def used_bytes(self) -> int:
        """What they take now."""
        return self._used_bytes

    def take(self, key: Hashable | None, layers: tuple[LinearLayer, ...]) -> Packs:
        """Let bound layers use the packed weights that are kept for `key`, or new ones, as yet empty."""
        wide = self._widens(layers)
        for layer in layers:
            layer.wide = wide and layer.weight.dtype is torch.bfloat16
        for dtype in {layer.dtype for layer in layers if layer.packable}:
            if packed_linear.supported(dtype):
                packed_linear.compile_for(dtype)
        with self._lock:
            kept = [p for p in self._shelf if key is not None and p.key == key and not p.layers]
            packs = kept[0] if kept else Packs(key, layers)
            self._shelf = [*(p for p in self._shelf if p is not packs), packs]
            packs.layers = layers
            for layer, weight in zip(layers, packs.weights, strict=True):
                layer.packed = weight
        return packs

    def give(self, packs: Packs) -> None:
        """Take packed weights back from layers that are about to be unbound, and keep them if that helps."""
        with self._lock:
            for layer in packs.layers:
                layer.packed, layer.wide = None, False
            packs.layers = ()
            if packs.key is None:
                self._drop(packs)

    def pack_next(self, packs: Packs) -> bool:
        """Pack one more layer, unless the thread is wanted for something else; what it began is lost then.

        False if none is left or there is no room.
        """
        # Before room is made: a swap, which packing follows, has itself taken time from others' steps.
        if not packs.complete and not throttle.pause(math.inf):
            return True
        index = self._reserve(packs)
        if index is None:
            return False
        layer = packs.layers[index]
        size_bytes = layer.packed_bytes
        fails = False
        try:
            weight = layer.pack()
        except (RuntimeError, MemoryError) as exc:
            log.warning("A layer stays unpacked and slower, for want of memory or a kernel (%s).", exc)
            weight, fails = None, True
        with self._lock:
            fits = packs in self._shelf and packs.layers and self._used_bytes <= self._room_bytes
            if weight is not None and fits:
                packs.weights[index] = layer.packed = weight
                return True
            self._used_bytes -= size_bytes
            packs.complete = fails or not fits
            return not packs.complete

    def fit(self, room_bytes: int) -> None:
        """Take no more than `room_bytes` from now on, whatever has to go for it."""
        with self._lock:
            self._room_bytes = max(0, min(self.limit_bytes, room_bytes))
            for packs in self._shelf:
                packs.complete = False
            self._shrink(self._room_bytes)

    def clear(self) -> None:
        """Drop everything."""
        with self._lock:
            self._shrink(0)

    def _widens(self, layers: Iterable[LinearLayer]) -> bool:
        """Whether a model is widened: by the CPU, its size and the limit, not by what is free."""
        if not _has_kernel(torch.bfloat16):
            return _has_kernel(torch.float32)
        narrow = [layer.weight for layer in layers if layer.weight.dtype is torch.bfloat16]
        return _widens() and sum(4 * weight.numel() for weight in narrow) <= self.limit_bytes

    def _reserve(self, packs: Packs) -> int | None:
        """The first layer to be packed, whose bytes are now spoken for."""
        with self._lock:
            if packs.complete or not packs.layers:
                return None
            for index, layer in enumerate(packs.layers):
                if packs.weights[index] is not None or not layer.packable:
                    continue
                size_bytes = layer.packed_bytes
                self._shrink(self._room_bytes - size_bytes, idle_only=True)
                if self._used_bytes + size_bytes <= self._room_bytes:
                    self._used_bytes += size_bytes
                    return index
            packs.complete = True
            return None

    def _shrink(self, target_bytes: int, *, idle_only: bool = False) -> None:
        """Drop idle packs, oldest first, then those in use unless only idle ones may go."""
        idle = [packs for packs in self._shelf if not packs.layers]
        used = [packs for packs in self._shelf if packs.layers and not idle_only]
        for packs in (*idle, *used):
            if self._used_bytes <= target_bytes:
                return
            self._drop(packs)

    def _drop(self, packs: Packs) -> None:
        self._used_bytes -= packs.size_bytes
        packs.weights = [None] * len(packs.weights)
        for layer in packs.layers:
            layer.packed = None
        if not packs.layers:
            self._shelf.remove(packs)
