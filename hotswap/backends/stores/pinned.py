"""`PinnedStore`: the tier in a process's own host memory, under a budget, pinned where CUDA is available."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import AsyncGenerator, Hashable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, Self, TypeVar

import anyio
from anyio import CancelScope
from anyio.lowlevel import checkpoint

from hotswap.backends.memory import aligned_buffer, can_pin, pin, unpin
from hotswap.backends.stores.host_tier import BufferReservation, HostTier, PendingDrops
from hotswap.errors import ShardMissing, TierFull
from hotswap.hardware import parse_bytes
from hotswap.model import Manifest, Shard
from hotswap.request import ModelId
from hotswap.view import Residency, StoreView, TierView
from hotswap.worker_threads import in_thread, run_in_thread, shielded

__all__ = ["Budget", "PinnedStore", "Slot"]


_G = TypeVar("_G", bound=Hashable)
_T = TypeVar("_T")


@dataclass(slots=True, eq=False)
class Slot(Generic[_G, _T]):
    """One part of a group; takes `size_bytes` of a budget."""

    group: _G
    part: int
    value: _T
    size_bytes: int
    users: int = 0


class Budget(Generic[_G, _T]):
    """Slots under a byte budget. A group of slots is a model, its slots are the ranks' buffers.

    A group is evicted as a whole, least recently used first, because a part of a model is of little use. A
    group with a slot in use, or pinned, is not evicted. Bytes count from `add` until `freed`: a dropped slot
    counts while its memory is being freed, so the memory in use never exceeds the budget.
    """

    def __init__(self, name: str, capacity_bytes: int) -> None:
        self.name = name
        self.capacity_bytes = capacity_bytes
        self.used_bytes = 0
        self.pinned: set[_G] = set()
        self._groups: OrderedDict[_G, dict[int, Slot[_G, _T]]] = OrderedDict()
        self._dropped: list[Slot[_G, _T]] = []
        self._dropped_bytes = 0

    def __iter__(self) -> Iterator[Slot[_G, _T]]:
        """The slots, those of the least recently used group first."""
        return (slot for parts in self._groups.values() for slot in parts.values())

    @property
    def is_freeing(self) -> bool:
        """Whether slots were dropped and are not `freed` yet."""
        return bool(self._dropped or self._dropped_bytes)

    def group(self, group: _G) -> tuple[Slot[_G, _T], ...]:
        """Return the slots of a group."""
        return tuple(self._groups.get(group, {}).values())

    def find(self, group: _G, part: int) -> Slot[_G, _T] | None:
        """Return a slot, `None` if there is none."""
        return self._groups.get(group, {}).get(part)

    def make_room(self, size_bytes: int, group: _G) -> None:
        """Drop idle groups other than `group` until `size_bytes` more will fit.

        They fit once every slot of `take_dropped` is `freed`.

        Raises:
            TierFull: they would not fit even then; nothing is dropped.
        """
        missing = self.used_bytes - self._dropped_bytes + size_bytes - self.capacity_bytes
        victims: list[Slot[_G, _T]] = []
        for other, parts in self._groups.items():
            if missing <= 0:
                break
            if other != group and other not in self.pinned and not any(s.users for s in parts.values()):
                victims += parts.values()
                missing -= sum(slot.size_bytes for slot in parts.values())
        if missing > 0:
            raise TierFull(
                f"Tier {self.name!r} has no room for {size_bytes} bytes: it lacks {missing} of its "
                f"{self.capacity_bytes}, which are in use or pinned. Raise the budget, unpin a model, or "
                "wait until loads end."
            )
        for slot in victims:
            self.drop(slot)

    def add(self, group: _G, part: int, value: _T, size_bytes: int) -> Slot[_G, _T]:
        """Add a slot of `size_bytes`, for which room was made."""
        parts = self._groups.setdefault(group, {})
        assert part not in parts, f"part {part} of {group!r} is there already"
        assert self.used_bytes + size_bytes <= self.capacity_bytes, "add without make_room"
        slot = parts[part] = Slot(group, part, value, size_bytes)
        self.used_bytes += size_bytes
        return slot

    def use(self, slot: Slot[_G, _T]) -> None:
        """Keep the slot's group until `release`; both make it the most recently used."""
        slot.users += 1
        self._groups.move_to_end(slot.group)

    def release(self, slot: Slot[_G, _T]) -> None:
        """End one use."""
        assert slot.users > 0, f"part {slot.part} of {slot.group!r} is not in use"
        slot.users -= 1
        self._groups.move_to_end(slot.group)

    def drop(self, slot: Slot[_G, _T]) -> None:
        """Remove an idle slot; its bytes count until `freed`."""
        assert not slot.users, f"part {slot.part} of {slot.group!r} is in use"
        parts = self._groups[slot.group]
        del parts[slot.part]
        if not parts:
            del self._groups[slot.group]
        self._dropped.append(slot)
        self._dropped_bytes += slot.size_bytes

    def take_dropped(self) -> list[Slot[_G, _T]]:
        """Return the dropped slots to free, each once; their bytes count until `freed`."""
        dropped, self._dropped = self._dropped, []
        return dropped

    def freed(self, slot: Slot[_G, _T]) -> None:
        """Return the bytes of a slot of `take_dropped` to the budget."""
        self._dropped_bytes -= slot.size_bytes
        self.used_bytes -= slot.size_bytes


