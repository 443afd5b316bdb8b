"""Reading shards from a local disk, chunk by chunk or into a buffer of the caller, past the page cache."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, AsyncIterator, Generator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path

from hotswap.backends.memory import copy
from hotswap.backends.stores.files import BlockFile
from hotswap.backends.stores.reading import ReadAhead, ReadContext, background, is_aligned, read_into
from hotswap.backends.stores.shielded import in_thread
from hotswap.model import HostChunk, Shard

__all__ = ["DiskReader"]

_log = logging.getLogger("hotswap.stores")


class DiskReader:
    """Reads shards from files under one root; past the page cache, until that is refused once."""

    def __init__(self, root: Path, context: ReadContext, *, direct: bool) -> None:
        self._root = root
        self._context = context
        self._direct = direct

    @asynccontextmanager
    async def open(self, path: Path, shard: Shard) -> AsyncGenerator[AsyncIterator[HostChunk]]:
        """Lend a shard; see `WeightStore.open`."""
        with self._file(path) as file:
            chunks = ReadAhead(file, shard, self._context)
            try:
                await in_thread(chunks.prepare, limiter=self._context.limiter)
                async with background() as tasks:
                    chunks.start(tasks)
                    try:
                        yield chunks
                    finally:
                        chunks.stop()
            finally:
                chunks.close()

    async def read_into(self, path: Path, shard: Shard, destination: memoryview) -> HostChunk:
        """Read a shard into a buffer; see `SupportsReadInto`."""
        with destination.cast("B") as whole:  # released at the end, even where a kept traceback refers to it
            if whole.readonly or len(whole) != shard.size_bytes:
                raise ValueError(
                    f"The destination for {shard.file!r} has {len(whole)} bytes"
                    f"{', read-only' if whole.readonly else ''}; give {shard.size_bytes} writable ones."
                )
            if not is_aligned(whole):
                buffered = await self._copy_into(path, shard, whole)
            else:
                with self._file(path) as file:
                    await read_into(file, shard, self._context, whole)
                    buffered = file.buffered
        return HostChunk(shard.buffer_offset_bytes, destination, self._context.tier, buffered=buffered)

    async def _copy_into(self, path: Path, shard: Shard, destination: memoryview) -> bool:
        """Copy from the ring, whose buffers are aligned; return whether the page cache was used."""
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
        """A file for one read, not yet open; remembers afterwards whether direct reads were refused."""
        file = BlockFile(path, direct=self._direct, calls=self._context.calls)
        try:
            yield file
        finally:
            file.close()
            if file.refused and self._direct:
                self._direct = False
                _log.warning("%r refuses direct reads; going on through the page cache.", str(self._root))
