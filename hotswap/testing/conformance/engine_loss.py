"""Checks of a lost engine: every method raises `InstanceLost`, and `unload` may bring it back."""

from __future__ import annotations

import anyio
import pytest

from hotswap.errors import InstanceLost
from hotswap.testing.conformance.engine_suite import EngineSuite, Reader, collect, no_requests
from hotswap.testing.conformance.engine_weights import GatedStore
from hotswap.testing.conformance.suite import check, until
from hotswap.view import InstanceState

__all__ = ["LossChecks"]


class LossChecks(EngineSuite):
    """Checks of the state LOST, for suites that can lose an engine."""

    @check
    async def test_a_lost_engine_ends_its_streams_after_their_tokens(self) -> None:
        self.need_loss()
        async with self.serving() as setup:
            async with self.streaming(setup.engine, self.long_requests(setup.card)) as readers:
                self.lose(setup.engine)
            for reader in readers:
                assert isinstance(reader.error, InstanceLost)
                await self.assert_part(reader, setup.card)
            assert no_requests(setup.engine)

    @check
    async def test_every_verb_of_a_lost_engine_says_so(self) -> None:
        self.need_loss()
        async with self.serving() as setup:
            self.lose(setup.engine)
            await until(lambda: setup.engine.status().state is InstanceState.LOST)
            with pytest.raises(InstanceLost):
                await collect(setup.engine, self.request(setup.card))
            with pytest.raises(InstanceLost):
                await setup.engine.evict(deadline_s=0)
            with pytest.raises(InstanceLost):
                await setup.engine.load(setup.card, setup.store)
            assert setup.engine.status().state is InstanceState.LOST

    @check
    async def test_unload_brings_a_lost_engine_back(self) -> None:
        self.need_loss()
        async with self.serving() as setup:
            self.lose(setup.engine)
            try:
                await setup.engine.unload()
            except InstanceLost:
                pytest.skip("the engine cannot come back")
            assert setup.engine.status().state is InstanceState.EMPTY
            await setup.engine.load(setup.cards[1], setup.store)
            reader = Reader(self.request(setup.cards[1]))
            await reader.read(setup.engine)
            await self.assert_whole(reader, setup.cards[1])

    @check
    async def test_a_loss_interrupts_a_load(self) -> None:
        self.need_loss()
        async with self.idle() as setup, anyio.create_task_group() as tasks:
            store = GatedStore(setup.store)

            async def lose_engine() -> None:
                await store.reached.wait()
                self.lose(setup.engine)
                store.gate.set()

            tasks.start_soon(lose_engine)
            with pytest.raises(InstanceLost):
                await setup.engine.load(setup.card, store)
            assert setup.engine.status().state is InstanceState.LOST
            assert setup.engine.status().weight_bytes == 0

    @check
    async def test_a_loss_interrupts_an_eviction(self) -> None:
        self.need_loss()
        async with self.serving() as setup:

            async def lose_engine() -> None:
                await until(lambda: setup.engine.status().state is InstanceState.DRAINING)
                self.lose(setup.engine)

            async with (
                self.streaming(setup.engine, self.long_requests(setup.card)) as readers,
                anyio.create_task_group() as tasks,
            ):
                tasks.start_soon(lose_engine)
                with pytest.raises(InstanceLost):
                    await setup.engine.evict(deadline_s=50.0)
            for reader in readers:
                assert isinstance(reader.error, InstanceLost)
                await self.assert_part(reader, setup.card)

    def need_loss(self) -> None:
        """Skip the check if the suite cannot lose an engine."""
        if not self.can_lose:
            pytest.skip("write lose(engine) and set can_lose")