class PinnedStore(HostTier):
    """Weights in host memory, lent without a copy. Evicts the least recently used model, none while lent.

    `budget` bounds the bytes of all buffers, those being filled and those being freed included. A buffer is
    one rank of one model, allocated at once and filled shard by shard through `reserve`. The store loads
    nothing by itself; a `TieredStore` fills it. Memory is pinned once the process computes on a CUDA device
    by torch. It is private to the process; `SharedStore` shares memory between the processes of a machine.
    """

    def __init__(
        self, budget: int | str, *, name: str = "pinned", chunk_bytes: int | str = "256 MiB"
    ) -> None:
        super().__init__(name, chunk_bytes)
        self._budget: Budget[ModelId, _RankBuffer] = Budget(name, parse_bytes(budget, "budget"))
        self._reserving = anyio.Lock()
        self._freeing = anyio.Lock()
        self._drops = PendingDrops()

    @asynccontextmanager
    async def __asynccontextmanager__(self) -> AsyncGenerator[Self]:
        """Free all memory at the end."""
        try:
            yield self
        finally:
            for slot in [slot for slot in self._budget if not slot.users]:
                self._budget.drop(slot)
            await self._free()

    async def manifest(self, model: ModelId) -> Manifest:
        await checkpoint()
        for slot in self._budget.group(model):
            if self._whole(slot.value.manifest):
                return slot.value.manifest
        raise ShardMissing(f"Tier {self.name!r} does not hold model {model!r}; prefetch it.")

    @asynccontextmanager
    async def reserve(self, manifest: Manifest, rank: int) -> AsyncGenerator[BufferReservation]:
        slot = await self._reserve(manifest, rank)
        reservation = _BufferReservation(slot.value)
        try:
            await slot.value.prepare()
            yield reservation
        finally:
            await self._release(slot)

    def holds(self, shard: Shard) -> bool:
        slot = self._budget.find(shard.model, shard.rank)
        return slot is not None and slot.value.has(shard)

    async def drop(self, model: ModelId) -> None:
        with self._drops.waiting(model) as dropped:
            self._drop_unwanted(model)
            await dropped.wait()
        await self._free()

    def keep(self, model: ModelId) -> None:
        self._drops.end(model)

    def pin(self, model: ModelId) -> None:
        self._budget.pinned.add(model)

    def unpin(self, model: ModelId) -> None:
        self._budget.pinned.discard(model)

    def view(self) -> StoreView:
        tier = TierView(
            name=self.name,
            used_bytes=self._budget.used_bytes,
            capacity_bytes=self._budget.capacity_bytes,
            bytes_per_s=self._bandwidth.bytes_per_s,
        )
        manifests = {slot.value.manifest.model: slot.value.manifest for slot in self._budget}
        residency = tuple(
            Residency(model=model, tier=self.name, size_bytes=manifest.weight_bytes)
            for model, manifest in manifests.items()
            if self._whole(manifest)
        )
        return StoreView(tiers=(tier,), residency=residency)

    @property
    def num_lent(self) -> int:
        """How many readers and fills use a buffer; 0 when none is open."""
        return sum(slot.users for slot in self._budget)

    def __repr__(self) -> str:
        used, capacity = self._budget.used_bytes, self._budget.capacity_bytes
        return f"<PinnedStore {self.name!r} [{used} of {capacity} bytes]>"

    @asynccontextmanager
    async def _shard_in_use(self, shard: Shard) -> AsyncGenerator[_RankBuffer | None]:
        slot = self._budget.find(shard.model, shard.rank)
        async with self._in_use(slot if slot is not None and slot.value.has(shard) else None) as buffer:
            yield buffer

    @asynccontextmanager
    async def _rank_in_use(self, manifest: Manifest, rank: int) -> AsyncGenerator[_RankBuffer | None]:
        slot = self._budget.find(manifest.model, rank)
        there = slot is not None and slot.value.manifest == manifest and slot.value.whole
        async with self._in_use(slot if there else None) as buffer:
            yield buffer

    @asynccontextmanager
    async def _in_use(self, slot: Slot[ModelId, _RankBuffer] | None) -> AsyncGenerator[_RankBuffer | None]:
        if slot is None:
            yield None
            return
        self._budget.use(slot)
        slot.value.kept = True
        try:
            await slot.value.prepare()
            yield slot.value
        finally:
            await self._release(slot)

    def _whole(self, manifest: Manifest) -> bool:
        slots = (self._budget.find(manifest.model, rank) for rank in range(manifest.world_size))
        return all(slot and slot.value.manifest == manifest and slot.value.whole for slot in slots)

    async def _reserve(self, manifest: Manifest, rank: int) -> Slot[ModelId, _RankBuffer]:
        async with self._reserving:
            slot = self._budget.find(manifest.model, rank)
            if slot is not None and slot.value.manifest != manifest:  # another conversion of the model
                self._replace(slot)
                slot = None
            if slot is None:
                self._budget.make_room(manifest.buffer_bytes, manifest.model)
                await self._free()
                buffer = self._allocate(manifest, rank)
                slot = self._budget.add(manifest.model, rank, buffer, manifest.buffer_bytes)
            self._budget.use(slot)
            return slot

    def _allocate(self, manifest: Manifest, rank: int) -> _RankBuffer:
        try:
            return _RankBuffer(manifest, rank)
        except MemoryError as exc:
            raise TierFull(
                f"The system gives tier {self.name!r} no {manifest.buffer_bytes} bytes of memory for model "
                f"{manifest.model!r}, though its budget has room. Name a smaller budget, or give "
                "the machine, or the container, more memory."
            ) from exc

    def _replace(self, slot: Slot[ModelId, _RankBuffer]) -> None:
        if slot.users:
            raise TierFull(
                f"Tier {self.name!r} still lends the former weights of {slot.value.manifest.model!r}. "
                "Try again when their readers have ended."
            )
        self._budget.drop(slot)

    async def _release(self, slot: Slot[ModelId, _RankBuffer]) -> None:
        """End one use of a slot; the last one frees a buffer that is not kept."""
        self._budget.release(slot)
        if not slot.users and not slot.value.kept:
            self._budget.drop(slot)
        self._drop_unwanted(slot.value.manifest.model)
        await self._free()

    def _drop_unwanted(self, model: ModelId) -> None:
        slots = self._budget.group(model)
        if model in self._drops and not any(slot.users for slot in slots):
            for slot in slots:
                self._budget.drop(slot)
            self._drops.end(model)

    async def _free(self) -> None:
        """Free the dropped buffers; in a thread, because returning many pages is slow."""
        if self._budget.is_freeing:
            with CancelScope(shield=True):
                await shielded(self._free_dropped)

    async def _free_dropped(self) -> None:
        async with self._freeing:
            for slot in self._budget.take_dropped():
                await run_in_thread(slot.value.close)
                self._budget.freed(slot)


