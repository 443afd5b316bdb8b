"""`SharedStore`: the tier in host memory shared by the processes of a machine, as mapped segments."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Self

import anyio
from anyio import CancelScope, get_cancelled_exc_class, move_on_after
from anyio.abc import TaskGroup
from anyio.lowlevel import checkpoint

from hotswap.backends.memory import can_pin
from hotswap.backends.stores.host_tier import BufferReservation, HostTier, PendingDrops
from hotswap.backends.stores.locks import LOCK_LIMIT_S, pauses
from hotswap.backends.stores.reading import background
from hotswap.backends.stores.segment import Label, Segment, digest_of, is_nameable
from hotswap.backends.stores.segment_directory import Busy, SegmentDirectory
from hotswap.backends.stores.shared_buffer import (
    BusyWait,
    SharedBuffer,
    SharedBufferReservation,
    retry_while_busy,
)
from hotswap.checks import to_path
from hotswap.errors import ConfigError, ShardMissing, StoreError, TierFull
from hotswap.hardware import parse_bytes
from hotswap.model import Manifest, Shard
from hotswap.request import ModelId
from hotswap.view import Residency, StoreView, TierView
from hotswap.worker_threads import in_thread, run_in_thread, shielded

__all__ = ["SharedStore", "clear"]

_log = logging.getLogger("hotswap.stores")


class SharedStore(HostTier):
    """Weights in memory shared by all processes of a machine: each model is resident once.

    A `PinnedStore` for several processes: give each the same directory and budget. The first process that
    loads a model fills a segment; others that need it meanwhile wait, and map the same pages. If the first
    one dies, the next resumes the fill. Engines on a CPU are lent the pages themselves, read-only. A process
    that computes on a CUDA device by torch pins the memory that it has mapped. Linux only.

    `budget` bounds the bytes of all segments together. A model that a living process lends or pins stays;
    of the others the least recently used is evicted first. Segments outlive the processes, so that a restart
    finds its models warm, until they are evicted or `clear` removes them. A process reads a model's manifest
    from the tier below once, so a restart never uses weights of an earlier conversion. While all ranks are
    resident it does not read the manifest again: a model that is replaced under a running process stays as it
    was there until it is dropped or evicted.

    A forked child of a process that has this open shares its locks; start processes with `spawn` instead.

    Args:
        directory: Where the segments lie: a directory of your own, in memory, such as one in `/dev/shm`.
        budget: Bytes, the same for all processes that share the directory.
        name: The tier's name.
        chunk_bytes: Bytes of one chunk, for readers that copy.
        linger_s: How long memory that was pinned for a device stays mapped after its last use.
        lock_limit_s: How long to wait while another process has the directory locked, until `StoreBusy`.
    """

    def __init__(
        self,
        directory: str | Path,
        budget: int | str,
        *,
        name: str = "shared",
        chunk_bytes: int | str = "256 MiB",
        linger_s: float = 2.0,
        lock_limit_s: float = LOCK_LIMIT_S,
    ) -> None:
        super().__init__(name, chunk_bytes)
        self.directory = to_path(ConfigError, "directory", directory)
        self.linger_s = linger_s
        self._lock_limit_s = lock_limit_s
        self._segments = SegmentDirectory(self.directory, parse_bytes(budget, "budget"))
        self._known: dict[ModelId, _Known] = {}
        self._buffers: dict[Label, SharedBuffer] = {}
        self._opening = anyio.Lock()
        self._drops = PendingDrops()
        self._changed = anyio.Event()
        self._tasks: TaskGroup | None = None

    @asynccontextmanager
    async def __asynccontextmanager__(self) -> AsyncGenerator[Self]:
        """Join the processes that share the directory; at the end unmap all, and keep the segments.

        Raises:
            ConfigError: the processes there have another budget, the directory is another user's, or this
                is not Linux.
            StoreError: the directory cannot be used.
        """
        try:
            for path in await retry_while_busy(self._segments.open, self._lock_limit_s):
                _log.warning("Removed %r: it was incomplete, and no process was filling it.", str(path))
            async with background() as self._tasks:
                try:
                    yield self
                finally:
                    self._tasks = None
        finally:
            with CancelScope(shield=True):
                await shielded(self._close_all)

    async def _close_all(self) -> None:
        async with self._opening:
            await self._close_idle()
        await run_in_thread(self._segments.close)

    async def manifest(self, model: ModelId) -> Manifest:
        await checkpoint()
        known = self._known.get(model)
        if known is None or not self._is_whole(known):
            raise ShardMissing(f"Tier {self.name!r} does not hold model {model!r}; prefetch it.")
        return known.manifest

    @asynccontextmanager
    async def reserve(self, manifest: Manifest, rank: int) -> AsyncGenerator[BufferReservation]:
        await self.expect(manifest)
        if not is_nameable(manifest.model):
            raise TierFull(
                f"The id {manifest.model!r} is no plain file name, so {self.name!r} refuses the model. "
                "Use a PinnedStore, or give the model an id of letters, digits, '.', '_' and '-'."
            )
        if not all(shard.checksum for shard in manifest.shards):
            raise TierFull(
                f"Model {manifest.model!r} has shards without checksums, so no other process could tell its "
                f"weights from later ones; {self.name!r} refuses it. Use a PinnedStore."
            )
        async with self._in_use(manifest, rank, make=True) as buffer:
            assert buffer is not None
            yield SharedBufferReservation(buffer)

    def holds(self, shard: Shard) -> bool:
        known = self._known.get(shard.model)
        if known is None or shard not in known.shards:
            return False
        label = known.labels[shard.rank]
        buffer = self._buffers.get(label)
        return buffer.has(shard) if buffer is not None else self._segments.has(label)

    async def expect(self, manifest: Manifest) -> None:
        known = self._known.get(manifest.model)
        if is_nameable(manifest.model) and (known is None or known.manifest != manifest):
            self._known[manifest.model] = await _known(manifest)

    async def drop(self, model: ModelId) -> None:
        with self._drops.waiting(model) as dropped:
            for pause_s in pauses(most_s=0.25):
                if dropped.is_set():
                    return
                if await self._try_remove(model):
                    self.keep(model)
                    return
                with move_on_after(pause_s):
                    await self._changed.wait()

    def keep(self, model: ModelId) -> None:
        if self._drops.end(model):
            self._notify()

    def pin(self, model: ModelId) -> None:
        self._segments.pin(model)

    def unpin(self, model: ModelId) -> None:
        self._segments.unpin(model)

    async def clear(self) -> int:
        """Remove models that no process uses and no other one pins, and return the bytes freed."""
        async with self._opening:
            await self._close_idle()
        freed_bytes, _ = await retry_while_busy(self._segments.clear, self._lock_limit_s)
        return freed_bytes

    def view(self) -> StoreView:
        used_bytes, labels = self._segments.snapshot()
        tier = TierView(
            name=self.name,
            used_bytes=used_bytes,
            capacity_bytes=self._segments.capacity_bytes,
            bytes_per_s=self._bandwidth.bytes_per_s,
        )
        return StoreView(tiers=(tier,), residency=tuple(self._residency(labels)))

    @property
    def num_lent(self) -> int:
        """How many readers and fills of this process use a segment; 0 when none is open."""
        return sum(buffer.users for buffer in self._buffers.values())

    def __repr__(self) -> str:
        used, capacity = self._segments.snapshot()[0], self._segments.capacity_bytes
        return (
            f"<SharedStore {str(self.directory)!r} [{used} of {capacity} bytes, {self.num_lent} in use here]>"
        )

    def _residency(self, labels: tuple[Label, ...]) -> Iterator[Residency]:
        """The models with all ranks resident; of a model whose manifest is known, in that conversion only."""
        ranks: dict[tuple[ModelId, str], list[Label]] = {}
        for label in labels:
            known = self._known.get(label.model)
            if known is None or known.digest == label.digest:
                ranks.setdefault((label.model, label.digest), []).append(label)
        seen: set[ModelId] = set()
        for (model, _), group in ranks.items():
            if len(group) == group[0].world_size and model not in seen:
                seen.add(model)
                yield Residency(model=model, tier=self.name, size_bytes=group[0].weight_bytes)

    def _is_whole(self, known: _Known) -> bool:
        for label in known.labels:
            buffer = self._buffers.get(label)
            if not (buffer.whole if buffer is not None else self._segments.has(label)):
                return False
        return True

    # ------------------------------------------------------------------------------------ mapped segments

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
        """Use a mapped rank while the block runs, created if `make`; `None` if it is not resident."""
        if not is_nameable(manifest.model):
            yield None
            return
        known = self._known.get(manifest.model)
        if known is None or known.manifest != manifest:
            known = await _known(manifest)
        buffer = await self._use(known, rank, make=make)
        try:
            if buffer is not None:
                async with buffer.preparing:
                    await buffer.prepare(self.directory)
            yield buffer
        finally:
            if buffer is not None:
                await self._release(buffer)

    async def _use(self, known: _Known, rank: int, *, make: bool) -> SharedBuffer | None:
        label = known.labels[rank]
        wait = BusyWait(self._lock_limit_s)
        while True:
            async with self._opening:
                try:
                    if label not in self._buffers:
                        await self._map(known, rank, make=make)
                except Busy as exc:
                    busy = exc
                else:
                    buffer = self._buffers.get(label)
                    if buffer is not None:
                        buffer.users += 1
                        buffer.uses += 1
                    return buffer
            await wait.pause(busy)

    async def _map(self, known: _Known, rank: int, *, make: bool) -> None:
        """Map a rank that exists or is created; unmap it again if cancelled. `_opening` is held."""
        label = known.labels[rank]

        async def enter() -> None:
            segment = await self._attach(label, make=make)
            if segment is not None:
                self._buffers[label] = SharedBuffer(known.manifest, rank, segment)

        try:
            await shielded(enter)
        except get_cancelled_exc_class():
            if label in self._buffers:
                await self._close(self._buffers[label])
            raise

    async def _attach(self, label: Label, *, make: bool) -> Segment | None:
        if self._tasks is None:
            raise StoreError(f"{self!r} is not open; use it inside `async with`.")
        if not make:
            return await run_in_thread(partial(self._segments.attach, label, writable=can_pin()))
        attach_or_create = partial(self._segments.attach_or_create, label, writable=can_pin())
        try:
            return await run_in_thread(attach_or_create)
        except TierFull:
            if not await self._close_idle():
                raise
        return await run_in_thread(attach_or_create)

    async def _release(self, buffer: SharedBuffer) -> None:
        """End one use; the last one unmaps, and removes a segment that is not kept."""
        buffer.users -= 1
        if buffer.users:
            return
        if buffer.pinned and self._tasks is not None:
            self._tasks.start_soon(self._linger, buffer, buffer.uses)
        else:
            await self._close_unused(buffer, buffer.uses)

    async def _linger(self, buffer: SharedBuffer, uses: int) -> None:
        """Unmap after a pause without use: pinning memory again takes as long as copying it."""
        await anyio.sleep(self.linger_s)
        await self._close_unused(buffer, uses)

    async def _close_unused(self, buffer: SharedBuffer, uses: int) -> None:
        """Unmap a buffer unless it was used since."""

        async def close() -> None:
            async with self._opening:
                if buffer.uses == uses:
                    await self._close(buffer)
            self._notify()

        with CancelScope(shield=True):
            await shielded(close)

    async def _close_idle(self, model: ModelId | None = None) -> int:
        """Unmap the buffers without users; return their number. `_opening` is held."""
        idle = [b for b in self._buffers.values() if not b.users and model in (None, b.label.model)]
        for buffer in idle:
            await self._close(buffer)
        return len(idle)

    async def _close(self, buffer: SharedBuffer) -> None:
        if not buffer.users and self._buffers.get(buffer.label) is buffer:
            del self._buffers[buffer.label]
            with CancelScope(shield=True):
                await in_thread(buffer.close)

    async def _try_remove(self, model: ModelId) -> bool:
        """Remove a model unless it is in use; return whether it was removed."""
        async with self._opening:
            await self._close_idle(model)
            if not any(buffer.label.model == model for buffer in self._buffers.values()):
                with suppress(Busy):
                    return await in_thread(partial(self._segments.remove, model))
        return False

    def _notify(self) -> None:
        changed, self._changed = self._changed, anyio.Event()
        changed.set()


@dataclass(frozen=True, slots=True)
class _Known:
    """The current manifest of a model, as this process knows it, with its digest and labels."""

    manifest: Manifest
    digest: str
    labels: tuple[Label, ...]
    shards: frozenset[Shard]


async def _known(manifest: Manifest) -> _Known:
    """Compute a manifest's digest and labels; in a thread, because many tensors take a moment."""
    digest = await run_in_thread(digest_of, manifest)
    labels = tuple(Label.of(manifest, rank, digest) for rank in range(manifest.world_size))
    return _Known(manifest, digest, labels, frozenset(manifest.shards))


async def clear(directory: Path) -> tuple[int, int]:
    """Remove models that no process uses or pins; return the bytes freed, and those kept.

    Raises:
        StoreError: the directory cannot be used.
    """
    return await retry_while_busy(SegmentDirectory(directory, 0).clear)
