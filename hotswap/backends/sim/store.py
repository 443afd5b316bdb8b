"""`SimStore`: weights of any size behind simulated bandwidths, and a cache in front of them."""

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
from hotswap.model import HostChunk, Manifest, Shard
from hotswap.request import ModelId
from hotswap.store import WeightStore
from hotswap.view import Residency, StoreView, TierView

__all__ = ["SimStore", "sim_manifest"]

DISK = TierView(name="disk", bytes_per_s=5e9)
HOST = TierView(name="host", bytes_per_s=20e9)


def sim_manifest(model: str, weight_bytes: int | str, *, num_shards: int = 1, **facts: Any) -> Manifest:
    """Return the manifest of a made-up model in `num_shards` files; `facts` are fields of `Manifest`."""
    total = parse_bytes(weight_bytes)
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
    """Holds every model on a slow tier and keeps the most recently used ones, by budget, on a fast one.

    Bytes are real and deterministic (`sim_bytes`) but take no memory, so a simulated model may have hundreds
    of gigabytes. A chunk is invalid once the next is asked for: its memoryview is released then, so an
    engine that reads it late fails instead of reading what happens to lie there.

    Args:
        models: sizes by model id, or whole manifests (`sim_manifest`).
        home: the tier that holds everything.
        cache: the faster tier, filled by reading and by `prefetch`; `None` for none. Its `capacity_bytes` is
            the budget: the least recently used model that is not being read makes room.
        chunk_bytes: size of a chunk, the last of a shard excepted.
        shared: whether those who read from a tier at once share its bandwidth, chunk by chunk, and what they
            have yet to read is shown as queued; otherwise each reads as if alone. A model for which the cache
            has room is read once for all who want it meanwhile, and shown as loading: who comes later reads
            from the cache what has come, and the rest with the others. A store that shares belongs to one
            event loop.
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
        self._chunk_bytes = parse_bytes(chunk_bytes)
        self._homes = tuple(self._residency(model, home) for model in self._manifests)
        self._home_bytes = sum(entry.size_bytes for entry in self._homes)
        sizes = [shard.size_bytes for manifest in self._manifests.values() for shard in manifest.shards]
        self._content = SimContent(min(self._chunk_bytes, max(sizes, default=0)))
        self._cached: dict[ModelId, set[Shard]] = {}  # least recently used model first
        self._shared = shared
        self._rises: dict[Shard, _Rise] = {}
        self._readers: Counter[ModelId] = Counter()
        self._returned = anyio.Event()
        self._num_lent = 0

    @property
    def num_lent(self) -> int:
        """Chunks lent at this moment; 0 when nobody reads."""
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
        home = self._shown(self._home, self._home_bytes)
        if self._cache is None:
            return StoreView(tiers=(home,), residency=self._homes)
        whole = tuple(self._residency(model, self._cache) for model in self._cached if self._is_cached(model))
        cache = self._shown(self._cache, sum(map(_size, self._cached.values())))
        return StoreView(tiers=(cache, home), residency=whole + self._homes, loading=tuple(self._loading()))

    def _loading(self) -> Iterator[Residency]:
        left: Counter[ModelId] = Counter()
        for shard, rise in self._rises.items():
            left[shard.model] += shard.size_bytes - rise.come_bytes
        for model, size_bytes in left.items():
            if size_bytes:
                yield Residency(
                    model=model, tier=self._home.name, size_bytes=size_bytes, node=self._home.node
                )

    def _residency(self, model: ModelId, tier: TierView) -> Residency:
        size_bytes = self._manifests[model].weight_bytes
        return Residency(model=model, tier=tier.name, size_bytes=size_bytes, node=tier.node)

    def _shown(self, tier: TierView, used_bytes: int) -> TierView:
        return replace(tier, used_bytes=used_bytes, queued_bytes=self._links[tier.name].queued_bytes)

    async def prefetch(self, model: ModelId) -> None:
        await checkpoint()
        missing = set(self._manifest(model).shards) - self._cached.get(model, set())
        if self._cache is None or not missing:
            return
        with self._reading(model):  # so that what is cached of it stays
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
        with self._way(shard) as way:
            for size in self._pieces(shard.size_bytes):
                tier = await way.carry(size)
                if start + size == shard.size_bytes:
                    self._tee(shard)
                offset = shard.buffer_offset_bytes + start
                with self._lent(self._content.view(shard.model, offset, size)) as data:
                    yield HostChunk(offset_bytes=offset, data=data, tier=tier)
                start += size

    @contextlib.contextmanager
    def _way(self, shard: Shard) -> Generator[_Queued | _Follower]:
        """From where the bytes of a shard come: the cache, its rise there, or the home tier by itself."""
        cached = self._cache is not None and shard in self._cached.get(shard.model, ())
        if self._cache is not None and not cached and self._may_rise(shard):
            with self._rise_of(shard) as rise:
                yield _Follower(rise, self._links[self._cache.name])
            return
        tier = self._cache if self._cache is not None and cached else self._home
        with self._links[tier.name].queue(shard.size_bytes) as queued:
            yield queued

    def _may_rise(self, shard: Shard) -> bool:
        """Whether all who read a shard now may do so together."""
        with contextlib.suppress(TierFull):
            self._room_for(shard.model, {shard})
            return self._shared
        return False

    @contextlib.contextmanager
    def _rise_of(self, shard: Shard) -> Generator[_Rise]:
        rise = self._rises.get(shard)
        if rise is None:
            rise = self._rises[shard] = _Rise(self._links[self._home.name], shard.size_bytes)
        rise.num_readers += 1
        try:
            yield rise
        finally:
            rise.num_readers -= 1
            if not rise.num_readers:
                rise.close()
                del self._rises[shard]

    def _pieces(self, num_bytes: int) -> Iterator[int]:
        """The sizes of the chunks in which so many bytes are read."""
        for start in range(0, num_bytes, self._chunk_bytes):
            yield min(self._chunk_bytes, num_bytes - start)

    @contextlib.contextmanager
    def _lent(self, data: memoryview) -> Generator[memoryview]:
        self._num_lent += 1
        try:
            yield data
        finally:
            self._num_lent -= 1
            with contextlib.suppress(
                BufferError
            ):  # the borrower still looks at it; its error, and harmless here
                data.release()

    def _tee(self, shard: Shard) -> None:
        """Keep a shard that was read whole, if there is room."""
        if self._cache is not None:
            with contextlib.suppress(TierFull):
                self._keep(shard.model, {shard})

    def _keep(self, model: ModelId, shards: set[Shard]) -> None:
        """Put shards on the fast tier and make their model the most recently used."""
        held = self._cached.get(model, set())
        for victim in self._room_for(model, shards - held):
            del self._cached[victim]
        self._cached.pop(model, None)
        self._cached[model] = held | shards

    def _room_for(self, model: ModelId, shards: set[Shard]) -> list[ModelId]:
        """Return the models to drop, least recently used first, so that `shards` fit beside the rest.

        Raises:
            TierFull: they do not fit even so.
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


