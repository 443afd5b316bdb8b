"""Flat weight buffers: the engine's own, into which a store's chunks are copied, and those a store lends."""

from __future__ import annotations

import ctypes
import threading

import anyio.to_thread
import numpy as np
import torch
from torch import Tensor

from hotswap.backends.memory import aligned_buffer
from hotswap.errors import ShardCorrupt
from hotswap.model import HostChunk, Manifest, Shard
from hotswap.store import SupportsReadInto, WeightStore

__all__ = ["FlatBuffers", "check_whole", "fetch", "host_bytes", "in_place"]


def host_bytes(size_bytes: int, *, huge: bool = True) -> Tensor:
    """Return uint8 zeros in host memory, which take none until they are written to; see `aligned_buffer`.

    Raises:
        MemoryError: there is no such room.
    """
    if not size_bytes:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(aligned_buffer(size_bytes, huge=huge), dtype=torch.uint8)


class FlatBuffers:
    """Makes flat buffers, and keeps a few that are idle: writing to fresh pages costs ten times a copy.

    On a GPU nothing is kept, where the driver must see that an unload gave the memory back. To make and to
    free gigabytes takes a while: call it in a worker thread, any will do.

    Args:
        device: Where the buffers lie.
        idle_bytes: How much may be kept while nobody uses it.
    """

    def __init__(self, device: torch.device, idle_bytes: int) -> None:
        self._device = device
        self._idle_limit = idle_bytes if device.type == "cpu" else 0
        self._idle: list[Tensor] = []
        self._lock = threading.Lock()

    def take(self, size_bytes: int) -> Tensor:
        """Return a uint8 buffer of `size_bytes` or more: the smallest idle one that wastes little."""
        with self._lock:
            fitting = [buffer for buffer in self._idle if size_bytes <= len(buffer) <= 2 * size_bytes]
            if fitting:
                chosen = min(fitting, key=len)
                self._idle = [buffer for buffer in self._idle if buffer is not chosen]
                return chosen
            self._idle.clear()
        if self._device.type != "cpu":
            return torch.empty(size_bytes, dtype=torch.uint8, device=self._device)
        return host_bytes(size_bytes)  # on a page, where a store can read straight into it

    def give(self, buffer: Tensor) -> None:
        """Take a buffer back, and keep it if it may be kept; the largest are."""
        with self._lock:
            self._idle = sorted([*self._idle, buffer], key=len)
            while sum(len(idle) for idle in self._idle) > self._idle_limit:
                self._idle.pop(0)

    def clear(self) -> None:
        """Free what is idle."""
        with self._lock:
            self._idle.clear()


async def fetch(store: WeightStore, manifest: Manifest, flat: Tensor, *, rank: int = 0) -> None:
    """Bring the shards of a rank into `flat`: read in place on the CPU if the store can, else copied.

    Raises:
        ShardCorrupt: a shard or a chunk lies outside the buffer, or a shard ended early.
    """
    for shard in manifest.shards_of(rank):
        if not await _read_in_place(store, shard, flat):
            await _copy_chunks(store, shard, flat)


async def _read_in_place(store: WeightStore, shard: Shard, flat: Tensor) -> bool:
    if flat.device.type != "cpu" or not isinstance(store, SupportsReadInto):
        return False
    _check_inside(shard.buffer_offset_bytes, shard.size_bytes, shard, flat)
    place = flat[shard.buffer_offset_bytes : shard.buffer_offset_bytes + shard.size_bytes]
    return await store.read_into(shard, place.numpy().data) is not None


async def _copy_chunks(store: WeightStore, shard: Shard, flat: Tensor) -> None:
    """Copy chunk after chunk in a worker thread; the store reads on meanwhile."""
    copied = 0
    async with store.open(shard) as chunks:
        async for chunk in chunks:
            _check_inside(chunk.offset_bytes, chunk.data.nbytes, shard, flat)
            await anyio.to_thread.run_sync(_copy, chunk, flat)
            copied += chunk.data.nbytes
    check_whole(shard, copied)


def check_whole(shard: Shard, copied_bytes: int) -> None:
    """Raise `ShardCorrupt` unless all bytes of a shard have come."""
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
    """Return lent memory as a uint8 tensor on the CPU; nothing is copied, and nobody may write to it.

    PyTorch has no read-only tensors, and warns of memory that is read-only. Memory stays for as long as a
    tensor looks at it, whatever its lender thinks.
    """
    window = (ctypes.c_uint8 * len(data)).from_address(np.frombuffer(data, dtype=np.uint8).ctypes.data)
    window.lent = data[:]  # type: ignore[attr-defined]  # an array made from an address owns nothing
    return torch.frombuffer(window, dtype=torch.uint8)


def _copy(chunk: HostChunk, flat: Tensor) -> None:
    target = flat[chunk.offset_bytes : chunk.offset_bytes + chunk.data.nbytes]
    if not chunk.data.readonly:
        target.copy_(torch.frombuffer(chunk.data, dtype=torch.uint8))
    elif target.device.type == "cpu":
        # torch will not look at read-only memory, such as a mapped file, without a warning.
        np.copyto(target.numpy(), np.frombuffer(chunk.data, dtype=np.uint8))
    else:
        target.copy_(in_place(chunk.data))
