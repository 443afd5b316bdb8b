"""`HostTier`: the base of tiers in host memory, which a `TieredStore` fills and lends from."""

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

__all__ = ["BufferReservation", "HostTier", "PendingDrops", "RankBuffer"]


class RankBuffer(Protocol):
    """The flat buffer of one rank in host memory, filled shard by shard."""

    @property
    def pinned(self) -> bool:
        """Whether a device may copy from it asynchronously."""
        ...

    @property
    def whole(self) -> bool:
        """Whether all shards are committed."""
        ...

    @property
    def data(self) -> memoryview:
        """The whole buffer, read-only."""
        ...

    @property
    def place(self) -> tuple[Path | None, int]:
        """The file and offset where other processes can map the buffer; `None` if they cannot."""
        ...

    def has(self, shard: Shard) -> bool:
        """Whether the shard is committed: it must not be written again."""
        ...

    def part(self, shard: Shard) -> memoryview:
        """The shard's place in the buffer; writable until it is committed."""
        ...


class BufferReservation(ABC):
    """A reserved buffer of a rank, while it is filled."""

    def __init__(self, buffer: RankBuffer) -> None:
        self._buffer = buffer

    @property
    def pinned(self) -> bool:
        """Whether a device may copy from the buffer asynchronously."""
        return self._buffer.pinned

    def has(self, shard: Shard) -> bool:
        """Whether the shard is committed: it must not be written again."""
        return self._buffer.has(shard)

    def place(self, shard: Shard) -> memoryview:
        """The shard's place in the buffer, to be written inside `filling` until it is committed."""
        return self._buffer.part(shard)

    @asynccontextmanager
    async def filling(self) -> AsyncGenerator[None]:
        """Be the one process that writes to the buffer; check `has` inside: another may have written."""
        yield

    @abstractmethod
    def commit(self, shard: Shard) -> None:
        """Mark the shard as written and verified: from now on it can be lent."""

    @abstractmethod
    def keep(self) -> None:
        """Keep the buffer after the last reservation ends, until room is needed."""


class PendingDrops:
    """Drops of models that wait until the models have no readers; a cancelled drop is forgotten."""

    def __init__(self) -> None:
        self._ends: dict[ModelId, anyio.Event] = {}
        self._waiting: Counter[ModelId] = Counter()

    def __contains__(self, model: ModelId) -> bool:
        return model in self._ends

    @contextmanager
    def waiting(self, model: ModelId) -> Generator[anyio.Event]:
        """Yield the event to wait for: the model was dropped, or is to be kept."""
        self._waiting[model] += 1
        try:
            yield self._ends.setdefault(model, anyio.Event())
        finally:
            self._waiting[model] -= 1
            if not self._waiting[model]:
                del self._waiting[model]
                self._ends.pop(model, None)

    def end(self, model: ModelId) -> bool:
        """Set the event of all drops of the model; false if there are none."""
        if (event := self._ends.pop(model, None)) is None:
            return False
        event.set()
        return True


class HostTier(WeightStore):
    """Whole ranks' flat buffers in host memory under a budget, lent without a copy.

    The tier loads nothing by itself: a `TieredStore` with it as first tier fills it through `reserve`. A
    shard can be lent once it is committed, a rank once all its shards are.
    """

    def __init__(self, name: str, chunk_bytes: int | str) -> None:
        self.name = name
        self.chunk_bytes = max(parse_bytes(chunk_bytes, "chunk_bytes"), 1)
        self._bandwidth = Bandwidth(20e9)

    @asynccontextmanager
    async def open(self, shard: Shard) -> AsyncGenerator[AsyncIterator[HostChunk]]:
        await checkpoint()
        async with self._shard_in_use(shard) as buffer:
            if buffer is None:
                raise self._missing(shard)
            chunks = _Resident(self, buffer, shard, self._bandwidth)
            try:
                yield chunks
            finally:
                chunks.close()

    @asynccontextmanager
    async def lend_shard(self, shard: Shard) -> AsyncGenerator[memoryview]:
        """Lend a shard whole to a reader whose speed tells nothing of this tier's, such as a link.

        Raises:
            ShardMissing: it is not resident.
        """
        async with self._shard_in_use(shard) as buffer:
            if buffer is None:
                raise self._missing(shard)
            data = buffer.part(shard)
            try:
                yield data
            finally:
                give_back(data)

    @asynccontextmanager
    async def lend(self, manifest: Manifest, rank: int = 0) -> AsyncGenerator[HostBuffer | None]:
        """Lend a rank's buffer in place; `None` unless it is whole and of that manifest."""
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

    def _missing(self, shard: Shard) -> ShardMissing:
        return ShardMissing(f"Tier {self.name!r} does not hold {shard.file!r} of model {shard.model!r}.")

    @abstractmethod
    def reserve(self, manifest: Manifest, rank: int) -> AbstractAsyncContextManager[BufferReservation]:
        """Reserve the buffer of a rank while the block runs; several blocks may reserve one buffer.

        The buffer is freed with its last reservation, unless `keep` was called or it was read from: a load
        that does not finish leaves no memory in use.

        Raises:
            TierFull: it does not fit even when everything idle is evicted.
        """

    @abstractmethod
    def holds(self, shard: Shard) -> bool:
        """Whether the shard can be lent now."""

    async def expect(self, manifest: Manifest) -> None:
        """Set the model's current manifest; the tier may hold weights of an earlier conversion."""

    @abstractmethod
    async def drop(self, model: ModelId) -> None:
        """Free the model's memory once it is not lent, and return then.

        `keep` ends the wait without dropping, and so does a cancellation. Where processes share the memory,
        the loans, pins and fills of all of them count.
        """

    @abstractmethod
    def keep(self, model: ModelId) -> None:
        """Cancel a `drop` that waits for readers; it returns."""

    @abstractmethod
    def pin(self, model: ModelId) -> None:
        """Do not evict the model until `unpin`; one that is not resident is kept once it is loaded.

        This loads nothing, and an explicit `drop` still drops the model.
        """

    @abstractmethod
    def unpin(self, model: ModelId) -> None:
        """Allow eviction again; nothing happens if the model was not pinned."""

    @abstractmethod
    def _shard_in_use(self, shard: Shard) -> AbstractAsyncContextManager[RankBuffer | None]:
        """Use the buffer that has the shard while the block runs; `None` if it is not resident."""

    @abstractmethod
    def _rank_in_use(self, manifest: Manifest, rank: int) -> AbstractAsyncContextManager[RankBuffer | None]:
        """Use the whole buffer of a rank while the block runs; `None` if it is not resident."""


class _Resident:
    """The chunks of a resident shard: slices of the buffer."""

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
        self._end_loan()
        await checkpoint()
        if self._position >= len(self._data):
            raise StopAsyncIteration
        start, self._position = self._position, self._position + self._tier.chunk_bytes
        self._lent = self._data[start : self._position]
        self._lent_at_s = anyio.current_time()
        offset = self._shard.buffer_offset_bytes + start
        return HostChunk(offset, self._lent, self._tier.name, self._buffer.pinned)

    def close(self) -> None:
        self._end_loan()
        self._data.release()

    def _end_loan(self) -> None:
        """End the loan; its duration tells how fast the consumer copies from host memory."""
        if self._lent is not None:
            self._bandwidth.observe(len(self._lent), anyio.current_time() - self._lent_at_s)
        give_back(self._lent)
        self._lent = None
