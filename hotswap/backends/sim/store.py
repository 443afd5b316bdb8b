"""`SimStore`: weights of any size behind simulated bandwidths, with a cache in front of them."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import pairwise
from typing import Any

import anyio
from anyio.lowlevel import checkpoint

from hotswap.backends.sim.content import SimContent
from hotswap.errors import ShardMissing, TierFull
from hotswap.hardware import parse_bytes
from hotswap.loop_time import current_time, sleep, sleep_until
from hotswap.model import HostChunk, Manifest, Shard
from hotswap.request import ModelId
from hotswap.store import WeightStore
from hotswap.view import Residency, StoreView, TierView

__all__ = ["SimStore", "sim_manifest"]

DISK = TierView(name="disk", bytes_per_s=5e9)
HOST = TierView(name="host", bytes_per_s=20e9)


def sim_manifest(model: str, weight_bytes: int | str, *, num_shards: int = 1, **facts: Any) -> Manifest:
    """Return the manifest of a made-up model in `num_shards` files; `facts` are fields of `Manifest`."""
    total = parse_bytes(weight_bytes, "weight_bytes")
    edges = [total * number // num_shards for number in range(num_shards + 1)]
    shards = tuple(
        Shard(
            model=ModelId(model),
            rank=0,
            file=f"{number}.bin",
            file_offset_bytes=0,
            buffer_offset_bytes=start,
            size_bytes=end - start,
            checksum=f"sim:{model}",
        )
        for number, (start, end) in enumerate(pairwise(edges))
    )
    return Manifest(model=ModelId(model), shards=shards, buffer_bytes=total, **facts)


class SimStore(WeightStore):
    """Holds every model on a slow tier, and caches the most recently used ones on a fast one.

    Bytes are deterministic (`sim_bytes`) and take no memory, so a simulated model may have hundreds of
    gigabytes. A chunk is valid until the next is asked for: its memoryview is released then, so an engine
    that reads it late fails.

    Args:
        models: sizes by model id, or whole manifests (`sim_manifest`).
        home: the tier that holds everything.
        cache: the faster tier, filled by reading and by `prefetch`; `None` for none. Its `capacity_bytes` is
            the budget: the least recently used models that are not being read are dropped.
        chunk_bytes: size of a chunk, the last of a shard excepted.
        shared: whether concurrent reads from a tier share its bandwidth, chunk by chunk, and the view counts
            their bytes as queued; otherwise each read has the whole bandwidth. A model that fits the cache is
            then read from the home tier once for all concurrent reads, and the view has it as loading: a read
            that begins later takes the first bytes from the cache, and the rest together with the others. A
            store that shares belongs to one event loop.
    """

    def __init__(
        self,
        models: Mapping[str, int | str] | Sequence[Manifest],
        *,
        home: TierView = DISK,
        cache: TierView | None = HOST,
        chunk_bytes: int | str = "64 MiB",
        shared: bool = False,
    ) -> None:
        manifests = _manifests(models) if isinstance(models, Mapping) else models
        self._manifests = {manifest.model: manifest for manifest in manifests}
        self._home = home
        self._cache = cache
        self._links = {
            tier.name: _Link(tier.name, tier.bytes_per_s, shared) for tier in (home, cache) if tier
        }
        self._chunk_bytes = parse_bytes(chunk_bytes, "chunk_bytes")
        self._homes = tuple(self._residency(model, home) for model in self._manifests)
        self._home_bytes = sum(entry.size_bytes for entry in self._homes)
        sizes = [shard.size_bytes for manifest in self._manifests.values() for shard in manifest.shards]
        self._content = SimContent(min(self._chunk_bytes, max(sizes, default=0)))
        self._cached: dict[ModelId, set[Shard]] = {}  # least recently used model first
        self._shared = shared
        self._loads: dict[Shard, _Load] = {}
        self._readers: Counter[ModelId] = Counter()
        self._returned = anyio.Event()
        self._num_lent = 0

    @property
    def num_lent(self) -> int:
        """Chunks lent at this moment; 0 when nothing is read."""
        return self._num_lent

    async def manifest(self, model: ModelId) -> Manifest:
        await checkpoint()
        return self._manifest(model)

    @asynccontextmanager
    async def open(self, shard: Shard) -> AsyncGenerator[AsyncIterator[HostChunk]]:
        if shard not in self._manifest(shard.model).shards:
            raise ShardMissing(
                f"Model {shard.model!r} has no shard like {shard.file!r}; ask for its manifest again."
            )
        with self._reading(shard.model):
            async with contextlib.aclosing(self._lend(shard)) as chunks:
                yield chunks

    def view(self) -> StoreView:
        home = self._tier_view(self._home, self._home_bytes)
        if self._cache is None:
            return StoreView(tiers=(home,), residency=self._homes)
        whole = tuple(self._residency(model, self._cache) for model in self._cached if self._is_cached(model))
        cache = self._tier_view(self._cache, sum(map(_size, self._cached.values())))
        return StoreView(tiers=(cache, home), residency=whole + self._homes, loading=tuple(self._loading()))

    def _loading(self) -> Iterator[Residency]:
        left: Counter[ModelId] = Counter()
        for shard, load in self._loads.items():
            left[shard.model] += shard.size_bytes - load.loaded_bytes
        for model, size_bytes in left.items():
            if size_bytes:
                yield Residency(
                    model=model, tier=self._home.name, size_bytes=size_bytes, node=self._home.node
                )

    def _residency(self, model: ModelId, tier: TierView) -> Residency:
        size_bytes = self._manifests[model].weight_bytes
        return Residency(model=model, tier=tier.name, size_bytes=size_bytes, node=tier.node)

    def _tier_view(self, tier: TierView, used_bytes: int) -> TierView:
        return replace(tier, used_bytes=used_bytes, queued_bytes=self._links[tier.name].queued_bytes)

    async def prefetch(self, model: ModelId) -> None:
        await checkpoint()
        missing = set(self._manifest(model).shards) - self._cached.get(model, set())
        if self._cache is None or not missing:
            return
        with self._reading(model):  # so that its cached shards stay
            self._room_for(model, missing)
            with self._links[self._home.name].queue(_size(missing)) as queued:
                for size in self._pieces(_size(missing)):
                    await queued.carry(size)
            self._keep(model, missing)

    async def drop(self, model: ModelId) -> None:
        await checkpoint()
        self._manifest(model)
        while self._readers[model]:
            await self._returned.wait()
        self._cached.pop(model, None)

    def __repr__(self) -> str:
        tiers = ", ".join(f"{tier.name} {tier.used_bytes} bytes" for tier in self.view().tiers)
        return f"<SimStore [{len(self._manifests)} models | {tiers}]>"

    def _manifest(self, model: ModelId) -> Manifest:
        try:
            return self._manifests[model]
        except KeyError:
            raise ShardMissing(
                f"The store has no model {model!r}; it has {', '.join(map(repr, self._manifests)) or 'none'}."
            ) from None

    @contextlib.contextmanager
    def _reading(self, model: ModelId) -> Generator[None]:
        self._readers[model] += 1
        try:
            yield
        finally:
            self._readers[model] -= 1
            self._returned.set()
            self._returned = anyio.Event()

    async def _lend(self, shard: Shard) -> AsyncGenerator[HostChunk]:
        start = 0
        with self._source(shard) as source:
            for size in self._pieces(shard.size_bytes):
                tier = await source.carry(size)
                if start + size == shard.size_bytes:
                    self._cache_read(shard)
                offset = shard.buffer_offset_bytes + start
                data = self._content.view(shard.model, offset, size)
                # Without context managers: a simulation of ten thousand engines lends a million chunks.
                self._num_lent += 1
                try:
                    yield HostChunk(offset_bytes=offset, data=data, tier=tier)
                finally:
                    self._num_lent -= 1
                    _release(data)
                start += size

    @contextlib.contextmanager
    def _source(self, shard: Shard) -> Generator[_Queued | _SharedRead]:
        """Return what a shard is read from: the cache, a load into it that reads share, or the home tier."""
        cached = self._cache is not None and shard in self._cached.get(shard.model, ())
        if self._cache is not None and not cached and self._may_share(shard):
            with self._load_of(shard) as load:
                yield _SharedRead(load, self._links[self._cache.name])
            return
        tier = self._cache if self._cache is not None and cached else self._home
        with self._links[tier.name].queue(shard.size_bytes) as queued:
            yield queued

    def _may_share(self, shard: Shard) -> bool:
        """Whether concurrent reads of a shard share one load into the cache."""
        with contextlib.suppress(TierFull):
            self._room_for(shard.model, {shard})
            return self._shared
        return False

    @contextlib.contextmanager
    def _load_of(self, shard: Shard) -> Generator[_Load]:
        load = self._loads.get(shard)
        if load is None:
            load = self._loads[shard] = _Load(self._links[self._home.name], shard.size_bytes)
        load.num_readers += 1
        try:
            yield load
        finally:
            load.num_readers -= 1
            if not load.num_readers:
                load.close()
                del self._loads[shard]

    def _pieces(self, num_bytes: int) -> Iterator[int]:
        """The sizes of the chunks in which so many bytes are read."""
        for start in range(0, num_bytes, self._chunk_bytes):
            yield min(self._chunk_bytes, num_bytes - start)

    def _cache_read(self, shard: Shard) -> None:
        """Cache a shard that was read to its end, if there is room."""
        if self._cache is not None:
            with contextlib.suppress(TierFull):
                self._keep(shard.model, {shard})

    def _keep(self, model: ModelId, shards: set[Shard]) -> None:
        """Cache shards, and make their model the most recently used."""
        held = self._cached.get(model, set())
        for victim in self._room_for(model, shards - held):
            del self._cached[victim]
        self._cached.pop(model, None)
        self._cached[model] = held | shards

    def _room_for(self, model: ModelId, shards: set[Shard]) -> list[ModelId]:
        """Return the models to drop from the cache, least recently used first, so that `shards` fit.

        Raises:
            TierFull: they do not fit even then.
        """
        if self._cache is None or self._cache.capacity_bytes is None:
            return []
        excess = sum(map(_size, self._cached.values())) + _size(shards) - self._cache.capacity_bytes
        victims: list[ModelId] = []
        for other, held in self._cached.items():
            if excess > 0 and other != model and not self._readers[other]:
                victims.append(other)
                excess -= _size(held)
        if excess > 0:
            raise TierFull(
                f"Model {model!r} exceeds what tier {self._cache.name!r} can free by {excess} bytes; give "
                "it a larger capacity_bytes, or wait until what it lends is returned."
            )
        return victims

    def _is_cached(self, model: ModelId) -> bool:
        return len(self._cached[model]) == len(self._manifests[model].shards)


def _release(data: memoryview) -> None:
    """End a loan; a reader that still has a view of the bytes sees these and no more."""
    try:
        data.release()
    except BufferError:
        return


class _Link:
    """The bandwidth of a tier, for each read alone or shared by all.

    A chunk that was begun takes its time, also if its read is cancelled.
    """

    def __init__(self, tier: str, bytes_per_s: float, shared: bool) -> None:
        self.tier = tier
        self.queued_bytes = 0
        self._bytes_per_s, self._shared = bytes_per_s, shared
        self._free_s = 0.0

    @contextlib.contextmanager
    def queue(self, num_bytes: int) -> Generator[_Queued]:
        """Count bytes as queued while the block runs, or until they have been read."""
        queued = _Queued(self, num_bytes if self._shared else 0)
        self.queued_bytes += queued.left_bytes
        try:
            yield queued
        finally:
            self.queued_bytes -= queued.left_bytes

    async def carry(self, num_bytes: int) -> None:
        """Return once so many bytes have been read."""
        seconds = num_bytes / self._bytes_per_s
        if not self._shared:
            await sleep(seconds)
            return
        self._free_s = max(self._free_s, current_time()) + seconds
        await sleep_until(self._free_s)


class _Queued:
    """A read of one tier, and how many of its bytes are left."""

    def __init__(self, link: _Link, left_bytes: int) -> None:
        self.left_bytes = left_bytes
        self._link = link

    @property
    def tier(self) -> str:
        """The name of the tier."""
        return self._link.tier

    async def carry(self, num_bytes: int) -> str:
        """Return the tier once so many more bytes have been read from it."""
        await self._link.carry(num_bytes)
        read_bytes = min(num_bytes, self.left_bytes)
        self.left_bytes -= read_bytes
        self._link.queued_bytes -= read_bytes
        return self._link.tier


class _Load:
    """A load of a shard into the cache: the read that needs the next chunk first loads it, for all.

    If that read is cancelled, another goes on.
    """

    def __init__(self, link: _Link, num_bytes: int) -> None:
        self.loaded_bytes = self.num_readers = 0
        self._stack = contextlib.ExitStack()
        self._queued = self._stack.enter_context(link.queue(num_bytes))
        self._under_way = False
        self._changed = anyio.Event()

    def close(self) -> None:
        """Give the bytes up that are still queued: no read is left."""
        self._stack.close()

    async def reach(self, num_bytes: int) -> str:
        """Return the tier that is read once its first `num_bytes` bytes are loaded."""
        while self.loaded_bytes < num_bytes:
            if self._under_way:
                await self._changed.wait()
                continue
            self._under_way = True
            try:
                await self._queued.carry(num_bytes - self.loaded_bytes)
                self.loaded_bytes = num_bytes
            finally:
                self._under_way = False
                self._changed.set()
                self._changed = anyio.Event()
        return self._queued.tier


class _SharedRead:
    """One of the reads that share a load."""

    def __init__(self, load: _Load, cache: _Link) -> None:
        self._load, self._cache = load, cache
        self._read_bytes = 0

    async def carry(self, num_bytes: int) -> str:
        """Return the tier once so many more bytes have been read from it."""
        self._read_bytes += num_bytes
        if self._read_bytes > self._load.loaded_bytes:
            return await self._load.reach(self._read_bytes)
        await self._cache.carry(num_bytes)
        return self._cache.tier


def _manifests(sizes: Mapping[str, int | str]) -> list[Manifest]:
    return [sim_manifest(model, size) for model, size in sizes.items()]


def _size(shards: Iterable[Shard]) -> int:
    return sum(shard.size_bytes for shard in shards)
