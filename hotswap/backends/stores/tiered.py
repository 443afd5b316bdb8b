"""`TieredStore`: several tiers as one store, read fastest first, with faster tiers filled on a miss."""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import AsyncGenerator, AsyncIterator, Generator, Iterable
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Self

from anyio.abc import TaskGroup

from hotswap.backends.stores.bandwidth import JoinedResidents
from hotswap.backends.stores.held import HeldShards
from hotswap.backends.stores.host_tier import HostTier
from hotswap.backends.stores.loading import Fill, FillReader, PrefetchQueue, more_specific
from hotswap.backends.stores.reading import background
from hotswap.backends.stores.write_through import WriteThroughStore, with_write_through
from hotswap.errors import ConfigError, ShardMissing, StoreError, TierFull
from hotswap.model import Adapter, HostBuffer, HostChunk, Manifest, Model, Shard
from hotswap.request import ModelId
from hotswap.store import (
    SupportsImport,
    SupportsLendFiles,
    SupportsSideFiles,
    SupportsTextSettings,
    SupportsTokenizer,
    WeightStore,
)
from hotswap.text import TextSettings, Tokenizer
from hotswap.view import Residency, StoreView

__all__ = ["TieredStore"]

_log = logging.getLogger("hotswap.stores")


class TieredStore(WeightStore):
    """Tiers, fastest first: `TieredStore(PinnedStore("200 GiB"), NvmeStore("/var/cache/hotswap"))`.

    A shard is lent by the first tier that holds it. If the first tier is host memory (a `PinnedStore` or a
    `SharedStore`), a shard of a lower tier is read into it and lent from there: the only copy in host memory,
    made once for all engines that ask at the same time. Where the budget has no room, or host memory fails
    in another way (which is logged), the shard is lent by the lower tier itself. A tier that fails before its
    first chunk is skipped for the next; one that fails later raises. Models read from below a `NvmeStore`
    are copied to it (see `write_through`).

    `prefetches` models are prefetched from a tier at a time, and none while a load reads from it.

    Attributes:
        tiers: The tiers.
        held: What other nodes may have of it: shards that are here, or as far as they have arrived.
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
        self._below = with_write_through(tiers if self._host is None else tiers[1:])
        self._manifests: dict[ModelId, Manifest] = {}
        self._queues: defaultdict[str, PrefetchQueue] = defaultdict(lambda: PrefetchQueue(prefetches))
        self._residents = JoinedResidents()
        self._tracked: list[Manifest] = []
        self._fills: dict[Shard, Fill] = {}
        self.held = HeldShards(self._host, self._below, self._fills)
        self._logged: dict[ModelId, str] = {}
        self._tasks: TaskGroup | None = None

    @asynccontextmanager
    async def __asynccontextmanager__(self) -> AsyncGenerator[Self]:
        """Open the tiers, and close them when every read has ended."""
        async with AsyncExitStack() as stack:
            for tier in self.tiers:
                await stack.enter_async_context(tier)
            for tier in self._below:
                if isinstance(tier, WriteThroughStore):
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
        """Lend a rank from the host tier, loaded into it first if need be; `None` if it cannot hold it."""
        async with AsyncExitStack() as stack:
            yield None if self._host is None else await self._enter_lent(stack, self._host, manifest, rank)

    @asynccontextmanager
    async def lend_files(self, manifest: Manifest) -> AsyncGenerator[tuple[Path, ...]]:
        """Lend the files of the disk tier, copied to it first if need be; see `SupportsLendFiles`."""
        await self._fetch_to_disk(manifest.model)
        async with AsyncExitStack() as stack:
            yield await self._enter_files(stack, manifest)

    async def prefetch(self, model: ModelId, *, priority: int = 0) -> None:
        """Load the model into the host tier, without one into the disk tier; see `SupportsPrefetch`.

        The highest `priority` goes first; a model that is being loaded goes at once. A prefetch that waits
        for its turn has no room reserved. It may be cancelled.
        """
        manifest = await self.manifest(model)
        if self._host is None:
            await self._fetch_to_disk(model)
            return
        self._host.keep(model)
        async with AsyncExitStack() as stack:
            if not all(map(self._host.holds, manifest.shards)):
                await stack.enter_async_context(self._queue(model).turn(model, priority))
            ranks = range(manifest.world_size)
            reservations = [
                await stack.enter_async_context(self._host.reserve(manifest, rank)) for rank in ranks
            ]
            await self._complete(self._host, manifest, manifest.shards)
            for reservation in reservations:
                reservation.keep()

    async def _fetch_to_disk(self, model: ModelId) -> None:
        """Copy the model from a lower tier to the `NvmeStore`, if there is one and it lacks the model."""
        for tier in self._below:
            with suppress(ShardMissing):
                await tier.manifest(model)
                if isinstance(tier, WriteThroughStore):
                    await tier.fetch(model)
                return

    async def drop(self, model: ModelId) -> None:
        if self._host is not None:
            await self._host.drop(model)

    def pin(self, model: ModelId) -> None:
        """Keep the model on the host tier, once it is loaded (see `prefetch`), until `unpin`."""
        if self._host is not None:
            self._host.pin(model)

    def unpin(self, model: ModelId) -> None:
        """Allow the host tier to evict the model again."""
        if self._host is not None:
            self._host.unpin(model)

    async def import_model(self, model: Model) -> None:
        for tier in self.tiers:
            if isinstance(tier, SupportsImport):
                await tier.import_model(model)
                await self._drop_former(ModelId(model.id), tier)
                return
        raise ConfigError(f"No tier of {self!r} can import model {model.id!r}; add a NvmeStore.")

    async def _drop_former(self, model: ModelId, source: WeightStore) -> None:
        """Drop a model from the host tier that was converted anew since it was loaded there."""
        if self._host is None:
            return
        with suppress(ShardMissing):
            if await self._host.manifest(model) != await source.manifest(model):
                await self._host.drop(model)

    async def tokenizer(self, model: ModelId) -> Tokenizer | None:
        for tier in self.tiers:
            if isinstance(tier, SupportsTokenizer) and (found := await tier.tokenizer(model)) is not None:
                return found
        return None

    async def side_files(self, model: ModelId) -> dict[str, bytes]:
        """Return the small files beside a model's weights, from the first tier that has any."""
        for tier in self.tiers:
            if isinstance(tier, SupportsSideFiles) and (found := await tier.side_files(model)):
                return found
        return {}

    async def text_settings(self, model: ModelId) -> TextSettings | None:
        for tier in self.tiers:
            if (
                isinstance(tier, SupportsTextSettings)
                and (found := await tier.text_settings(model)) is not None
            ):
                return found
        return None

    async def adapter_settings(self, adapter: Adapter) -> TextSettings:
        failure: StoreError | None = None
        for tier in self.tiers:
            if isinstance(tier, SupportsTextSettings):
                try:
                    return await tier.adapter_settings(adapter)
                except ShardMissing as exc:  # the model is on a lower tier
                    failure = more_specific(failure, exc)
        if failure is not None:
            raise failure
        return TextSettings()

    def view(self) -> StoreView:
        views = [tier.view() for tier in self.tiers]
        manifests = {manifest.model: manifest for manifest in self._tracked}
        loading = tuple(
            entry for manifest in manifests.values() if (entry := self._remaining(manifest)).size_bytes
        )
        queued: Counter[str] = Counter()
        for entry in loading:
            queued[entry.tier] += entry.size_bytes
        return StoreView(
            tiers=tuple(
                replace(tier, queued_bytes=max(tier.queued_bytes, queued[tier.name]))
                for view in views
                for tier in view.tiers
            ),
            residency=self._residents.of(views),
            loading=loading,
        )

    @property
    def num_lent(self) -> int:
        """How many buffers the tiers have lent; 0 when nothing is open."""
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
                failure = more_specific(failure, exc)
        raise failure or ShardMissing(f"No tier holds model {model!r}.")

    async def _enter(self, stack: AsyncExitStack, shard: Shard) -> AsyncIterator[HostChunk]:
        if self._host is not None:
            try:
                return await stack.enter_async_context(self._host.open(shard))
            except ShardMissing:
                pass
            except StoreError as exc:
                self._log_bypass(shard.model, exc)
            if (manifest := await self._manifest_of(shard)) is not None:
                loading = await stack.enter_async_context(self._loading(self._host, shard, manifest))
                if loading is not None:
                    return loading
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
                reservation = await reserved.enter_async_context(host.reserve(manifest, rank))
            except StoreError as exc:
                self._log_bypass(manifest.model, exc)
                return None
            with self._queue(manifest.model).load(manifest.model):
                tier = await self._complete(host, manifest, manifest.shards_of(rank))
            reservation.keep()
            buffer = await stack.enter_async_context(host.lend(manifest, rank))
        return replace(buffer, tier=tier) if buffer is not None else None

    async def _enter_files(self, stack: AsyncExitStack, manifest: Manifest) -> tuple[Path, ...]:
        failure: StoreError | None = None
        for tier in self.tiers:
            if isinstance(tier, SupportsLendFiles):
                try:
                    return await stack.enter_async_context(tier.lend_files(manifest))
                except StoreError as exc:
                    failure = more_specific(failure, exc)
        raise failure or StoreError(
            f"{self!r} has no disk to lend the files of model {manifest.model!r} from; add a NvmeStore."
        )

    async def _enter_below(self, stack: AsyncExitStack, shard: Shard) -> AsyncIterator[HostChunk]:
        """Open the first tier that gives a first chunk."""
        failure: StoreError | None = None
        for tier in self._below:
            async with AsyncExitStack() as attempt:
                try:
                    chunks = await attempt.enter_async_context(tier.open(shard))
                    first = await anext(chunks, None)
                except StoreError as exc:
                    failure = more_specific(failure, exc)
                    continue
                stack.push_async_exit(attempt.pop_all())
                return _Chained(first, chunks)
        raise failure or ShardMissing(f"No tier holds {shard.file!r} of model {shard.model!r}.")

    async def _manifest_of(self, shard: Shard) -> Manifest | None:
        """The manifest that names the shard; `None` for a shard of an earlier conversion of the model."""
        manifest = self._manifests.get(shard.model)
        if manifest is None or shard not in manifest.shards:
            with suppress(StoreError):
                manifest = await self._manifest(self._below, shard.model)
        return manifest if manifest is not None and shard in manifest.shards else None

    def _log_bypass(self, model: ModelId, error: Exception) -> None:
        """Log, once for each reason, that a load goes on without the host tier; a full tier is not logged."""
        if not isinstance(error, TierFull) and self._logged.get(model) != str(error):
            self._logged[model] = str(error)
            _log.warning("Model %r is loaded without %r: %s", model, self._host, error)

    def _not_open(self) -> StoreError:
        return StoreError(f"{self!r} is not open; use it inside `async with`.")

    # -------------------------------------------------------------------------- filling the host tier

    @asynccontextmanager
    async def _loading(
        self, host: HostTier, shard: Shard, manifest: Manifest
    ) -> AsyncGenerator[FillReader | None]:
        """Read the shard while it is loaded into the host tier; `None` if that has no room for it."""
        async with self._fill_of(host, shard, manifest) as fill:
            fill.wanted = True
            while not fill.admitted and fill.error is None:
                await fill.changed()
            reader = FillReader(fill, host.chunk_bytes) if fill.admitted else None
            if reader is None and fill.error is not None:
                self._log_bypass(shard.model, fill.error)
            try:
                yield reader
            finally:
                if reader is not None:
                    reader.close()

    async def _complete(self, host: HostTier, manifest: Manifest, shards: Iterable[Shard]) -> str:
        """Load the missing shards one after the other; return the tier that the last came from."""
        tier = host.name
        with self._tracking(manifest):
            for shard in shards:
                if not host.holds(shard):
                    async with self._fill_of(host, shard, manifest, at_once=True) as fill:
                        await fill.finished()
                        tier = fill.tier
        return tier

    @contextmanager
    def _tracking(self, manifest: Manifest) -> Generator[None]:
        """Show the model as loading in the view while the block runs."""
        self._tracked.append(manifest)
        try:
            yield
        finally:
            self._tracked.remove(manifest)

    def _remaining(self, manifest: Manifest) -> Residency:
        """The tier that a model is being loaded from, and the bytes still to be read."""
        missing_bytes = 0
        for shard in manifest.shards:
            if self._host is not None and not self._host.holds(shard):
                fill = self._fills.get(shard)
                missing_bytes += shard.size_bytes - (fill.filled_bytes if fill is not None else 0)
        return Residency(model=manifest.model, tier=self._source(manifest.model), size_bytes=missing_bytes)

    def _source(self, model: ModelId) -> str:
        """The tier that the model is loaded into the host tier from; the last one if none shows it."""
        views = [tier.view() for tier in self._below]
        held = (name for view in views if (name := view.tier_of(model)) is not None)
        return next(held, views[-1].tiers[-1].name if views and views[-1].tiers else "")

    def _queue(self, model: ModelId) -> PrefetchQueue:
        return self._queues[self._source(model)]

    @asynccontextmanager
    async def _fill_of(
        self, host: HostTier, shard: Shard, manifest: Manifest, *, at_once: bool = False
    ) -> AsyncGenerator[Fill]:
        """Join the one fill of a shard; the last reader to leave waits until the fill has ended."""
        fill = await self._join(host, shard, manifest, at_once=at_once)
        async with fill.reading():
            yield fill

    async def _join(self, host: HostTier, shard: Shard, manifest: Manifest, *, at_once: bool) -> Fill:
        while (fill := self._fills.get(shard)) is not None and fill.closing:
            await fill.ended.wait()
        if fill is None:
            if self._tasks is None:
                raise self._not_open()
            reading = nullcontext if at_once else partial(self._counted_as_load, manifest)
            fill = Fill(shard, manifest, self._below, host, at_once=at_once, reading=reading)
            self._fills[shard] = fill
            self._tasks.start_soon(self._run, fill)
        return fill

    @contextmanager
    def _counted_as_load(self, manifest: Manifest) -> Generator[None]:
        """Put the read of a shard before prefetches while the block runs, since a reader waits for it."""
        with self._queue(manifest.model).load(manifest.model), self._tracking(manifest):
            yield

    async def _run(self, fill: Fill) -> None:
        try:
            await fill.run()
        finally:
            del self._fills[fill.shard]


class _Chained:
    """An iterator over a first chunk and the rest."""

    def __init__(self, first: HostChunk | None, rest: AsyncIterator[HostChunk]) -> None:
        self._first = first
        self._rest = rest

    def __aiter__(self) -> AsyncIterator[HostChunk]:
        return self

    async def __anext__(self) -> HostChunk:
        first, self._first = self._first, None
        return first if first is not None else await anext(self._rest)
