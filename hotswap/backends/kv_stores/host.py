"""`HostKVStore`: KV blocks in the host memory of this process."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Self

import anyio

from hotswap.backends.kv_indexed import IndexedKVStore
from hotswap.backends.kv_stores.arena import Arena
from hotswap.backends.kv_stores.pages import Pages, whole_pages
from hotswap.tasks_beside import tasks_beside
from hotswap.worker_threads import in_thread

__all__ = ["HostKVStore"]

log = logging.getLogger("hotswap.stores")

# Memory that is taken ahead, and how often that is told while it lasts.
_MOST_AHEAD_BYTES, _TELL_S = 1 << 30, 2.0


class HostKVStore(IndexedKVStore[Pages]):
    """Keeps KV blocks in host memory under a budget, for as long as it is entered.

    Memory is taken from the system as it is needed, and kept. An eighth of the budget, but 1 GiB at most, is
    taken ahead, by a worker thread: pages that are there are written up to fifty times sooner than new ones.
    Blocks of all models share it, whatever their size.
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
        self._arena = Arena(0)
        self._ahead_bytes = min(self._capacity_bytes // 8, _MOST_AHEAD_BYTES)
        self._wanted = anyio.Event()

    @asynccontextmanager
    async def __asynccontextmanager__(self) -> AsyncGenerator[Self]:
        async with super().__asynccontextmanager__():
            self._arena, self._wanted = Arena(self._capacity_bytes), anyio.Event()
            try:
                async with tasks_beside() as tasks:
                    tasks.start_soon(self._take_memory_ahead, name="memory for KV blocks")
                    yield self
            finally:
                self._arena.close()
                self._arena = Arena(0)

    def size_of(self, block_bytes: int) -> int:
        return whole_pages(block_bytes)

    def allocate(self, block_bytes: int) -> Pages:
        place = self._arena.allocate(block_bytes)
        if self._arena.lacking(self._ahead_bytes // 2):
            self._wanted.set()
        return place

    def free(self, place: Pages) -> None:
        self._arena.free(place)

    async def fill(self, places: Sequence[Pages], data: memoryview) -> None:
        await self._arena.fill(places, data)

    async def content(self, places: Sequence[Pages], block_bytes: int) -> memoryview:
        return await self._arena.content(places, block_bytes)

    def done(self, data: memoryview) -> None:
        self._arena.done(data)

    async def _take_memory_ahead(self) -> None:
        """Take pages from the system before saves need them, as long as it can do so."""
        while True:
            told_s, arena = anyio.current_time(), self._arena
            while pages := arena.lacking(self._ahead_bytes):
                if not await in_thread(partial(arena.populate, pages)):
                    return
                if anyio.current_time() - told_s >= _TELL_S:
                    told_s = anyio.current_time()
                    log.info("%r still takes memory from the system ahead.", self)
            await self._wanted.wait()
            self._wanted = anyio.Event()
