"""A store wrapper that injects slow reads and missing or damaged shards."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import cast

import anyio

from hotswap.errors import ShardCorrupt, ShardMissing, StoreError
from hotswap.model import Adapter, HostBuffer, HostChunk, Manifest, Model, Shard
from hotswap.request import ModelId
from hotswap.store import (
    SupportsImport,
    SupportsLend,
    SupportsLendFiles,
    SupportsPrefetch,
    SupportsReadInto,
    SupportsSideFiles,
    SupportsTextSettings,
    SupportsTokenizer,
    WeightStore,
    WrapperStore,
)
from hotswap.testing.chaos.injector import Injector, StoreFaults
from hotswap.text import TextSettings, Tokenizer

__all__ = ["ChaosStore", "chaotic_store"]


def chaotic_store(store: WeightStore, random: Random, faults: StoreFaults | None = None) -> ChaosStore:
    """Wrap a store; the wrapper supports exactly the optional abilities of the store.

    Args:
        store: Any store.
        random: The source of all chance.
        faults: The faults to inject; none by default.
    """
    bases: list[type[ChaosStore]] = []
    if isinstance(store, SupportsPrefetch):
        bases.append(_Prefetching)
    if isinstance(store, SupportsReadInto):
        bases.append(_ReadingInto)
    if isinstance(store, SupportsLend):
        bases.append(_Lending)
    if isinstance(store, SupportsLendFiles):
        bases.append(_LendingFiles)
    if isinstance(store, SupportsSideFiles):
        bases.append(_KeepingFiles)
    if isinstance(store, SupportsImport):
        bases.append(_Importing)
    if isinstance(store, SupportsTokenizer):
        bases.append(_Tokenizing)
    if isinstance(store, SupportsTextSettings):
        bases.append(_Settling)
    made = cast("type[ChaosStore]", type("ChaosStore", (*bases, ChaosStore), {}))
    return made(store, random, faults)


class ChaosStore(WrapperStore):
    """Injects faults into the methods of a store; `chaotic_store` makes one with the store's abilities."""

    def __init__(self, store: WeightStore, random: Random, faults: StoreFaults | None = None) -> None:
        super().__init__(store)
        self.faults = faults or StoreFaults()
        self.injector = Injector(random)

    @property
    def injected(self) -> Counter[str]:
        """The number of injected faults by kind."""
        return self.injector.injected

    async def manifest(self, model: ModelId) -> Manifest:
        self.miss(f"Model {model!r}")
        return await self.wrapped.manifest(model)

    @asynccontextmanager
    async def open(self, shard: Shard) -> AsyncGenerator[AsyncIterator[HostChunk]]:
        self.miss(f"Shard {shard.file!r} of {shard.model!r}")
        end = self.draw_end(shard.file, shard.model)
        async with self.wrapped.open(shard) as chunks:
            yield _FaultyChunks(self, chunks, shard, end)

    def __repr__(self) -> str:
        return f"<ChaosStore of {self.wrapped!r} {self.injector!r}>"

    # ------------------------------------------------------------------ faults

    def miss(self, what: str) -> None:
        """Raise `ShardMissing`, by chance."""
        if self.injector.hits("missing", self.faults.missing):
            raise ShardMissing(f"{what} is missing, by chance; try again.")

    def draw_end(self, file: str, model: ModelId) -> End | None:
        """Return where and how a read will fail; `None` if it will not."""
        if self.injector.hits("error", self.faults.error):
            return End(self.injector.share(), StoreError(f"{file!r} of {model!r} cannot be read, by chance."))
        if self.injector.hits("corrupt", self.faults.corrupt):
            at = min(1.0, 2 * self.injector.share())  # in half of all cases after the last chunk
            return End(at, ShardCorrupt(f"{file!r} of {model!r} is damaged, by chance."))
        return None

    async def take_time(self, size_bytes: int) -> None:
        """Sleep as long as the slow disk reads `size_bytes`, and longer by chance."""
        await self.injector.pause("delay", self.faults.delay, self.faults.delay_s)
        if self.injector.armed and (seconds := size_bytes / self.faults.bytes_per_s):
            await anyio.sleep(seconds)


@dataclass(frozen=True, slots=True)
class End:
    """The failure of a read, after the share `at` of its bytes, from 0 to 1."""

    at: float
    error: StoreError


