"""How shards are read from a local disk: chunk by chunk or into place, directly where that is allowed."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, AsyncIterator, Generator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path

from hotswap.backends.memory import copy
from hotswap.backends.stores.files import BlockFile
from hotswap.backends.stores.reading import Lane, ReadAhead, background, is_aligned, read_into
from hotswap.backends.stores.unbroken import in_thread
from hotswap.model import HostChunk, Shard

__all__ = ["DiskReader"]

_log = logging.getLogger("hotswap.stores")


class DiskReader:
    """Reads shards from files under one root, past the page cache until the file system refuses once."""

    def __init__(self, root: Path, lane: Lane, *, direct: bool) -> None:
        self._root = root
        self._lane = lane
        self._direct = direct

    @asynccontextmanager
    async def open(self, path: Path, shard: Shard) -> AsyncGenerator[AsyncIterator[HostChunk]]:
        """Lend a shard; see `WeightStore.open`."""
        with self._file(path) as file:
            chunks = ReadAhead(file, shard, self._lane)
            try:
                await in_thread(chunks.prepare, limiter=self._lane.limiter)
                async with background() as tasks:
                    chunks.start(tasks)
                    try:
                        yield chunks
                    finally:
                        chunks.stop()
            finally:
                chunks.close()

    async def read_into(self, path: Path, shard: Shard, destination: memoryview) -> HostChunk:
        """Read a shard into place; see `SupportsReadInto`."""
        with destination.cast("B") as whole:  # let go of at the end, whoever keeps an error that knows of it
            if whole.readonly or len(whole) != shard.size_bytes:
                raise ValueError(
                    f"The destination for {shard.file!r} has {len(whole)} bytes"
                    f"{', read-only' if whole.readonly else ''}; give {shard.size_bytes} writable ones."
                )
            if not is_aligned(whole):
                buffered = await self._copy_into(path, shard, whole)
            else:
                with self._file(path) as file:
                    await read_into(file, shard, self._lane, whole)
                    buffered = file.buffered
        return HostChunk(shard.buffer_offset_bytes, destination, self._lane.tier, buffered=buffered)

    async def _copy_into(self, path: Path, shard: Shard, destination: memoryview) -> bool:
        """By way of the ring, whose buffers are aligned; say whether the page cache was in between."""
        buffered = False
        async with self.open(path, shard) as chunks:
            async for chunk in chunks:
                start = chunk.offset_bytes - shard.buffer_offset_bytes
                target = destination[start : start + len(chunk.data)]
                await in_thread(partial(copy, target, chunk.data))
                buffered = chunk.buffered
        return buffered

    @contextmanager
    def _file(self, path: Path) -> Generator[BlockFile]:
        """A file for one read, not yet open; notes afterwards whether the file system refused."""
        file = BlockFile(path, direct=self._direct, calls=self._lane.calls)
        try:
            yield file
        finally:
            file.close()
            if file.refused and self._direct:
                self._direct = False
                _log.warning("%r refuses direct reads; going on through the page cache.", str(self._root))
