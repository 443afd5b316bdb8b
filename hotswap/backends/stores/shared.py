"""The tier in host memory that the processes of a machine have in common: segments that all of them map."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Self

import anyio
from anyio import CancelScope, get_cancelled_exc_class, move_on_after, to_thread
from anyio.abc import TaskGroup
from anyio.lowlevel import checkpoint

from hotswap.backends.memory import can_pin
from hotswap.backends.stores.host_tier import Drops, Hold, HostTier
from hotswap.backends.stores.reading import background
from hotswap.backends.stores.segment import Label, Segment, digest_of, is_nameable
from hotswap.backends.stores.segment_shelf import Busy, SegmentShelf
from hotswap.backends.stores.shared_buffer import SharedBuffer, SharedHold, patiently, pauses
from hotswap.backends.stores.unbroken import in_thread, unbroken
from hotswap.errors import ShardMissing, StoreError, TierFull
from hotswap.hardware import parse_bytes
from hotswap.model import Manifest, Shard
from hotswap.request import ModelId
from hotswap.view import Residency, StoreView, TierView

__all__ = ["SharedStore", "clear"]

_log = logging.getLogger("hotswap.stores")


class SharedStore(HostTier):
    """Weights in memory that all processes of a machine share: each model is there once, whoever loaded it.

    A `PinnedStore` for several processes: name the same directory and the same budget in each. The first
    process that loads a model fills a segment, others that want it meanwhile wait, and map the same pages;
    if the first one dies, the next goes on where it was. Engines on a CPU are lent the pages themselves, read
    only. With a CUDA device each process pins what it has mapped. Linux only.

    `budget` bounds the bytes of all segments together. What any living process lends or pins stays; of the
    rest the model used longest ago goes first. Segments stay when the processes end, so that a restart
    finds its models warm, until they are pushed out, or `clear` removes them. A process asks the tier below
    once which weights a model has, so a restart never goes on with those of an earlier conversion. While it
    has them all here it does not ask again: a model that is replaced under a running process stays as it was
    there until it is dropped, or pushed out.

    A process that was forked from one that has this open shares its locks; begin processes anew instead.

    Args:
        directory: Where the segments lie: a directory of your own, in memory, such as one in `/dev/shm`.
        budget: Bytes, the same for all processes that share the directory.
        name: The tier's name.
        chunk_bytes: How much is lent at a time to readers who copy.
        linger_s: How long memory that was pinned for a device stays mapped after its last use.
    """

    def __init__(
        self,
        directory: str | Path,
        budget: int | str,
        *,
        name: str = "shared",
        chunk_bytes: int | str = "16 MiB",
        linger_s: float = 2.0,
    ) -> None:
        super().__init__(name, chunk_bytes)
        self.directory = Path(directory)
        self.linger_s = linger_s
        self._shelf = SegmentShelf(self.directory, parse_bytes(budget))
        self._known: dict[ModelId, _Known] = {}
        self._buffers: dict[Label, SharedBuffer] = {}
        self._opening = anyio.Lock()
        self._drops = Drops()
        self._changed = anyio.Event()
        self._tasks: TaskGroup | None = None

    @asynccontextmanager
    async def __asynccontextmanager__(self) -> AsyncGenerator[Self]:
        """Join those who share the directory; at the end unmap all, and leave the segments there.

        Raises:
            ConfigError: others keep another budget there, the directory is not ours, or this is not Linux.
            StoreError: it cannot be used.
        """
        try:
            for path in await patiently(self._shelf.open):
                _log.warning("Removed %r: it was half-filled, and nobody is there to fill it.", str(path))
            async with background() as self._tasks:
                try:
                    yield self
                finally:
                    self._tasks = None
        finally:
            with CancelScope(shield=True):
                await unbroken(self._close_all)

    async def _close_all(self) -> None:
        async with self._opening:
            await self._close_idle()
        await to_thread.run_sync(self._shelf.close)

    async def manifest(self, model: ModelId) -> Manifest:
        await checkpoint()
        known = self._known.get(model)
        if known is None or not self._is_whole(known):
            raise ShardMissing(f"Tier {self.name!r} does not hold model {model!r}; prefetch it.")
        return known.manifest

    @asynccontextmanager
    async def hold(self, manifest: Manifest, rank: int) -> AsyncGenerator[Hold]:
        await self.expect(manifest)
        if not is_nameable(manifest.model):
            raise TierFull(
                f"The id {manifest.model!r} is no plain file name, so {self.name!r} does not take the model. "
                "Use a PinnedStore, or give the model an id of letters, digits, '.', '_' and '-'."
            )
        if not all(shard.checksum for shard in manifest.shards):
            raise TierFull(
                f"Model {manifest.model!r} has shards without checksums, so no other process could tell its "
                f"weights from later ones; {self.name!r} does not take it. Use a PinnedStore."
            )
        async with self._in_use(manifest, rank, make=True) as buffer:
            assert buffer is not None
            yield SharedHold(buffer)

    def holds(self, shard: Shard) -> bool:
        known = self._known.get(shard.model)
        if known is None or shard not in known.shards:
            return False
        label = known.labels[shard.rank]
        buffer = self._buffers.get(label)
        return buffer.has(shard) if buffer is not None else self._shelf.has(label)

    async def expect(self, manifest: Manifest) -> None:
        known = self._known.get(manifest.model)
        if is_nameable(manifest.model) and (known is None or known.manifest != manifest):
            self._known[manifest.model] = await _know(manifest)

    async def drop(self, model: ModelId) -> None:
        with self._drops.waiting(model) as dropped:
            for pause_s in pauses(most_s=0.25):
                if dropped.is_set():
                    return
                if await self._removed(model):
                    self.keep(model)
                    return
                with move_on_after(pause_s):
                    await self._changed.wait()

    def keep(self, model: ModelId) -> None:
        if self._drops.end(model):
            self._notify()

    def pin(self, model: ModelId) -> None:
        self._shelf.pin(model)

    def unpin(self, model: ModelId) -> None:
        self._shelf.unpin(model)

    async def clear(self) -> int:
        """Remove what no process uses and no other one pins, and return the bytes freed."""
        async with self._opening:
            await self._close_idle()
        freed_bytes, _ = await patiently(self._shelf.clear)
        return freed_bytes

    def view(self) -> StoreView:
        used_bytes, labels = self._shelf.snapshot()
        tier = TierView(
            name=self.name,
            used_bytes=used_bytes,
            capacity_bytes=self._shelf.capacity_bytes,
            bytes_per_s=self._bandwidth.bytes_per_s,
        )
        return StoreView(tiers=(tier,), residency=tuple(self._residency(labels)))

    @property
    def num_lent(self) -> int:
        """How many readers and fills of this process use a segment; 0 when nothing is open."""
        return sum(buffer.users for buffer in self._buffers.values())

    def __repr__(self) -> str:
        used, capacity = self._shelf.snapshot()[0], self._shelf.capacity_bytes
        return (
            f"<SharedStore {str(self.directory)!r} [{used} of {capacity} bytes, {self.num_lent} in use here]>"
        )

    def _residency(self, labels: tuple[Label, ...]) -> Iterator[Residency]:
        """The models all of whose ranks are there, of those known here in the conversion known here."""
        ranks: dict[tuple[ModelId, str], list[Label]] = {}
        for label in labels:
            known = self._known.get(label.model)
            if known is None or known.digest == label.digest:
                ranks.setdefault((label.model, label.digest), []).append(label)
        told: set[ModelId] = set()
        for (model, _), group in ranks.items():
            if len(group) == group[0].world_size and model not in told:
                told.add(model)
                yield Residency(model=model, tier=self.name, size_bytes=group[0].weight_bytes)

    def _is_whole(self, known: _Known) -> bool:
        for label in known.labels:
            buffer = self._buffers.get(label)
            if not (buffer.whole if buffer is not None else self._shelf.has(label)):
                return False
        return True

    # ------------------------------------------------------------------------------------ what is mapped

    @asynccontextmanager
    async def _shard_in_use(self, shard: Shard) -> AsyncGenerator[SharedBuffer | None]:
        known = self._known.get(shard.model)
        if known is None or shard not in known.shards:
            yield None
            return
        async with self._in_use(known.manifest, shard.rank) as buffer:
            there = buffer is not None and buffer.has(shard)
            if buffer is not None and there:
                buffer.kept = True
            yield buffer if there else None

    @asynccontextmanager
    async def _rank_in_use(self, manifest: Manifest, rank: int) -> AsyncGenerator[SharedBuffer | None]:
        async with self._in_use(manifest, rank) as buffer:
            there = buffer is not None and buffer.whole
            if buffer is not None and there:
                buffer.kept = True
            yield buffer if there else None

    @asynccontextmanager
    async def _in_use(
        self, manifest: Manifest, rank: int, *, make: bool = False
    ) -> AsyncGenerator[SharedBuffer | None]:
        """Keep a rank mapped while the block runs, made if need be; `None` if it is not there."""
        if not is_nameable(manifest.model):
            yield None
            return
        known = self._known.get(manifest.model)
        if known is None or known.manifest != manifest:
            known = await _know(manifest)
        buffer = await self._use(known, rank, make=make)
        try:
            if buffer is not None:
                async with buffer.preparing:
                    await buffer.prepare(self.directory)
            yield buffer
        finally:
            if buffer is not None:
                await self._leave(buffer)

    async def _use(self, known: _Known, rank: int, *, make: bool) -> SharedBuffer | None:
        label = known.labels[rank]
        for pause_s in pauses():
            async with self._opening:
                with suppress(Busy):
                    if label not in self._buffers:
                        await self._map(known, rank, make=make)
                    buffer = self._buffers.get(label)
                    if buffer is not None:
                        buffer.users += 1
                        buffer.uses += 1
                    return buffer
            await anyio.sleep(pause_s)
        return None

    async def _map(self, known: _Known, rank: int, *, make: bool) -> None:
        """Map a rank if it is there, or made; cancelled, let it go again. `_opening` is held."""
        label = known.labels[rank]

        async def enter() -> None:
            segment = await self._attach(label, make=make)
            if segment is not None:
                self._buffers[label] = SharedBuffer(known.manifest, rank, segment)

        try:
            await unbroken(enter)
        except get_cancelled_exc_class():
            if label in self._buffers:
                await self._close(self._buffers[label])
            raise

    async def _attach(self, label: Label, *, make: bool) -> Segment | None:
        if self._tasks is None:
            raise StoreError(f"{self!r} is not open; use it inside `async with`.")
        if not make:
            return await to_thread.run_sync(partial(self._shelf.attach, label, writable=can_pin()))
        take = partial(self._shelf.take, label, writable=can_pin())
        try:
            return await to_thread.run_sync(take)
        except TierFull:
            if not await self._close_idle():
                raise
        return await to_thread.run_sync(take)

    async def _leave(self, buffer: SharedBuffer) -> None:
        """End one use, and with the last one unmap; what is not to be kept goes."""
        buffer.users -= 1
        if buffer.users:
            return
        if buffer.pinned and self._tasks is not None:
            self._tasks.start_soon(self._linger, buffer, buffer.uses)
        else:
            await self._close_unused(buffer, buffer.uses)

    async def _linger(self, buffer: SharedBuffer, uses: int) -> None:
        """Unmap when nobody has come back for a while: to pin memory anew takes as long as to copy it."""
        await anyio.sleep(self.linger_s)
        await self._close_unused(buffer, uses)

    async def _close_unused(self, buffer: SharedBuffer, uses: int) -> None:
        """Unmap what nobody has used since then."""

        async def close() -> None:
            async with self._opening:
                if buffer.uses == uses:
                    await self._close(buffer)
            self._notify()

        with CancelScope(shield=True):
            await unbroken(close)

    async def _close_idle(self, model: ModelId | None = None) -> int:
        """Unmap what nobody here uses; return how much it was. `_opening` is held."""
        idle = [b for b in self._buffers.values() if not b.users and model in (None, b.label.model)]
        for buffer in idle:
            await self._close(buffer)
        return len(idle)

    async def _close(self, buffer: SharedBuffer) -> None:
        if not buffer.users and self._buffers.get(buffer.label) is buffer:
            del self._buffers[buffer.label]
            with CancelScope(shield=True):
                await in_thread(buffer.close)

    async def _removed(self, model: ModelId) -> bool:
        """Remove a model, unless somebody uses it."""
        async with self._opening:
            await self._close_idle(model)
            if not any(buffer.label.model == model for buffer in self._buffers.values()):
                with suppress(Busy):
                    return await in_thread(partial(self._shelf.remove, model))
        return False

    def _notify(self) -> None:
        changed, self._changed = self._changed, anyio.Event()
        changed.set()


@dataclass(frozen=True, slots=True)
class _Known:
    """What a model's weights are by now, as far as this process was told."""

    manifest: Manifest
    digest: str
    labels: tuple[Label, ...]
    shards: frozenset[Shard]


async def _know(manifest: Manifest) -> _Known:
    """Take the manifest's digest, which takes a moment where it has many tensors."""
    digest = await to_thread.run_sync(digest_of, manifest)
    labels = tuple(Label.of(manifest, rank, digest) for rank in range(manifest.world_size))
    return _Known(manifest, digest, labels, frozenset(manifest.shards))


async def clear(directory: Path) -> tuple[int, int]:
    """Remove what no process uses or pins; return the bytes freed, and those that stayed.

    Raises:
        StoreError: the directory cannot be used.
    """
    return await patiently(SegmentShelf(directory, 0).clear)
