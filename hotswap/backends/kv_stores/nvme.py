"""`NvmeKVStore`: KV blocks on a local disk."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Self

from anyio import CancelScope

from hotswap.backends.kv_indexed import IndexedKVStore
from hotswap.backends.kv_stores.page_file import FilePlace, PageFile
from hotswap.backends.kv_stores.pages import whole_pages
from hotswap.backends.kv_stores.staging import Staging
from hotswap.checks import to_path
from hotswap.errors import ConfigError
from hotswap.worker_threads import in_thread, run_in_thread

__all__ = ["NvmeKVStore"]


class NvmeKVStore(IndexedKVStore[FilePlace]):
    """Keeps KV blocks in a file on a local disk under a budget, for as long as it is entered.

    The file has no name, and its room is free again once the store is left or the process has ended, however
    that was. So no block outlives its fleet, and keys name no versions of libraries and kernels. What users
    wrote is on the disk until the system writes something else there: choose an encrypted one where that
    matters.

    Blocks are written through the system's page cache, which writes to the disk behind a save; those that it
    still has are read without the disk. A block that the disk has changed or lost is computed again.

    Args:
        directory: A directory on the disk.
        capacity: The budget, as a number of bytes or as text such as `"500 GiB"`. Reads take as much memory
            as they ask for at once, of which up to 16 MiB are kept for the next ones.

    Raises:
        ConfigError: the capacity is no size, or, on entering, the directory does not take the file.
    """

    def __init__(self, directory: str | Path, capacity: int | str) -> None:
        super().__init__(capacity, tier="nvme")
        self._directory = to_path(ConfigError, "directory", directory)
        self._file = PageFile(self._directory, 0)
        self._staging = Staging()

    @asynccontextmanager
    async def __asynccontextmanager__(self) -> AsyncGenerator[Self]:
        self._file = PageFile(self._directory, self._capacity_bytes)
        try:
            await in_thread(self._file.open)
            async with super().__asynccontextmanager__():
                yield self
        finally:
            self._staging.close()
            with CancelScope(shield=True):
                await run_in_thread(self._file.close)  # which deletes it

    def size_of(self, block_bytes: int) -> int:
        return whole_pages(block_bytes)

    def is_broken(self, place: FilePlace) -> bool:
        return place.is_broken

    def allocate(self, block_bytes: int) -> FilePlace:
        return self._file.allocate(block_bytes)

    def free(self, place: FilePlace) -> None:
        self._file.free(place)

    async def fill(self, places: Sequence[FilePlace], data: memoryview) -> None:
        await in_thread(partial(self._file.write, places, data))

    async def content(self, places: Sequence[FilePlace], block_bytes: int) -> memoryview:
        out = await self._staging.take(len(places) * block_bytes)
        try:
            await in_thread(partial(self._file.read, places, out, block_bytes))
        except BaseException:
            self._staging.give_back(out)
            raise
        return out

    def done(self, data: memoryview) -> None:
        self._staging.give_back(data)
