"""`HostKVStore`: KV blocks in the host memory of this process."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Self

from anyio.lowlevel import checkpoint

from hotswap.backends.kv_indexed import IndexedKVStore
from hotswap.backends.kv_stores.arena import Arena
from hotswap.backends.kv_stores.pages import Pages, whole_pages
from hotswap.backends.kv_stores.staging import Staging
from hotswap.worker_threads import in_thread

__all__ = ["HostKVStore"]

# Copies of more bytes are made in a thread.
_MOST_INLINE_BYTES = 256 << 10


class HostKVStore(IndexedKVStore[Pages]):
    """Keeps KV blocks in host memory under a budget, for as long as it is entered.

    Memory is taken from the system as it is first needed, and kept: pages that are there already are written
    sooner than new ones. Blocks of all models share it, whatever their size.
    What is read for a device is copied through pinned memory where torch uses CUDA in this process.

    It holds what users wrote, in a form that can be read back: in memory alone, and no longer than the fleet
    that entered it runs.

    Args:
        capacity: The budget, as a number of bytes or as text such as `"4 GiB"`. Reads of blocks that are
            scattered or go to a device take as much more as they ask for at once, of which up to 16 MiB are
            kept for the next ones. A fleet asks for 4 MiB, or a block, for each instance that restores.

    Raises:
        ConfigError: the capacity is no size.
        MemoryError: on entering, the system has no such room.
    """

    def __init__(self, capacity: int | str) -> None:
        super().__init__(capacity, tier="host")
        self._arena, self._staging = Arena(0), Staging()

    @asynccontextmanager
    async def __asynccontextmanager__(self) -> AsyncGenerator[Self]:
        async with super().__asynccontextmanager__():
            self._arena = Arena(self._capacity_bytes)
            try:
                yield self
            finally:
                self._staging.close()
                self._arena.close()
                self._arena = Arena(0)

    def size_of(self, block_bytes: int) -> int:
        return whole_pages(block_bytes)

    def allocate(self, block_bytes: int) -> Pages:
        return self._arena.allocate(block_bytes)

    def free(self, place: Pages) -> None:
        self._arena.free(place)

    async def fill(self, places: Sequence[Pages], data: memoryview) -> None:
        copy = partial(self._arena.write, places, data)
        if len(data) <= _MOST_INLINE_BYTES:
            copy()
            await checkpoint()
        else:
            await in_thread(copy)

    async def content(self, places: Sequence[Pages], block_bytes: int) -> memoryview:
        if (lent := self._arena.in_place(places, block_bytes)) is not None:
            await checkpoint()
            return lent
        out = await self._staging.take(len(places) * block_bytes)
        copy = partial(self._arena.read, places, out, block_bytes)
        try:
            if len(out) <= _MOST_INLINE_BYTES:
                copy()
                await checkpoint()
            else:
                await in_thread(copy)
        except BaseException:
            self._staging.give_back(out)
            raise
        return out

    def done(self, data: memoryview) -> None:
        self._staging.give_back(data)
