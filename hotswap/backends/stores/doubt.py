"""A disk tier above another one: what was found damaged there is read from the one below."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Self

from anyio import to_thread

from hotswap.backends.stores.nvme import NvmeStore
from hotswap.errors import ShardCorrupt
from hotswap.model import HostChunk, Shard
from hotswap.store import WrapperStore

__all__ = ["Doubting"]


class Doubting(WrapperStore):
    """Refuses a shard from its first byte after it was found damaged, until its file has changed.

    Damage shows at the end of a shard, when bytes were lent and no other tier can take over. The next load
    meets it at the beginning, where the next tier can. Entering it does not enter the disk tier.
    """

    def __init__(self, disk: NvmeStore) -> None:
        super().__init__(disk)
        self._disk = disk
        self._found: dict[Shard, tuple[tuple[int, ...], str]] = {}

    @asynccontextmanager
    async def __asynccontextmanager__(self) -> AsyncGenerator[Self]:
        yield self

    @asynccontextmanager
    async def open(self, shard: Shard) -> AsyncGenerator[AsyncIterator[HostChunk]]:
        async with self._watching(shard), self._disk.open(shard) as chunks:
            yield chunks

    async def read_into(self, shard: Shard, destination: memoryview) -> HostChunk:
        async with self._watching(shard):
            return await self._disk.read_into(shard, destination)

    @asynccontextmanager
    async def _watching(self, shard: Shard) -> AsyncGenerator[None]:
        path = self._disk.root / shard.model / shard.file
        if (found := self._found.get(shard)) is not None:
            if found[0] == await to_thread.run_sync(_stamp, path):
                raise ShardCorrupt(found[1])
            self._found.pop(shard, None)
        try:
            yield
        except ShardCorrupt as exc:
            if shard.file in str(exc):  # not what the reader found elsewhere
                self._found[shard] = await to_thread.run_sync(_stamp, path), str(exc)
            raise


def _stamp(path: Path) -> tuple[int, ...]:
    """What differs when a file was replaced or written; empty if it is not there."""
    with suppress(OSError):
        stat = path.stat()
        return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns
    return ()
