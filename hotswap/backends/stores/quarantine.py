"""A disk tier that refuses shards it has found damaged, so that the tier below is read instead."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Self

from hotswap.backends.stores.layout import model_directory
from hotswap.backends.stores.nvme import NvmeStore
from hotswap.errors import ShardCorrupt
from hotswap.model import HostChunk, Shard
from hotswap.store import WrapperStore
from hotswap.worker_threads import run_in_thread

__all__ = ["QuarantineStore"]


class QuarantineStore(WrapperStore):
    """Refuses a damaged shard before its first byte, until its file changes.

    Damage is detected at the end of a shard, when bytes were lent already and no other tier can take over.
    The next load is refused at the start, so that the next tier serves it. Entering this store does not enter
    the disk tier.
    """

    def __init__(self, disk: NvmeStore) -> None:
        super().__init__(disk)
        self._disk = disk
        self._damaged: dict[Shard, tuple[tuple[int, ...], str]] = {}

    @asynccontextmanager
    async def __asynccontextmanager__(self) -> AsyncGenerator[Self]:
        yield self

    @asynccontextmanager
    async def open(self, shard: Shard) -> AsyncGenerator[AsyncIterator[HostChunk]]:
        async with self._checked(shard), self._disk.open(shard) as chunks:
            yield chunks

    async def read_into(self, shard: Shard, destination: memoryview) -> HostChunk:
        async with self._checked(shard):
            return await self._disk.read_into(shard, destination)

    @asynccontextmanager
    async def _checked(self, shard: Shard) -> AsyncGenerator[None]:
        """Raise if the shard is known to be damaged; remember it if the block finds that it is."""
        path = model_directory(self._disk.root, shard.model) / shard.file
        if (known := self._damaged.get(shard)) is not None:
            if known[0] == await run_in_thread(_identity, path):
                raise ShardCorrupt(known[1])
            self._damaged.pop(shard, None)
        try:
            yield
        except ShardCorrupt as exc:
            if shard.file in str(exc):  # and not an error of the reader about another file
                self._damaged[shard] = await run_in_thread(_identity, path), str(exc)
            raise


def _identity(path: Path) -> tuple[int, ...]:
    """Values that change when a file is replaced or written; empty if it does not exist."""
    with suppress(OSError):
        stat = path.stat()
        return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns
    return ()
