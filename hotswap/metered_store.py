"""`MeteredStore`: what an engine reads in a load, and from where."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Protocol

from hotswap.errors import StoreError
from hotswap.model import HostBuffer, HostChunk, Manifest, Shard
from hotswap.request import ModelId
from hotswap.store import (
    SupportsLend,
    SupportsLendFiles,
    SupportsNodes,
    SupportsReadInto,
    SupportsSideFiles,
    SupportsTokenizer,
    WeightStore,
    WrapperStore,
)
from hotswap.text import Tokenizer

__all__ = ["MeteredStore", "ReadListener"]


class ReadListener(Protocol):
    """What is told of bytes as they are read."""

    def bytes_read(self) -> None:
        """Look at how many there are by now; synchronous and cheap, called on the event loop."""
        ...


class MeteredStore(WrapperStore):
    """Counts what an engine reads or is lent, and from which tier, and tells a listener of it.

    It has the abilities of the store that it wraps which engines ask for; without one of them it answers as
    such a store says that it cannot.

    Attributes:
        num_bytes: Bytes so far.
        tier: The tier that had the last of them; "" for none, and for tiers without a name.
        buffered: Whether any went through the page cache.
    """

    def __init__(self, store: WeightStore, listener: ReadListener | None = None) -> None:
        super().__init__(store)
        self._listener = listener
        self.num_bytes = 0
        self.tier = ""
        self.buffered = False

    def go_to(self, node: str) -> None:
        """Read as the engines of a node do, where the store tells nodes apart."""
        if isinstance(self.wrapped, SupportsNodes):
            self.wrapped = self.wrapped.on(node)

    def count(self, num_bytes: int, tier: str = "", *, buffered: bool = False) -> None:
        """Count bytes; called by engines whose weights are read elsewhere, from another store."""
        self.num_bytes += num_bytes
        self.tier = tier or self.tier
        self.buffered = self.buffered or buffered
        if self._listener is not None:
            self._listener.bytes_read()

    async def tokenizer(self, model: ModelId) -> Tokenizer | None:
        wrapped = self.wrapped
        return await wrapped.tokenizer(model) if isinstance(wrapped, SupportsTokenizer) else None

    @asynccontextmanager
    async def open(self, shard: Shard) -> AsyncGenerator[AsyncIterator[HostChunk]]:
        async with self.wrapped.open(shard) as chunks:
            yield self._counted(chunks)

    @asynccontextmanager
    async def lend(self, manifest: Manifest, rank: int = 0) -> AsyncGenerator[HostBuffer | None]:
        if not isinstance(self.wrapped, SupportsLend):
            yield None
            return
        async with self.wrapped.lend(manifest, rank) as buffer:
            if buffer is not None:
                self.count(len(buffer.data), buffer.tier)
            yield buffer

    @asynccontextmanager
    async def lend_files(self, manifest: Manifest) -> AsyncGenerator[tuple[Path, ...]]:
        if not isinstance(self.wrapped, SupportsLendFiles):
            raise StoreError(f"{self.wrapped!r} lends no files; use a store with a local disk.")
        async with self.wrapped.lend_files(manifest) as files:
            self.count(manifest.weight_bytes)
            yield files

    async def side_files(self, model: ModelId) -> dict[str, bytes]:
        wrapped = self.wrapped
        return await wrapped.side_files(model) if isinstance(wrapped, SupportsSideFiles) else {}

    async def read_into(self, shard: Shard, destination: memoryview) -> HostChunk | None:
        if not isinstance(self.wrapped, SupportsReadInto):
            return None
        chunk = await self.wrapped.read_into(shard, destination)
        if chunk is not None:
            self.count(len(chunk.data), chunk.tier, buffered=chunk.buffered)
        return chunk

    async def _counted(self, chunks: AsyncIterator[HostChunk]) -> AsyncIterator[HostChunk]:
        async for chunk in chunks:
            self.count(len(chunk.data), chunk.tier, buffered=chunk.buffered)
            yield chunk
