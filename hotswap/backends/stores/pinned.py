"""The tier in host memory: whole ranks' flat buffers under a budget, pinned where CUDA is there."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Self

import anyio
from anyio import CancelScope, to_thread
from anyio.lowlevel import checkpoint

from hotswap.backends.memory import aligned_buffer, pin, unpin
from hotswap.backends.stores.bandwidth import Bandwidth
from hotswap.backends.stores.budget import Shelf, Slot
from hotswap.backends.stores.reading import give_back
from hotswap.errors import ShardMissing, TierFull
from hotswap.hardware import parse_bytes
from hotswap.model import HostBuffer, HostChunk, Manifest, Shard
from hotswap.request import ModelId
from hotswap.store import WeightStore
from hotswap.view import Residency, StoreView, TierView

__all__ = ["Hold", "PinnedStore"]


class PinnedStore(WeightStore):
    """Weights in host memory, lent without a copy; the model used longest ago goes first, none while lent.

    `budget` bounds the bytes of all buffers, those being filled and those being freed included. A buffer is
    one rank of one model, allocated whole and filled shard by shard through `hold`, which is what a
    `TieredStore` does with it: by itself the store has no way to come by weights. Memory is pinned if the
    process has imported torch and sees a CUDA device.
    """

    def __init__(self, budget: int | str, *, name: str = "pinned", chunk_bytes: int | str = "16 MiB") -> None:
        self.name = name
        self.chunk_bytes = max(parse_bytes(chunk_bytes), 1)
        self._shelf: Shelf[ModelId, _RankBuffer] = Shelf(name, parse_bytes(budget))
        self._bandwidth = Bandwidth(20e9)
        self._reserving = anyio.Lock()
        self._freeing = anyio.Lock()
        self._unwanted: dict[ModelId, anyio.Event] = {}

    @asynccontextmanager
    async def __asynccontextmanager__(self) -> AsyncGenerator[Self]:
        """Free all memory at the end."""
        try:
            yield self
        finally:
            for slot in [slot for slot in self._shelf if not slot.users]:
                self._shelf.drop(slot)
            await self._free()

    async def manifest(self, model: ModelId) -> Manifest:
        await checkpoint()
        for slot in self._shelf.group(model):
            if self._whole(slot.value.manifest):
                return slot.value.manifest
        raise ShardMissing(f"Tier {self.name!r} does not hold model {model!r}; prefetch it.")

    @asynccontextmanager
    async def open(self, shard: Shard) -> AsyncGenerator[AsyncIterator[HostChunk]]:
        await checkpoint()
        slot = self._shelf.find(shard.model, shard.rank)
        if slot is None or shard not in slot.value.filled:
            raise ShardMissing(f"Tier {self.name!r} does not hold {shard.file!r} of model {shard.model!r}.")
        self._shelf.use(slot)
        slot.value.kept = True
        chunks = _Resident(self, slot.value, shard, self._bandwidth)
        try:
            yield chunks
        finally:
            chunks.close()
            await self._leave(slot)

    @asynccontextmanager
    async def lend(self, manifest: Manifest, rank: int = 0) -> AsyncGenerator[HostBuffer | None]:
        """Lend a rank's buffer in place, `None` unless it is whole and still of that manifest."""
        await checkpoint()
        slot = self._shelf.find(manifest.model, rank)
        if slot is None or slot.value.manifest != manifest or not slot.value.whole:
            yield None
            return
        self._shelf.use(slot)
        slot.value.kept = True
        data = slot.value.data
        try:
            yield HostBuffer(data, self.name, slot.value.pinned)
        finally:
            give_back(data)
            await self._leave(slot)

    @asynccontextmanager
    async def hold(self, manifest: Manifest, rank: int) -> AsyncGenerator[Hold]:
        """Reserve the buffer of a rank, or join those who have, and keep it while the block runs.

        A buffer goes with the last block that held it, unless one of them said `keep`, or somebody has read
        from it: what was not finished takes no memory.

        Raises:
            TierFull: it does not fit even when everything idle is pushed out.
        """
        slot = await self._reserve(manifest, rank)
        hold = Hold(slot.value)
        try:
            async with slot.value.pinning:
                await to_thread.run_sync(slot.value.pin)
            yield hold
        finally:
            await self._leave(slot)

    def holds(self, shard: Shard) -> bool:
        """Whether the shard could be lent now."""
        slot = self._shelf.find(shard.model, shard.rank)
        return slot is not None and shard in slot.value.filled

    async def drop(self, model: ModelId) -> None:
        """Free the model's memory as soon as nothing lends from it, and return then.

        Called while it is lent, it waits; `keep` takes it back.
        """
        dropped = self._unwanted.setdefault(model, anyio.Event())
        self._drop_unwanted(model)
        await dropped.wait()
        await self._free()

    def keep(self, model: ModelId) -> None:
        """Take back a `drop` that still waits for readers; it returns."""
        if (dropped := self._unwanted.pop(model, None)) is not None:
            dropped.set()

    def pin(self, model: ModelId) -> None:
        """Never push the model out for another until `unpin`; one that is not there stays once it comes.

        It is not brought here by this, and an explicit `drop` still drops it.
        """
        self._shelf.pinned.add(model)

    def unpin(self, model: ModelId) -> None:
        """Let the model go again when room is needed; nothing happens if it was not pinned."""
        self._shelf.pinned.discard(model)

    def view(self) -> StoreView:
        tier = TierView(
            name=self.name,
            used_bytes=self._shelf.used_bytes,
            capacity_bytes=self._shelf.capacity_bytes,
            bytes_per_s=self._bandwidth.bytes_per_s,
        )
        manifests = {slot.value.manifest.model: slot.value.manifest for slot in self._shelf}
        residency = tuple(
            Residency(model=model, tier=self.name, size_bytes=manifest.weight_bytes)
            for model, manifest in manifests.items()
            if self._whole(manifest)
        )
        return StoreView(tiers=(tier,), residency=residency)

    @property
    def num_lent(self) -> int:
        """How many readers and fills use a buffer; 0 when nothing is open."""
        return sum(slot.users for slot in self._shelf)

    def __repr__(self) -> str:
        used, capacity = self._shelf.used_bytes, self._shelf.capacity_bytes
        return f"<PinnedStore {self.name!r} [{used} of {capacity} bytes]>"

    def _whole(self, manifest: Manifest) -> bool:
        slots = (self._shelf.find(manifest.model, rank) for rank in range(manifest.world_size))
        return all(slot and slot.value.manifest == manifest and slot.value.whole for slot in slots)

    async def _reserve(self, manifest: Manifest, rank: int) -> Slot[ModelId, _RankBuffer]:
        async with self._reserving:
            slot = self._shelf.find(manifest.model, rank)
            if slot is not None and slot.value.manifest != manifest:  # the model was converted anew
                self._replace(slot)
                slot = None
            if slot is None:
                self._shelf.make_room(manifest.buffer_bytes, manifest.model)
                await self._free()
                buffer = _RankBuffer(manifest, rank)
                slot = self._shelf.add(manifest.model, rank, buffer, manifest.buffer_bytes)
            self._shelf.use(slot)
            return slot

    def _replace(self, slot: Slot[ModelId, _RankBuffer]) -> None:
        if slot.users:
            raise TierFull(
                f"Tier {self.name!r} still lends the former weights of {slot.value.manifest.model!r}. "
                "Try again when their readers have ended."
            )
        self._shelf.drop(slot)

    async def _leave(self, slot: Slot[ModelId, _RankBuffer]) -> None:
        """End one use, and with the last one free what is not to be kept."""
        self._shelf.leave(slot)
        if not slot.users and not slot.value.kept:
            self._shelf.drop(slot)
        self._drop_unwanted(slot.value.manifest.model)
        await self._free()

    def _drop_unwanted(self, model: ModelId) -> None:
        slots = self._shelf.group(model)
        if model in self._unwanted and not any(slot.users for slot in slots):
            for slot in slots:
                self._shelf.drop(slot)
            self.keep(model)

    async def _free(self) -> None:
        """Free what has left; in a thread, because giving back many pages takes a while."""
        with CancelScope(shield=True):
            async with self._freeing:
                for slot in self._shelf.take_leaving():
                    await to_thread.run_sync(slot.value.close)
                    self._shelf.freed(slot)