class _FaultyChunks:
    """Chunks with injected delays, up to an injected failure."""

    def __init__(
        self, store: ChaosStore, chunks: AsyncIterator[HostChunk], shard: Shard, end: End | None
    ) -> None:
        self._store, self._chunks, self._end = store, chunks, end
        self._left_bytes = float("inf") if end is None else end.at * shard.size_bytes
        self._at_end = end is not None and end.at >= 1

    def __aiter__(self) -> _FaultyChunks:
        return self

    async def __anext__(self) -> HostChunk:
        if self._end is not None and self._left_bytes <= 0 and not self._at_end:
            raise self._end.error
        try:
            chunk = await self._chunks.__anext__()
        except StopAsyncIteration:
            if self._end is not None:
                raise self._end.error from None
            raise
        await self._store.take_time(len(chunk.data))
        self._left_bytes -= len(chunk.data)
        return chunk


class _Prefetching(ChaosStore):
    async def prefetch(self, model: ModelId) -> None:
        """See `SupportsPrefetch`."""
        assert isinstance(self.wrapped, SupportsPrefetch)
        self.miss(f"Model {model!r}")
        if end := self.draw_end("weights", model):
            raise end.error
        await self.take_time(0)
        await self.wrapped.prefetch(model)

    async def drop(self, model: ModelId) -> None:
        """See `SupportsPrefetch`."""
        assert isinstance(self.wrapped, SupportsPrefetch)
        await self.wrapped.drop(model)


class _ReadingInto(ChaosStore):
    async def read_into(self, shard: Shard, destination: memoryview) -> HostChunk | None:
        """See `SupportsReadInto`."""
        assert isinstance(self.wrapped, SupportsReadInto)
        if self.injector.hits("refuse", self.faults.refuse):
            return None
        self.miss(f"Shard {shard.file!r} of {shard.model!r}")
        end = self.draw_end(shard.file, shard.model)
        if end is not None and end.at < 0.5:
            raise end.error
        chunk = await self.wrapped.read_into(shard, destination)
        await self.take_time(shard.size_bytes)
        if end is not None and chunk is not None:
            raise end.error
        return chunk


class _Lending(ChaosStore):
    @asynccontextmanager
    async def lend(self, manifest: Manifest, rank: int = 0) -> AsyncGenerator[HostBuffer | None]:
        """See `SupportsLend`."""
        assert isinstance(self.wrapped, SupportsLend)
        if self.injector.hits("refuse", self.faults.refuse):
            yield None
            return
        self.miss(f"Rank {rank} of {manifest.model!r}")
        end = self.draw_end(f"rank {rank}", manifest.model)
        if end is not None and end.at < 0.5:
            raise end.error
        async with self.wrapped.lend(manifest, rank) as buffer:
            await self.take_time(0)  # a resident model is not read
            if end is not None:
                raise end.error
            yield buffer


class _LendingFiles(ChaosStore):
    @asynccontextmanager
    async def lend_files(self, manifest: Manifest) -> AsyncGenerator[tuple[Path, ...]]:
        """See `SupportsLendFiles`."""
        assert isinstance(self.wrapped, SupportsLendFiles)
        self.miss(f"The files of {manifest.model!r}")
        end = self.draw_end("files", manifest.model)
        if end is not None and end.at < 0.5:
            raise end.error
        async with self.wrapped.lend_files(manifest) as files:
            await self.take_time(0)  # they are mapped, and read later
            if end is not None:
                raise end.error
            yield files


class _KeepingFiles(ChaosStore):
    async def side_files(self, model: ModelId) -> dict[str, bytes]:
        """See `SupportsSideFiles`."""
        assert isinstance(self.wrapped, SupportsSideFiles)
        return await self.wrapped.side_files(model)


class _Importing(ChaosStore):
    async def import_model(self, model: Model) -> None:
        """See `SupportsImport`."""
        assert isinstance(self.wrapped, SupportsImport)
        await self.wrapped.import_model(model)


class _Tokenizing(ChaosStore):
    async def tokenizer(self, model: ModelId) -> Tokenizer | None:
        """See `SupportsTokenizer`."""
        assert isinstance(self.wrapped, SupportsTokenizer)
        return await self.wrapped.tokenizer(model)


class _Settling(ChaosStore):
    async def text_settings(self, model: ModelId) -> TextSettings | None:
        """See `SupportsTextSettings`."""
        assert isinstance(self.wrapped, SupportsTextSettings)
        return await self.wrapped.text_settings(model)

    async def adapter_settings(self, adapter: Adapter) -> TextSettings:
        """See `SupportsTextSettings`."""
        assert isinstance(self.wrapped, SupportsTextSettings)
        return await self.wrapped.adapter_settings(adapter)
