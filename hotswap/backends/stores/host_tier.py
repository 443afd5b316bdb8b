"""The tier in host memory, whatever memory it is: what a `TieredStore` fills and lends from."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Generator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Protocol

import anyio
from anyio.lowlevel import checkpoint

from hotswap.backends.stores.bandwidth import Bandwidth
from hotswap.backends.stores.reading import give_back
from hotswap.errors import ShardMissing
from hotswap.hardware import parse_bytes
from hotswap.model import HostBuffer, HostChunk, Manifest, Shard
from hotswap.request import ModelId
from hotswap.store import WeightStore

__all__ = ["Drops", "Hold", "HostTier", "RankBuffer"]


class RankBuffer(Protocol):
    """The flat buffer of one rank in host memory, filled shard by shard."""

    @property
    def pinned(self) -> bool:
        """Whether a device may copy from it asynchronously."""
        ...

    @property
    def whole(self) -> bool:
        """Whether all shards are there."""
        ...

    @property
    def data(self) -> memoryview:
        """All of it, not to be written."""
        ...

    @property
    def place(self) -> tuple[Path | None, int]:
        """The file in which other processes find it, and where there; none if they cannot."""
        ...

    def has(self, shard: Shard) -> bool:
        """Whether the shard was committed, by whomever: it must not be written again."""
        ...

    def part(self, shard: Shard) -> memoryview:
        """Where the shard's bytes belong; writable while they may have to be written."""
        ...


class Hold(ABC):
    """A rank's buffer while somebody fills it."""

    def __init__(self, buffer: RankBuffer) -> None:
        self._buffer = buffer

    @property
    def pinned(self) -> bool:
        """Whether a device may copy from the buffer asynchronously."""
        return self._buffer.pinned

    def has(self, shard: Shard) -> bool:
        """Whether the shard was committed, by whomever: it must not be written again."""
        return self._buffer.has(shard)

    def place(self, shard: Shard) -> memoryview:
        """Where the shard's bytes belong; written by who is `filling`, until it is committed."""
        return self._buffer.part(shard)

    @asynccontextmanager
    async def filling(self) -> AsyncGenerator[None]:
        """Be the one process that writes to the buffer; ask `has` inside, for another may have written."""
        yield

    @abstractmethod
    def commit(self, shard: Shard) -> None:
        """Say that the shard's bytes are there and verified: from now on it can be lent."""

    @abstractmethod
    def keep(self) -> None:
        """Let the buffer stay when nobody holds it any more, until room is needed."""


class Drops:
    """The drops that wait for readers; one that nobody waits for any more is forgotten."""

    def __init__(self) -> None:
        self._ends: dict[ModelId, anyio.Event] = {}
        self._waiting: Counter[ModelId] = Counter()

    def __contains__(self, model: ModelId) -> bool:
        return model in self._ends

    @contextmanager
    def waiting(self, model: ModelId) -> Generator[anyio.Event]:
        """Wait, in the block, for the event: the model is gone, or to be kept."""
        self._waiting[model] += 1
        try:
            yield self._ends.setdefault(model, anyio.Event())
        finally:
            self._waiting[model] -= 1
            if not self._waiting[model]:
                del self._waiting[model]
                self._ends.pop(model, None)

    def end(self, model: ModelId) -> bool:
        """End all drops of the model; false if there are none."""
        if (event := self._ends.pop(model, None)) is None:
            return False
        event.set()
        return True


