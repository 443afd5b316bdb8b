"""Staging the next model beside the one that serves."""

from __future__ import annotations

import pytest

from hotswap.engine import SupportsPreload
from hotswap.errors import StoreError
from hotswap.testing.cancel import cancel_everywhere
from hotswap.testing.conformance.engine_suite import Bench, EngineSuite, Reader
from hotswap.testing.conformance.engine_weights import FailingStore
from hotswap.testing.conformance.suite import check
from hotswap.view import InstanceState

__all__ = ["PreloadChecks"]


class PreloadChecks(EngineSuite):
    """Checks of `SupportsPreload`."""

    @check
    async def test_staging_a_model_disturbs_no_stream(self) -> None:
        async with self.serving() as bench:
            engine = able(bench)
            async with self.streaming(bench.engine, self.long_requests(bench.card)) as readers:
                await engine.preload(bench.cards[1], bench.store)
                assert bench.engine.status().preloaded == bench.cards[1].id
                assert bench.engine.status().model == bench.card.id
            for reader in readers:
                await self.assert_whole(reader, bench.card)

    @check
    async def test_a_load_takes_what_was_staged(self) -> None:
        async with self.serving() as bench:
            engine = able(bench)
            await engine.preload(bench.cards[1], bench.store)
            await bench.engine.evict(deadline_s=0)
            await bench.engine.unload()
            assert bench.engine.status().preloaded == bench.cards[1].id
            # A store that fails shows that nothing more is read.
            await bench.engine.load(bench.cards[1], FailingStore(bench.store, 0))
            view = bench.engine.status()
            assert (view.state, view.model) == (InstanceState.SERVING, bench.cards[1].id)
            assert view.preloaded is None
            reader = Reader(self.request(bench.cards[1]))
            await reader.read(bench.engine)
            await self.assert_whole(reader, bench.cards[1])

    @check
    async def test_what_is_staged_can_be_dropped(self) -> None:
        async with self.serving() as bench:
            engine = able(bench)
            before = bench.engine.status()
            await engine.drop_preload()
            await engine.preload(bench.cards[1], bench.store)
            await engine.drop_preload()
            assert bench.engine.status() == before

    @check
    async def test_a_staging_that_fails_leaves_nothing_staged(self) -> None:
        async with self.serving() as bench:
            engine = able(bench)
            before = bench.engine.status()
            for num_chunks in (0, 1):
                with pytest.raises(StoreError, match="planted"):
                    await engine.preload(bench.cards[1], FailingStore(bench.store, num_chunks))
                assert bench.engine.status() == before

    @check
    async def test_a_staging_cancelled_anywhere_leaves_nothing_staged(self) -> None:
        async with self.serving() as bench:
            engine = able(bench)
            before = bench.engine.status()

            async def look() -> None:
                if bench.engine.status().preloaded is not None:  # the cancellation came too late
                    await engine.drop_preload()
                assert bench.engine.status() == before

            await cancel_everywhere(lambda: engine.preload(bench.cards[1], bench.store), look)
            reader = Reader(self.request(bench.card))
            await reader.read(bench.engine)
            await self.assert_whole(reader, bench.card)


def able(bench: Bench) -> SupportsPreload:
    """Return the engine, or skip the check where it cannot stage the second model now."""
    engine = bench.engine
    if not isinstance(engine, SupportsPreload):
        pytest.skip("the engine does not support preloading")
    if not engine.can_preload(bench.cards[1]):
        pytest.skip("the two models do not fit side by side")
    return engine