class _BufferReservation(BufferReservation):
    def __init__(self, buffer: _RankBuffer) -> None:
        super().__init__(buffer)
        self._rank_buffer = buffer

    def commit(self, shard: Shard) -> None:
        self._rank_buffer.filled.add(shard)

    def keep(self) -> None:
        self._rank_buffer.kept = True


class _RankBuffer:
    """The flat buffer of one rank in anonymous memory, and its committed shards."""

    def __init__(self, manifest: Manifest, rank: int) -> None:
        self.manifest = manifest
        self.filled: set[Shard] = set()
        self.kept = False
        self.pinned = False
        self._pinning = anyio.Lock()
        self._shards = set(manifest.shards_of(rank))
        self._data = aligned_buffer(manifest.buffer_bytes)
        self._tried_to_pin = False

    @property
    def whole(self) -> bool:
        return self.filled == self._shards

    @property
    def place(self) -> tuple[Path | None, int]:
        return None, 0

    @property
    def data(self) -> memoryview:
        return self._data.toreadonly()

    def has(self, shard: Shard) -> bool:
        return shard in self.filled

    def part(self, shard: Shard) -> memoryview:
        return self._data[shard.buffer_offset_bytes : shard.buffer_offset_bytes + shard.size_bytes]

    async def prepare(self) -> None:
        """Pin the memory, once the process uses a device; it may have been filled before."""
        if self._tried_to_pin or not can_pin():
            return
        async with self._pinning:
            if not self._tried_to_pin:
                await in_thread(self._pin)

    def _pin(self) -> None:
        self._tried_to_pin = True
        self.pinned = pin(self._data)

    def close(self) -> None:
        """Free the memory; if a reader kept a view of it, it is freed with the view."""
        if self.pinned:
            unpin(self._data)
        self._data.release()