class HostTier(WeightStore):
    """Whole ranks' flat buffers in host memory under a budget, lent without a copy.

    By itself it has no way to come by weights: a `TieredStore` whose first tier it is fills it through
    `hold`. A shard is lent once it was committed, a rank once all of its were.
    """

    def __init__(self, name: str, chunk_bytes: int | str) -> None:
        self.name = name
        self.chunk_bytes = max(parse_bytes(chunk_bytes), 1)
        self._bandwidth = Bandwidth(20e9)

    @asynccontextmanager
    async def open(self, shard: Shard) -> AsyncGenerator[AsyncIterator[HostChunk]]:
        await checkpoint()
        async with self._shard_in_use(shard) as buffer:
            if buffer is None:
                raise ShardMissing(
                    f"Tier {self.name!r} does not hold {shard.file!r} of model {shard.model!r}."
                )
            chunks = _Resident(self, buffer, shard, self._bandwidth)
            try:
                yield chunks
            finally:
                chunks.close()

    @asynccontextmanager
    async def lend(self, manifest: Manifest, rank: int = 0) -> AsyncGenerator[HostBuffer | None]:
        """Lend a rank's buffer in place, `None` unless it is whole and still of that manifest."""
        await checkpoint()
        async with self._rank_in_use(manifest, rank) as buffer:
            if buffer is None:
                yield None
                return
            data = buffer.data
            file, offset_bytes = buffer.place
            try:
                yield HostBuffer(data, self.name, buffer.pinned, file, offset_bytes)
            finally:
                give_back(data)

    @abstractmethod
    def hold(self, manifest: Manifest, rank: int) -> AbstractAsyncContextManager[Hold]:
        """Reserve the buffer of a rank, or join those who have, and keep it while the block runs.

        A buffer goes with the last block that held it, unless one of them said `keep`, or somebody has read
        from it: what was not finished takes no memory.

        Raises:
            TierFull: it does not fit even when everything idle is pushed out.
        """

    @abstractmethod
    def holds(self, shard: Shard) -> bool:
        """Whether the shard could be lent now."""

    async def expect(self, manifest: Manifest) -> None:
        """Learn what the model's weights are by now; the tier may hold those of another conversion."""

    @abstractmethod
    async def drop(self, model: ModelId) -> None:
        """Free the model's memory as soon as nothing lends from it, and return then.

        Called while it is lent, it waits; `keep` takes it back, and so does a cancellation. Where processes
        share the memory, it waits for the loans, pins and fills of them all.
        """

    @abstractmethod
    def keep(self, model: ModelId) -> None:
        """Take back a `drop` that still waits for readers; it returns."""

    @abstractmethod
    def pin(self, model: ModelId) -> None:
        """Never push the model out for another until `unpin`; one that is not there stays once it comes.

        It is not brought here by this, and an explicit `drop` still drops it.
        """

    @abstractmethod
    def unpin(self, model: ModelId) -> None:
        """Let the model go again when room is needed; nothing happens if it was not pinned."""

    @abstractmethod
    def _shard_in_use(self, shard: Shard) -> AbstractAsyncContextManager[RankBuffer | None]:
        """The buffer that has the shard, kept while the block runs; `None` if it is not there."""

    @abstractmethod
    def _rank_in_use(self, manifest: Manifest, rank: int) -> AbstractAsyncContextManager[RankBuffer | None]:
        """The whole buffer of a rank, kept while the block runs; `None` if it is not there."""


class _Resident:
    """The chunks of a shard that is there: slices of the buffer."""

    def __init__(self, tier: HostTier, buffer: RankBuffer, shard: Shard, bandwidth: Bandwidth) -> None:
        self._tier = tier
        self._buffer = buffer
        self._shard = shard
        self._bandwidth = bandwidth
        self._data = buffer.part(shard)
        self._position = 0
        self._lent: memoryview | None = None
        self._lent_at_s = 0.0

    def __aiter__(self) -> AsyncIterator[HostChunk]:
        return self

    async def __anext__(self) -> HostChunk:
        self._take_back()
        await checkpoint()
        if self._position >= len(self._data):
            raise StopAsyncIteration
        start, self._position = self._position, self._position + self._tier.chunk_bytes
        self._lent = self._data[start : self._position]
        self._lent_at_s = anyio.current_time()
        offset = self._shard.buffer_offset_bytes + start
        return HostChunk(offset, self._lent, self._tier.name, self._buffer.pinned)

    def close(self) -> None:
        self._take_back()
        self._data.release()

    def _take_back(self) -> None:
        """End the loan; how long it lasted is how fast a consumer copies from host memory."""
        if self._lent is not None:
            self._bandwidth.observe(len(self._lent), anyio.current_time() - self._lent_at_s)
        give_back(self._lent)
        self._lent = None
