"""Packed copies of linear weights, kept within a memory limit, also for models that are not loaded."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Hashable

import torch
from torch import Tensor

from hotswap.backends.torch import throttle
from hotswap.backends.torch.linear import LinearLayer, widens
from hotswap.kernels import packed_linear

__all__ = ["PackedCache", "PackedWeights"]

log = logging.getLogger("hotswap")


class PackedWeights:
    """The packed weights of one model, layer by layer; changed by its `PackedCache` alone.

    Attributes:
        key: Identifies the weights, so that a later load finds them; `None` if they have no identity.
        weights: One for each layer; `None` for a layer that is not packed.
        layers: The layers that use them now; empty while the model is not loaded.
        complete: Whether all layers are packed, or the memory limit allows no more.
    """

    def __init__(self, key: Hashable | None, layers: tuple[LinearLayer, ...]) -> None:
        self.key = key
        self.weights: list[Tensor | None] = [None] * len(layers)
        self.layers = layers
        self.complete = False

    @property
    def size_bytes(self) -> int:
        """The memory of the packed weights."""
        return sum(weight.nbytes for weight in self.weights if weight is not None)


class PackedCache:
    """Keeps packed weights within a memory limit, also those of models that are not loaded.

    Packed weights are copies that can be made again: `fit` drops them when the memory is needed, those of
    models that are not loaded first. All methods may be called from any thread.

    Args:
        limit_bytes: The most memory of all packed weights together.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self._room_bytes = limit_bytes
        self._used_bytes = 0
        self._entries: list[PackedWeights] = []  # the most recently used is last
        self._lock = threading.Lock()

    @property
    def used_bytes(self) -> int:
        """The memory of all packed weights, including the layer that is being packed."""
        return self._used_bytes

    def acquire(self, key: Hashable | None, layers: tuple[LinearLayer, ...]) -> PackedWeights:
        """Attach the packed weights that are kept for `key`, or new empty ones, to bound layers."""
        is_wide = widens(layers, self.limit_bytes)
        for layer in layers:
            layer.is_wide = is_wide and layer.weight.dtype is torch.bfloat16
        for dtype in {layer.dtype for layer in layers if layer.packable}:
            if packed_linear.supported(dtype):
                packed_linear.compile_for(dtype)
        with self._lock:
            kept = [p for p in self._entries if key is not None and p.key == key and not p.layers]
            packed = kept[0] if kept else PackedWeights(key, layers)
            self._entries = [*(p for p in self._entries if p is not packed), packed]
            packed.layers = layers
            for layer, weight in zip(layers, packed.weights, strict=True):
                layer.packed = weight
        return packed

    def release(self, packed: PackedWeights) -> None:
        """Detach packed weights from layers that are about to be unbound; keep them if they have a key."""
        with self._lock:
            for layer in packed.layers:
                layer.packed, layer.is_wide = None, False
            packed.layers = ()
            if packed.key is None:
                self._drop(packed)

    def pack_next(self, packed: PackedWeights) -> bool:
        """Pack one more layer. If the thread receives a command meanwhile, the partial work is dropped.

        Returns:
            False if no layer is left or the memory limit is reached.
        """
        # Pause before memory is freed: the preceding swap has already delayed other engines' steps.
        if not packed.complete and not throttle.pause(math.inf):
            return True
        index = self._reserve(packed)
        if index is None:
            return False
        layer = packed.layers[index]
        size_bytes = layer.packed_bytes
        fails = False
        try:
            weight = layer.pack()
        except (RuntimeError, MemoryError) as exc:
            log.warning("A layer stays unpacked and slower: it has no memory or no kernel (%s).", exc)
            weight, fails = None, True
        with self._lock:
            fits = packed in self._entries and packed.layers and self._used_bytes <= self._room_bytes
            if weight is not None and fits:
                packed.weights[index] = layer.packed = weight
                return True
            self._used_bytes -= size_bytes
            packed.complete = fails or not fits
            return not packed.complete

    def fit(self, room_bytes: int) -> None:
        """Lower or raise the memory limit to `room_bytes`, and drop packed weights that exceed it."""
        with self._lock:
            self._room_bytes = max(0, min(self.limit_bytes, room_bytes))
            for packed in self._entries:
                packed.complete = False
            self._shrink(self._room_bytes)

    def clear(self) -> None:
        """Drop everything."""
        with self._lock:
            self._shrink(0)

    def _reserve(self, packed: PackedWeights) -> int | None:
        """Return the index of the next layer to pack, having reserved its bytes; `None` if there is none."""
        with self._lock:
            if packed.complete or not packed.layers:
                return None
            for index, layer in enumerate(packed.layers):
                if packed.weights[index] is not None or not layer.packable:
                    continue
                size_bytes = layer.packed_bytes
                self._shrink(self._room_bytes - size_bytes, idle_only=True)
                if self._used_bytes + size_bytes <= self._room_bytes:
                    self._used_bytes += size_bytes
                    return index
            packed.complete = True
            return None

    def _shrink(self, target_bytes: int, *, idle_only: bool = False) -> None:
        """Drop weights of models that are not loaded, oldest first, then others unless `idle_only`."""
        idle = [packed for packed in self._entries if not packed.layers]
        used = [packed for packed in self._entries if packed.layers and not idle_only]
        for packed in (*idle, *used):
            if self._used_bytes <= target_bytes:
                return
            self._drop(packed)

    def _drop(self, packed: PackedWeights) -> None:
        self._used_bytes -= packed.size_bytes
        packed.weights = [None] * len(packed.weights)
        for layer in packed.layers:
            layer.packed = None
        if not packed.layers:
            self._entries.remove(packed)
