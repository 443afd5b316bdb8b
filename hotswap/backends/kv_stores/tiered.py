"""`TieredKVStore`: KV blocks in memory and, behind it, on a disk."""

from __future__ import annotations

import heapq
import logging
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from operator import attrgetter
from typing import Any, Self, cast

import anyio

from hotswap.backends.kv_index import StoredBlock
from hotswap.backends.kv_indexed import IndexedKVStore
from hotswap.backends.kv_stores.host import HostKVStore
from hotswap.backends.kv_stores.nvme import NvmeKVStore
from hotswap.backends.kv_stores.staging import Staging
from hotswap.backends.memory import copy
from hotswap.checks import shown
from hotswap.errors import ConfigError
from hotswap.hardware import parse_bytes
from hotswap.tasks_beside import tasks_beside
from hotswap.worker_threads import in_thread

__all__ = ["TieredKVStore"]

log = logging.getLogger("hotswap.stores")

# Written to the disk at once.
_MOVE_BYTES = 4 << 20


@dataclass(slots=True, eq=False)
class TierPlace:
    """Where a block is: in a tier, at a place there. `num_lent` reads use it now."""

    tier: IndexedKVStore[Any]
    place: Any
    block_bytes: int
    num_lent: int = 0


class TieredKVStore(IndexedKVStore[TierPlace]):
    """Keeps KV blocks in memory as long as there is room, and on a disk those used longest ago.

    A block is in one tier at a time. Saves write to memory, of which `headroom` is kept free for them: behind
    them, blocks of the least rank are written to the disk until there is as much again. A save that is larger
    than what is free writes to the disk itself. The last blocks of all tiers together make room by their
    rank, as in other stores. What was written to the disk is read from there, and does not come back to
    memory.

    The two stores lend it their memory and their file while it is entered, and are not used otherwise. What
    they say of what users wrote holds.

    Args:
        memory: The first tier.
        disk: The second.
        headroom: How much of the memory is kept free, an eighth of it by default. The budget is what both
            tiers have without it. Blocks and recurrent states that are
            larger than half of it are not kept.

    Raises:
        ConfigError: the headroom is no size, or more than the memory, or a tier is another store.
    """

    def __init__(self, memory: HostKVStore, disk: NvmeKVStore, *, headroom: int | str | None = None) -> None:
        # They are used below their contract, so another store would not do for its verbs.
        if not isinstance(cast("object", memory), HostKVStore):
            raise ConfigError(f"memory is {shown(memory)}; give a HostKVStore.")
        if not isinstance(cast("object", disk), NvmeKVStore):
            raise ConfigError(f"disk is {shown(disk)}; give an NvmeKVStore.")
        self._memory, self._disk = memory, disk
        tiers: tuple[IndexedKVStore[Any], ...] = (memory, disk)
        self._room: dict[IndexedKVStore[Any], int] = {t: t.view().capacity_bytes or 0 for t in tiers}
        self._used = dict.fromkeys(self._room, 0)
        self._largest = 0  # of the blocks that there were
        room = self._room[memory]
        self._headroom = room // 8 if headroom is None else parse_bytes(headroom, "headroom")
        if self._headroom > room:
            raise ConfigError(f"headroom is {self._headroom:,} bytes, more than the memory, {room:,}.")
        super().__init__(sum(self._room.values()) - self._headroom, tier=f"{memory.tier}+{disk.tier}")
        self._staging = Staging()
        self._lent: dict[int, tuple[Sequence[TierPlace], IndexedKVStore[Any] | None]] = {}
        self._wanted = anyio.Event()

    @asynccontextmanager
    async def __asynccontextmanager__(self) -> AsyncGenerator[Self]:
        self._wanted, self._used = anyio.Event(), dict.fromkeys(self._used, 0)
        async with (
            self._memory,
            self._disk,
            super().__asynccontextmanager__(),
            tasks_beside() as tasks,
        ):
            tasks.start_soon(self._keep_headroom, name="writing KV blocks to a disk")
            try:
                yield self
            finally:
                self._staging.close()

    # ------------------------------------------------------------------ places

    @property
    def most_block_bytes(self) -> int:
        return self._headroom // 2

    def size_of(self, block_bytes: int) -> int:
        return self._memory.size_of(block_bytes)

    def is_broken(self, place: TierPlace) -> bool:
        return place.tier.is_broken(place.place)

    def allocate(self, block_bytes: int) -> TierPlace:
        # The budget leaves the headroom free, of which a move takes half at most: one tier has enough.
        size = self.size_of(block_bytes)
        self._largest = max(self._largest, size)
        place = self._place_in(self._memory if size <= self._free(self._memory) else self._disk, block_bytes)
        self._look()
        return place

    def free(self, place: TierPlace) -> None:
        place.tier.free(place.place)
        self._used[place.tier] -= self.size_of(place.block_bytes)
        self._look()

    def opened(self, number: int) -> None:
        super().opened(number)
        self._look()

    def _place_in(self, tier: IndexedKVStore[Any], block_bytes: int) -> TierPlace:
        self._used[tier] += self.size_of(block_bytes)
        assert self._free(tier) >= 0, "a tier is over full"
        return TierPlace(tier, tier.allocate(block_bytes), block_bytes)

    def _free(self, tier: IndexedKVStore[Any]) -> int:
        return self._room[tier] - self._used[tier]

    # ------------------------------------------------------------------ content

    async def fill(self, places: Sequence[TierPlace], data: memoryview) -> None:
        block_bytes, at = len(data) // len(places), 0
        for tier, run in _runs(places):
            size = len(run) * block_bytes
            await tier.fill([place.place for place in run], data[at : at + size])
            at += size

    async def content(self, places: Sequence[TierPlace], block_bytes: int) -> memoryview:
        for place in places:
            place.num_lent += 1
        try:
            runs = list(_runs(places))
            if len(runs) == 1:
                tier: IndexedKVStore[Any] | None = runs[0][0]
                data = await runs[0][0].content([place.place for place in places], block_bytes)
            else:
                tier, data = None, await self._gather(runs, block_bytes)
        except BaseException:
            _give_back(places)
            raise
        self._lent[id(data)] = places, tier
        return data

    async def _gather(
        self, runs: Sequence[tuple[IndexedKVStore[Any], Sequence[TierPlace]]], block_bytes: int
    ) -> memoryview:
        """Return blocks of several tiers in one memory."""
        out = await self._staging.take(sum(len(run) for _, run in runs) * block_bytes)
        at = 0
        try:
            for tier, run in runs:
                data = await tier.content([place.place for place in run], block_bytes)
                try:
                    await in_thread(partial(copy, out[at : at + len(data)], data))
                finally:
                    tier.done(data)
                at += len(data)
        except BaseException:
            self._staging.give_back(out)
            raise
        return out

    def done(self, data: memoryview) -> None:
        places, tier = self._lent.pop(id(data))
        _give_back(places)
        if tier is None:
            self._staging.give_back(data)
        else:
            tier.done(data)

    # ------------------------------------------------------------------ writing behind

    def _look(self) -> None:
        """Have blocks be written to the disk if there is too little free memory, and room."""
        is_short = self._free(self._memory) < self._headroom
        if is_short and self._free(self._disk) >= self._largest:
            self._wanted.set()

    async def _keep_headroom(self) -> None:
        while True:
            await self._wanted.wait()
            self._wanted = anyio.Event()
            try:
                for block_bytes, cold in groupby(self._coldest(), key=attrgetter("place.block_bytes")):
                    blocks, size = list(cold), max(1, self.size_of(block_bytes))
                    step = max(1, min(_MOVE_BYTES, self._headroom // 2) // size)
                    for at in range(0, len(blocks), step):
                        await self._move_down(blocks[at : at + step], block_bytes)
            except Exception as exc:
                log.warning("KV blocks stay in memory: %s", exc)

    def _coldest(self) -> list[StoredBlock[TierPlace]]:
        """Return the blocks of the least rank in memory, about as many as the headroom lacks."""
        lacking = self._headroom - self._free(self._memory)
        movable = list(filter(self._may_move, self._index))
        if lacking <= 0 or not movable:
            return []
        count = lacking * len(movable) // self._used[self._memory] + 1
        return heapq.nsmallest(count, movable, key=attrgetter("rank"))

    def _may_move(self, block: StoredBlock[TierPlace]) -> bool:
        return block.place.tier is self._memory and not block.place.num_lent

    async def _move_down(self, blocks: Sequence[StoredBlock[TierPlace]], block_bytes: int) -> None:
        """Write blocks of equal size to the disk, as far as it has room and no read uses them."""
        index, room = self._index, self._free(self._disk) // max(1, self.size_of(block_bytes))
        blocks = [b for b in blocks if index.get(b.key) is b and self._may_move(b)][:room]
        if not blocks:
            return
        old, left = [block.place for block in blocks], list[TierPlace]()
        for block in blocks:
            index.lease(block)
            left.append(self._place_in(self._disk, block_bytes))
        try:
            data = await self.content(old, block_bytes)
            try:
                await self._disk.fill([place.place for place in left], data)
            finally:
                self.done(data)
            for at, block in enumerate(blocks):
                if not old[at].num_lent:
                    block.place, left[at] = left[at], old[at]
        finally:
            for block, place in zip(blocks, left, strict=True):
                index.release(block)
                self.free(place)


def _runs(
    places: Sequence[TierPlace],
) -> Iterator[tuple[IndexedKVStore[Any], Sequence[TierPlace]]]:
    """Return the places that follow each other in one tier."""
    for tier, run in groupby(places, key=attrgetter("tier")):
        yield tier, list(run)


def _give_back(places: Sequence[TierPlace]) -> None:
    for place in places:
        place.num_lent -= 1