class Hold:
    """A rank's buffer while somebody fills it."""

    def __init__(self, buffer: _RankBuffer) -> None:
        self._buffer = buffer

    @property
    def pinned(self) -> bool:
        """Whether a device may copy from the buffer asynchronously."""
        return self._buffer.pinned

    def has(self, shard: Shard) -> bool:
        """Whether the shard was committed, by whomever: it must not be written again."""
        return shard in self._buffer.filled

    def place(self, shard: Shard) -> memoryview:
        """Where the shard's bytes belong; writable until it is committed."""
        return self._buffer.part(shard)

    def commit(self, shard: Shard) -> None:
        """Say that the shard's bytes are there and verified: from now on it can be lent."""
        self._buffer.filled.add(shard)

    def keep(self) -> None:
        """Let the buffer stay when nobody holds it any more, until room is needed."""
        self._buffer.kept = True


class _RankBuffer:
    """The flat buffer of one rank in anonymous memory, and which shards of it are there."""

    def __init__(self, manifest: Manifest, rank: int) -> None:
        self.manifest = manifest
        self.filled: set[Shard] = set()
        self.kept = False
        self.pinned = False
        self.pinning = anyio.Lock()
        self._shards = set(manifest.shards_of(rank))
        self._data = aligned_buffer(manifest.buffer_bytes)
        self._asked = False

    @property
    def whole(self) -> bool:
        return self.filled == self._shards

    @property
    def data(self) -> memoryview:
        """All of it, not to be written."""
        return self._data.toreadonly()

    def part(self, shard: Shard) -> memoryview:
        return self._data[shard.buffer_offset_bytes : shard.buffer_offset_bytes + shard.size_bytes]

    def pin(self) -> None:
        """Lock the memory for the device, once; blocks while the pages are made."""
        if not self._asked:
            self._asked = True
            self.pinned = pin(self._data)

    def close(self) -> None:
        """Free the memory; if a reader kept a view of it, it goes when the view does."""
        if self.pinned:
            unpin(self._data)
        self._data.release()


class _Resident:
    """The chunks of a shard that is there: slices of the buffer."""

    def __init__(self, store: PinnedStore, buffer: _RankBuffer, shard: Shard, bandwidth: Bandwidth) -> None:
        self._store = store
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
        start, self._position = self._position, self._position + self._store.chunk_bytes
        self._lent = self._data[start : self._position]
        self._lent_at_s = anyio.current_time()
        offset = self._shard.buffer_offset_bytes + start
        return HostChunk(offset, self._lent, self._store.name, self._buffer.pinned)

    def close(self) -> None:
        self._take_back()
        self._data.release()

    def _take_back(self) -> None:
        """End the loan; how long it lasted is how fast a consumer copies from host memory."""
        if self._lent is not None:
            self._bandwidth.observe(len(self._lent), anyio.current_time() - self._lent_at_s)
        give_back(self._lent)
        self._lent = None