class _Link:
    """What a tier can give in a second, to everybody alike or to all together.

    A chunk on its way takes its time also where its reader has left.
    """

    def __init__(self, tier: str, bytes_per_s: float, shared: bool) -> None:
        self.tier = tier
        self.queued_bytes = 0
        self._bytes_per_s, self._shared = bytes_per_s, shared
        self._free_s = 0.0

    @contextlib.contextmanager
    def queue(self, num_bytes: int) -> Generator[_Queued]:
        """Have so many bytes to read while the block runs, or until they have come."""
        queued = _Queued(self, num_bytes if self._shared else 0)
        self.queued_bytes += queued.left_bytes
        try:
            yield queued
        finally:
            self.queued_bytes -= queued.left_bytes

    async def carry(self, num_bytes: int) -> None:
        """Return once so many bytes have come."""
        seconds = num_bytes / self._bytes_per_s
        if not self._shared:
            await anyio.sleep(seconds)
            return
        self._free_s = max(self._free_s, anyio.current_time()) + seconds
        await anyio.sleep_until(self._free_s)


class _Queued:
    """What one reader has yet to read."""

    def __init__(self, link: _Link, left_bytes: int) -> None:
        self.left_bytes = left_bytes
        self._link = link

    @property
    def tier(self) -> str:
        """From where they come."""
        return self._link.tier

    async def carry(self, num_bytes: int) -> str:
        """Return once so many of the bytes have come, from which tier."""
        await self._link.carry(num_bytes)
        came_bytes = min(num_bytes, self.left_bytes)
        self.left_bytes -= came_bytes
        self._link.queued_bytes -= came_bytes
        return self._link.tier


class _Rise:
    """A shard on its way to the cache: whoever wants the next chunk first brings it, for all.

    One that leaves meanwhile leaves the rest to the others.
    """

    def __init__(self, link: _Link, num_bytes: int) -> None:
        self.come_bytes = self.num_readers = 0
        self._stack = contextlib.ExitStack()
        self._queued = self._stack.enter_context(link.queue(num_bytes))
        self._under_way = False
        self._changed = anyio.Event()

    def close(self) -> None:
        """Nobody wants it any more."""
        self._stack.close()

    async def reach(self, num_bytes: int) -> str:
        """Return once so many of its bytes have come, from which tier."""
        while self.come_bytes < num_bytes:
            if self._under_way:
                await self._changed.wait()
                continue
            self._under_way = True
            try:
                await self._queued.carry(num_bytes - self.come_bytes)
                self.come_bytes = num_bytes
            finally:
                self._under_way = False
                self._changed.set()
                self._changed = anyio.Event()
        return self._queued.tier


class _Follower:
    """One of those who read a shard that rises."""

    def __init__(self, rise: _Rise, cache: _Link) -> None:
        self._rise, self._cache = rise, cache
        self._read_bytes = 0

    async def carry(self, num_bytes: int) -> str:
        """Return once so many more bytes have come, from which tier."""
        self._read_bytes += num_bytes
        if self._read_bytes > self._rise.come_bytes:
            return await self._rise.reach(self._read_bytes)
        await self._cache.carry(num_bytes)
        return self._cache.tier


def _manifests(sizes: Mapping[str, int | str]) -> list[Manifest]:
    return [sim_manifest(model, size) for model, size in sizes.items()]


def _size(shards: Iterable[Shard]) -> int:
    return sum(shard.size_bytes for shard in shards)
