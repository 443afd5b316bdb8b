"""Flat weight buffers: those that the engine owns and fills from a store, and those that a store lends."""

from __future__ import annotations

import ctypes
import threading
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hotswap.backends.memory import aligned_buffer
from hotswap.errors import ShardCorrupt
from hotswap.model import HostChunk, Manifest, Shard
from hotswap.store import SupportsReadInto, WeightStore
from hotswap.worker_threads import run_in_thread

__all__ = ["FlatBuffers", "check_shard_size", "fetch", "host_bytes", "in_place"]


def host_bytes(size_bytes: int, *, huge: bool = True) -> Tensor:
    """Return zeroed uint8 host memory whose pages are allocated when they are first written.

    Args:
        size_bytes: The size.
        huge: Whether to ask for huge pages; see `aligned_buffer`.

    Raises:
        MemoryError: there is not enough memory.
    """
    if not size_bytes:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(aligned_buffer(size_bytes, huge=huge), dtype=torch.uint8)


class FlatBuffers:
    """Allocates flat buffers and caches some released ones: writing to new pages costs ten times a copy.

    On a GPU nothing is cached, so that an unload returns the memory to the driver. Methods block for as long
    as it takes to allocate or free gigabytes: call them in a worker thread. Thread-safe.

    Args:
        device: The device of the buffers.
        idle_bytes: The maximum size of all cached buffers together, on a CPU.
    """

    def __init__(self, device: torch.device, idle_bytes: int) -> None:
        self._device = device
        self._idle_limit = idle_bytes if device.type == "cpu" else 0
        self._idle: list[Tensor] = []
        self._lock = threading.Lock()

    def allocate(self, size_bytes: int) -> Tensor:
        """Return a uint8 buffer of at least `size_bytes`; a cached one has at most twice that."""
        with self._lock:
            fitting = [buffer for buffer in self._idle if size_bytes <= len(buffer) <= 2 * size_bytes]
            if fitting:
                chosen = min(fitting, key=len)
                self._idle = [buffer for buffer in self._idle if buffer is not chosen]
                return chosen
            self._idle.clear()
        if self._device.type != "cpu":
            return torch.empty(size_bytes, dtype=torch.uint8, device=self._device)
        return host_bytes(size_bytes)  # page-aligned, so that a store can read directly into it

    def release(self, buffer: Tensor) -> None:
        """Take a buffer back; it is cached if it fits within the limit, larger buffers first."""
        with self._lock:
            self._idle = sorted([*self._idle, buffer], key=len)
            while sum(len(idle) for idle in self._idle) > self._idle_limit:
                self._idle.pop(0)

    def clear(self) -> None:
        """Free all cached buffers."""
        with self._lock:
            self._idle.clear()


async def fetch(store: WeightStore, manifest: Manifest, flat: Tensor, *, rank: int = 0) -> None:
    """Read the shards of a rank into `flat`: directly on a CPU if the store can, else chunk by chunk.

    To a GPU chunks are copied on a stream of their own, beside the steps of the model that serves. Each copy
    has ended when the store is asked for the next chunk, and all have when this returns.

    Raises:
        ShardCorrupt: a shard or a chunk lies outside the buffer, or a shard ended early.
    """
    copies = _Copies(flat)
    for shard in manifest.shards_of(rank):
        if not await _read_in_place(store, shard, flat):
            await _copy_chunks(store, shard, copies)


async def _read_in_place(store: WeightStore, shard: Shard, flat: Tensor) -> bool:
    if flat.device.type != "cpu" or not isinstance(store, SupportsReadInto):
        return False
    _check_inside(shard.buffer_offset_bytes, shard.size_bytes, shard, flat)
    target = flat[shard.buffer_offset_bytes : shard.buffer_offset_bytes + shard.size_bytes]
    return await store.read_into(shard, target.numpy().data) is not None


async def _copy_chunks(store: WeightStore, shard: Shard, copies: _Copies) -> None:
    """Copy chunk after chunk in a worker thread, while the store reads the next one."""
    copied = 0
    async with store.open(shard) as chunks:
        async for chunk in chunks:
            _check_inside(chunk.offset_bytes, chunk.data.nbytes, shard, copies.flat)
            await run_in_thread(copies.copy, chunk)
            copied += chunk.data.nbytes
    check_shard_size(shard, copied)


def check_shard_size(shard: Shard, copied_bytes: int) -> None:
    """Raise `ShardCorrupt` unless `copied_bytes` is the size of the shard."""
    if copied_bytes != shard.size_bytes:
        raise ShardCorrupt(
            f"{shard.file!r} gave {copied_bytes} bytes where its index says {shard.size_bytes}; "
            "convert the model again."
        )


def _check_inside(offset_bytes: int, size_bytes: int, shard: Shard, flat: Tensor) -> None:
    if not 0 <= offset_bytes <= len(flat) - size_bytes:
        raise ShardCorrupt(
            f"A chunk of {shard.file!r} belongs at byte {offset_bytes} of a buffer of {len(flat)}; "
            "convert the model again."
        )


def in_place(data: memoryview) -> Tensor:
    """Return lent memory as a uint8 CPU tensor, without a copy. It must not be written to.

    PyTorch has no read-only tensors and warns about read-only memory, so the tensor is made from an address.
    The memory stays allocated for as long as the tensor or a view of it exists.
    """
    window = (ctypes.c_uint8 * len(data)).from_address(np.frombuffer(data, dtype=np.uint8).ctypes.data)
    window.lent = data[:]  # type: ignore[attr-defined]  # keeps the memory alive: the array does not
    return torch.frombuffer(window, dtype=torch.uint8)


class _Copies:
    """Copies chunks to a flat buffer, on a GPU on a stream of their own.

    Args:
        flat: The buffer.
    """

    def __init__(self, flat: Tensor) -> None:
        self.flat = flat
        self._stream: Any = None

    def copy(self, chunk: HostChunk) -> None:
        """Copy a chunk, and wait for the end of the copy. Blocking."""
        if self.flat.device.type != "cuda":
            _copy(chunk, self.flat)
            return
        if self._stream is None:
            streams: Any = torch.cuda.Stream  # without types
            self._stream = streams(self.flat.device)
            # Steps under way may still use what was in the memory of the buffer before.
            self._stream.wait_stream(torch.cuda.current_stream(self.flat.device))
        with torch.cuda.stream(self._stream):
            _copy(chunk, self.flat)


def _copy(chunk: HostChunk, flat: Tensor) -> None:
    target = flat[chunk.offset_bytes : chunk.offset_bytes + chunk.data.nbytes]
    if not chunk.data.readonly:
        target.copy_(torch.frombuffer(chunk.data, dtype=torch.uint8))
    elif target.device.type == "cpu":
        # torch warns about read-only memory, such as a mapped file; numpy does not.
        np.copyto(target.numpy(), np.frombuffer(chunk.data, dtype=np.uint8))
    else:
        target.copy_(in_place(chunk.data))
