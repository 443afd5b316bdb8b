"""Checks of preloading: the next model is staged beside the one that serves."""

from __future__ import annotations

import pytest

from hotswap.engine import SupportsPreload
from hotswap.errors import StoreError
from hotswap.testing.cancel import cancel_everywhere
from hotswap.testing.conformance.engine_suite import EngineSetup, EngineSuite, Reader
from hotswap.testing.conformance.engine_weights import FailingStore
from hotswap.testing.conformance.suite import check
from hotswap.view import InstanceState

__all__ = ["PreloadChecks"]


class PreloadChecks(EngineSuite):
    """Checks of `SupportsPreload`."""

    @check
    async def test_staging_a_model_disturbs_no_stream(self) -> None:
        async with self.serving() as setup:
            engine = able(setup)
            async with self.streaming(setup.engine, self.long_requests(setup.card)) as readers:
                await engine.preload(setup.cards[1], setup.store)
                assert setup.engine.status().preloaded == setup.cards[1].id
                assert setup.engine.status().model == setup.card.id
            for reader in readers:
                await self.assert_whole(reader, setup.card)

    @check
    async def test_a_load_takes_what_was_staged(self) -> None:
        async with self.serving() as setup:
            engine = able(setup)
            await engine.preload(setup.cards[1], setup.store)
            await setup.engine.evict(deadline_s=0)
            await setup.engine.unload()
            assert setup.engine.status().preloaded == setup.cards[1].id
            # A store that fails shows that nothing more is read.
            await setup.engine.load(setup.cards[1], FailingStore(setup.store, 0))
            view = setup.engine.status()
            assert (view.state, view.model) == (InstanceState.SERVING, setup.cards[1].id)
            assert view.preloaded is None
            reader = Reader(self.request(setup.cards[1]))
            await reader.read(setup.engine)
            await self.assert_whole(reader, setup.cards[1])

    @check
    async def test_what_is_staged_can_be_dropped(self) -> None:
        async with self.serving() as setup:
            engine = able(setup)
            before = setup.engine.status()
            await engine.drop_preload()
            await engine.preload(setup.cards[1], setup.store)
            await engine.drop_preload()
            assert setup.engine.status() == before

    @check
    async def test_a_staging_that_fails_leaves_nothing_staged(self) -> None:
        async with self.serving() as setup:
            engine = able(setup)
            before = setup.engine.status()
            for num_chunks in (0, 1):
                with pytest.raises(StoreError, match="planted"):
                    await engine.preload(setup.cards[1], FailingStore(setup.store, num_chunks))
                assert setup.engine.status() == before

    @check
    async def test_a_staging_cancelled_anywhere_leaves_nothing_staged(self) -> None:
        async with self.serving() as setup:
            engine = able(setup)
            before = setup.engine.status()

            async def look() -> None:
                if setup.engine.status().preloaded is not None:  # the cancellation came too late
                    await engine.drop_preload()
                assert setup.engine.status() == before

            await cancel_everywhere(lambda: engine.preload(setup.cards[1], setup.store), look)
            reader = Reader(self.request(setup.card))
            await reader.read(setup.engine)
            await self.assert_whole(reader, setup.card)


def able(setup: EngineSetup) -> SupportsPreload:
    """Return the engine, or skip the check if it cannot preload the second model now."""
    engine = setup.engine
    if not isinstance(engine, SupportsPreload):
        pytest.skip("the engine does not support preloading")
    if not engine.can_preload(setup.cards[1]):
        pytest.skip("the two models do not fit side by side")
    return engine
