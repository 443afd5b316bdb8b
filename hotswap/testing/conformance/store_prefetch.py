"""Checks of prefetching to the fastest tier, and of dropping from it."""

from __future__ import annotations

import anyio
import pytest

from hotswap.errors import StoreError
from hotswap.store import SupportsPrefetch, WeightStore
from hotswap.testing.cancel import cancel_everywhere
from hotswap.testing.conformance.store_suite import StoreSuite, read_all
from hotswap.testing.conformance.suite import check
from hotswap.view import Residency, StoreView

__all__ = ["PrefetchChecks"]


class PrefetchChecks(StoreSuite):
    """Checks of `SupportsPrefetch`; each model must fit in the fastest tier."""

    @check
    async def test_a_prefetched_model_lies_on_the_fastest_tier(self) -> None:
        async with self.opened() as store:
            tier = fastest(store)
            for model in self.models:
                for _ in range(2):  # the second finds it there
                    await able(store).prefetch(model)
                    assert store.view().tier_of(model) == tier
                manifest = await store.manifest(model)
                async with store.open(manifest.shards[0]) as chunks:
                    async for chunk in chunks:
                        assert chunk.tier == tier

    @check
    async def test_a_dropped_model_lies_on_another_tier(self) -> None:
        async with self.opened() as store:
            model, tier = self.models[0], fastest(store)
            whole = await read_all(store, await store.manifest(model))
            await able(store).prefetch(model)
            for _ in range(2):  # the second finds nothing to drop
                await able(store).drop(model)
                assert store.view().tier_of(model) not in (tier, None)
            assert await read_all(store, await store.manifest(model)) == whole

    @check
    async def test_prefetched_bytes_are_the_same_bytes(self) -> None:
        async with self.opened() as store:
            model = self.models[0]
            manifest = await store.manifest(model)
            await able(store).drop(model)
            from_below = await read_all(store, manifest)
            await able(store).prefetch(model)
            assert await read_all(store, manifest) == from_below

    @check
    async def test_an_unknown_model_cannot_be_prefetched(self) -> None:
        async with self.opened() as store:
            with pytest.raises(StoreError):
                await able(store).prefetch(self.unknown)

    @check
    async def test_a_cancelled_prefetch_leaves_the_tier_as_it_was(self) -> None:
        async with self.opened() as store:
            model = self.models[0]
            await able(store).drop(model)
            before = occupied(store.view())

            async def look() -> None:
                if store.view().tier_of(model) == fastest(store):  # the cancellation came too late
                    await able(store).drop(model)
                assert occupied(store.view()) == before

            await cancel_everywhere(lambda: able(store).prefetch(model), look)

    @check
    async def test_a_model_can_be_prefetched_by_several_at_once(self) -> None:
        async with self.opened() as store:
            async with anyio.create_task_group() as tasks:
                for _ in range(3):
                    tasks.start_soon(able(store).prefetch, self.models[0])
            assert store.view().tier_of(self.models[0]) == fastest(store)

    @check
    async def test_a_drop_waits_for_what_is_lent(self) -> None:
        async with self.opened() as store:
            model, tier = self.models[0], fastest(store)
            await able(store).prefetch(model)
            shard = (await store.manifest(model)).shards[0]
            async with anyio.create_task_group() as tasks, store.open(shard) as chunks:
                chunk = await anext(chunks)
                before = bytes(chunk.data)
                tasks.start_soon(able(store).drop, model)
                await read_all(store, await store.manifest(self.models[1]))
                assert bytes(chunk.data) == before, "a chunk changed while lent"
                assert store.view().tier_of(model) == tier, "the model went while it was read"
            assert store.view().tier_of(model) != tier


def able(store: WeightStore) -> SupportsPrefetch:
    """Return the store, or skip the check if it cannot prefetch."""
    if not isinstance(store, SupportsPrefetch):
        pytest.skip("the store does not support prefetching")
    return store


def fastest(store: WeightStore) -> str:
    """Return the name of the fastest of several tiers."""
    if len(store.view().tiers) < 2:
        pytest.skip("the store has a single tier")
    return store.view().tiers[0].name


def occupied(view: StoreView) -> tuple[frozenset[Residency], tuple[int, ...]]:
    """Return residency and used bytes; bandwidths are left out, since they may be measured anew."""
    return frozenset(view.residency), tuple(tier.used_bytes for tier in view.tiers)
