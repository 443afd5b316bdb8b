"""Several tiers as one store: read from the fastest that has it, keep what was read in the one above."""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import AsyncGenerator, AsyncIterator, Generator, Iterable
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from typing import Self

from anyio import CancelScope
from anyio.abc import TaskGroup

from hotswap.backends.stores.descend import Descending, descending
from hotswap.backends.stores.fill import Fill, Follower, telling
from hotswap.backends.stores.host_tier import HostTier
from hotswap.backends.stores.link import Link
from hotswap.backends.stores.reading import background
from hotswap.backends.stores.unbroken import unbroken
from hotswap.errors import ConfigError, ShardMissing, StoreError, TierFull
from hotswap.model import HostBuffer, HostChunk, Manifest, Model, Shard
from hotswap.request import ModelId
from hotswap.store import SupportsImport, SupportsTokenizer, WeightStore
from hotswap.text import Tokenizer
from hotswap.view import Residency, StoreView

__all__ = ["TieredStore"]

_log = logging.getLogger("hotswap.stores")


class TieredStore(WeightStore):
    """Tiers, fastest first: `TieredStore(PinnedStore("200 GiB"), NvmeStore("/var/cache/hotswap"))`.

    A shard is lent by the first tier that holds it. If the first tier is host memory (a `PinnedStore` or a
    `SharedStore`), a shard read from below is written into it on the way, and lent from there: that is the
    only copy in host memory, made once however many engines ask at the same time. Where the budget does not
    allow it, or host memory fails in another way, which the log says, the shard passes by. A tier that fails
    before its first chunk is passed over for the next; one that fails later raises. What is read from below a
    `NvmeStore` is written there on the way (see `descend`).

    `prefetches` models are prefetched from a tier at a time, and none while a load reads from it.
    """

    def __init__(self, *tiers: WeightStore, prefetches: int = 1) -> None:
        names = [tier.name for store in tiers for tier in store.view().tiers]
        if not tiers or len(set(names)) != len(names):
            raise ConfigError(f"The tiers are {names}; give one or more, each with its own name.")
        if any(isinstance(tier, HostTier) for tier in tiers[1:]):
            raise ConfigError("Host memory is the fastest tier; name it first, and once.")
        if prefetches < 1:
            raise ConfigError(f"prefetches is {prefetches}; give 1 or more.")
        self.tiers = tiers
        self._host = tiers[0] if isinstance(tiers[0], HostTier) else None
        self._below = descending(tiers if self._host is None else tiers[1:])
        self._manifests: dict[ModelId, Manifest] = {}
        self._links: defaultdict[str, Link] = defaultdict(lambda: Link(prefetches))
        self._due: list[Manifest] = []
        self._fills: dict[Shard, Fill] = {}
        self._told: dict[ModelId, str] = {}
        self._tasks: TaskGroup | None = None

    @asynccontextmanager
    async def __asynccontextmanager__(self) -> AsyncGenerator[Self]:
        """Open the tiers, and close them when every read has ended."""
        async with AsyncExitStack() as stack:
            for tier in self.tiers:
                await stack.enter_async_context(tier)
            for tier in self._below:
                if isinstance(tier, Descending):
                    await stack.enter_async_context(tier)
            async with background() as self._tasks:
                try:
                    yield self
                finally:
                    self._tasks = None

    async def manifest(self, model: ModelId) -> Manifest:
        manifest = await self._manifest(self.tiers, model)
        self._manifests[model] = manifest
        if self._host is not None:
            await self._host.expect(manifest)
        return manifest

    @asynccontextmanager
    async def open(self, shard: Shard) -> AsyncGenerator[AsyncIterator[HostChunk]]:
        async with AsyncExitStack() as stack:
            yield await self._enter(stack, shard)

    @asynccontextmanager
    async def lend(self, manifest: Manifest, rank: int = 0) -> AsyncGenerator[HostBuffer | None]:
        """Lend a rank from the host tier, read into it first if need be; `None` if it cannot have it."""
        async with AsyncExitStack() as stack:
            yield None if self._host is None else await self._enter_lent(stack, self._host, manifest, rank)

    async def prefetch(self, model: ModelId, *, priority: int = 0) -> None:
        """Bring the model to the host tier, without one to the disk tier: see `SupportsPrefetch`.

        Of several that wait, the one with the highest `priority` goes first; one whose model is being loaded
        goes at once. While it waits it takes no room. Cancel it as any call.
        """
        manifest = await self.manifest(model)
        if self._host is None:
            await self._bring_to_disk(model)
            return
        self._host.keep(model)
        async with AsyncExitStack() as stack:
            if not all(map(self._host.holds, manifest.shards)):
                await stack.enter_async_context(self._link(model).turn(model, priority))
            ranks = range(manifest.world_size)
            holds = [await stack.enter_async_context(self._host.hold(manifest, rank)) for rank in ranks]
            await self._complete(self._host, manifest, manifest.shards)
            for hold in holds:
                hold.keep()

    async def _bring_to_disk(self, model: ModelId) -> None:
        """Copy the model from below the `NvmeStore` to it, if there is one and it does not lie there."""
        for tier in self._below:
            with suppress(ShardMissing):
                await tier.manifest(model)
                if isinstance(tier, Descending):
                    await tier.fetch(model)
                return

    async def drop(self, model: ModelId) -> None:
        if self._host is not None:
            await self._host.drop(model)

    def pin(self, model: ModelId) -> None:
        """Keep the model on the host tier from when it is there (`prefetch` brings it) until `unpin`."""
        if self._host is not None:
            self._host.pin(model)

    def unpin(self, model: ModelId) -> None:
        """Let the host tier push the model out again when it needs room."""
        if self._host is not None:
            self._host.unpin(model)

    async def import_model(self, model: Model) -> None:
        for tier in self.tiers:
            if isinstance(tier, SupportsImport):
                return await tier.import_model(model)
        raise ConfigError(f"No tier of {self!r} can take in model {model.id!r}; add a NvmeStore.")

    async def tokenizer(self, model: ModelId) -> Tokenizer | None:
        for tier in self.tiers:
            if isinstance(tier, SupportsTokenizer) and (found := await tier.tokenizer(model)) is not None:
                return found
        return None

    def view(self) -> StoreView:
        views = [tier.view() for tier in self.tiers]
        due = {manifest.model: manifest for manifest in self._due}
        rising = tuple(rise for manifest in due.values() if (rise := self._rise(manifest)).size_bytes)
        queued: Counter[str] = Counter()
        for entry in rising:
            queued[entry.tier] += entry.size_bytes
        return StoreView(
            tiers=tuple(
                replace(tier, queued_bytes=max(tier.queued_bytes, queued[tier.name]))
                for view in views
                for tier in view.tiers
            ),
            residency=tuple(entry for view in views for entry in view.residency),
            rising=rising,
        )

    @property
    def num_lent(self) -> int:
        """How much the tiers have lent, as they count it; 0 when nothing is open."""
        return sum(getattr(tier, "num_lent", 0) for tier in self.tiers)

    def __repr__(self) -> str:
        return f"<TieredStore {', '.join(map(repr, self.tiers))}>"

    # ------------------------------------------------------------------------------------------- reading

    async def _manifest(self, tiers: tuple[WeightStore, ...], model: ModelId) -> Manifest:
        failure: StoreError | None = None
        for tier in tiers:
            try:
                return await tier.manifest(model)
            except StoreError as exc:
                failure = telling(failure, exc)
        raise failure or ShardMissing(f"No tier holds model {model!r}.")

    async def _enter(self, stack: AsyncExitStack, shard: Shard) -> AsyncIterator[HostChunk]:
        if self._host is not None:
            try:
                return await stack.enter_async_context(self._host.open(shard))
            except ShardMissing:
                pass
            except StoreError as exc:
                self._pass_by(shard.model, exc)
            if (manifest := await self._manifest_of(shard)) is not None:
                rising = await stack.enter_async_context(self._rising(self._host, shard, manifest))
                if rising is not None:
                    return rising
        return await self._enter_below(stack, shard)

    async def _enter_lent(
        self, stack: AsyncExitStack, host: HostTier, manifest: Manifest, rank: int
    ) -> HostBuffer | None:
        if self._tasks is None:
            raise self._not_open()
        async with AsyncExitStack() as reserved:
            try:
                buffer = await stack.enter_async_context(host.lend(manifest, rank))
                if buffer is not None:
                    return buffer
                hold = await reserved.enter_async_context(host.hold(manifest, rank))
            except StoreError as exc:
                self._pass_by(manifest.model, exc)
                return None
            with self._link(manifest.model).load(manifest.model):
                tier = await self._complete(host, manifest, manifest.shards_of(rank))
            hold.keep()
            buffer = await stack.enter_async_context(host.lend(manifest, rank))
        return replace(buffer, tier=tier) if buffer is not None else None

    async def _enter_below(self, stack: AsyncExitStack, shard: Shard) -> AsyncIterator[HostChunk]:
        """Open the first tier that gives a first chunk."""
        failure: StoreError | None = None
        for tier in self._below:
            async with AsyncExitStack() as attempt:
                try:
                    chunks = await attempt.enter_async_context(tier.open(shard))
                    first = await anext(chunks, None)
                except StoreError as exc:
                    failure = telling(failure, exc)
                    continue
                stack.push_async_exit(attempt.pop_all())
                return _Begun(first, chunks)
        raise failure or ShardMissing(f"No tier holds {shard.file!r} of model {shard.model!r}.")

    async def _manifest_of(self, shard: Shard) -> Manifest | None:
        """The manifest that names the shard; `None` for a shard of a model that was converted anew since."""
        manifest = self._manifests.get(shard.model)
        if manifest is None or shard not in manifest.shards:
            with suppress(StoreError):
                manifest = await self._manifest(self._below, shard.model)
        return manifest if manifest is not None and shard in manifest.shards else None

    def _pass_by(self, model: ModelId, why: Exception) -> None:
        """Say, once for each reason, that a load goes on without the host tier; that it is full is usual."""
        if not isinstance(why, TierFull) and self._told.get(model) != str(why):
            self._told[model] = str(why)
            _log.warning("Model %r passes by %r: %s", model, self._host, why)

    def _not_open(self) -> StoreError:
        return StoreError(f"{self!r} is not open; use it inside `async with`.")

    # -------------------------------------------------------------------------- filling the host tier

    @asynccontextmanager
    async def _rising(
        self, host: HostTier, shard: Shard, manifest: Manifest
    ) -> AsyncGenerator[Follower | None]:
        """Follow the shard's way up; `None` if the host tier has no room for it."""
        async with self._following(host, shard, manifest) as fill:
            fill.wanted = True
            while not fill.admitted and fill.error is None:
                await fill.changed()
            follower = Follower(fill, host.chunk_bytes) if fill.admitted else None
            if follower is None and fill.error is not None:
                self._pass_by(shard.model, fill.error)
            try:
                yield follower
            finally:
                if follower is not None:
                    follower.close()

    async def _complete(self, host: HostTier, manifest: Manifest, shards: Iterable[Shard]) -> str:
        """Bring up the shards that are missing, one after the other; return which tier gave the last."""
        tier = host.name
        with self._on_its_way(manifest):
            for shard in shards:
                if not host.holds(shard):
                    async with self._following(host, shard, manifest, at_once=True) as fill:
                        await fill.finished()
                        tier = fill.tier
        return tier

    @contextmanager
    def _on_its_way(self, manifest: Manifest) -> Generator[None]:
        self._due.append(manifest)
        try:
            yield
        finally:
            self._due.remove(manifest)

    def _rise(self, manifest: Manifest) -> Residency:
        """From where a model on its way up comes, and how much of it is to come."""
        missing_bytes = 0
        for shard in manifest.shards:
            if self._host is not None and not self._host.holds(shard):
                fill = self._fills.get(shard)
                missing_bytes += shard.size_bytes - (fill.filled_bytes if fill is not None else 0)
        return Residency(model=manifest.model, tier=self._source(manifest.model), size_bytes=missing_bytes)

    def _source(self, model: ModelId) -> str:
        """The tier from which the model would be read into the host tier; the last if none says it has it."""
        views = [tier.view() for tier in self._below]
        held = (name for view in views if (name := view.tier_of(model)) is not None)
        return next(held, views[-1].tiers[-1].name if views and views[-1].tiers else "")

    def _link(self, model: ModelId) -> Link:
        return self._links[self._source(model)]

    @asynccontextmanager
    async def _following(
        self, host: HostTier, shard: Shard, manifest: Manifest, *, at_once: bool = False
    ) -> AsyncGenerator[Fill]:
        """Take part in the one fill of a shard; the last to leave waits until its books are closed."""
        fill = await self._join(host, shard, manifest, at_once=at_once)
        try:
            yield fill
        finally:
            fill.leave()
            if not fill.num_followers:
                with CancelScope(shield=True):
                    await unbroken(fill.ended.wait)

    async def _join(self, host: HostTier, shard: Shard, manifest: Manifest, *, at_once: bool) -> Fill:
        while (fill := self._fills.get(shard)) is not None and fill.closing:
            await fill.ended.wait()
        if fill is None:
            if self._tasks is None:
                raise self._not_open()
            reading = nullcontext if at_once else partial(self._loading, manifest)
            fill = Fill(shard, manifest, self._below, host, at_once=at_once, reading=reading)
            self._fills[shard] = fill
            self._tasks.start_soon(self._run, fill)
        fill.num_followers += 1
        return fill

    @contextmanager
    def _loading(self, manifest: Manifest) -> Generator[None]:
        """A reader asked for a shard: what it waits for goes before prefetches."""
        with self._link(manifest.model).load(manifest.model), self._on_its_way(manifest):
            yield

    async def _run(self, fill: Fill) -> None:
        try:
            await fill.run()
        finally:
            del self._fills[fill.shard]


class _Begun:
    """An iterator whose first chunk was taken already."""

    def __init__(self, first: HostChunk | None, rest: AsyncIterator[HostChunk]) -> None:
        self._first = first
        self._rest = rest

    def __aiter__(self) -> AsyncIterator[HostChunk]:
        return self

    async def __anext__(self) -> HostChunk:
        first, self._first = self._first, None
        return first if first is not None else await anext(self._rest)
