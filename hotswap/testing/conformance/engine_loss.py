"""A lost engine says so, everywhere, and comes back if it can."""

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
    """Checks of LOST, for engines whose test can bring it about."""

    @check
    async def test_a_lost_engine_ends_its_streams_after_their_tokens(self) -> None:
        self.need_loss()
        async with self.serving() as bench:
            async with self.streaming(bench.engine, self.long_requests(bench.card)) as readers:
                self.lose(bench.engine)
            for reader in readers:
                assert isinstance(reader.error, InstanceLost)
                await self.assert_part(reader, bench.card)
            assert no_requests(bench.engine)

    @check
    async def test_every_verb_of_a_lost_engine_says_so(self) -> None:
        self.need_loss()
        async with self.serving() as bench:
            self.lose(bench.engine)
            await until(lambda: bench.engine.status().state is InstanceState.LOST)
            with pytest.raises(InstanceLost):
                await collect(bench.engine, self.request(bench.card))
            with pytest.raises(InstanceLost):
                await bench.engine.evict(deadline_s=0)
            with pytest.raises(InstanceLost):
                await bench.engine.load(bench.card, bench.store)
            assert bench.engine.status().state is InstanceState.LOST

    @check
    async def test_unload_brings_a_lost_engine_back(self) -> None:
        self.need_loss()
        async with self.serving() as bench:
            self.lose(bench.engine)
            try:
                await bench.engine.unload()
            except InstanceLost:
                pytest.skip("the engine cannot come back")
            assert bench.engine.status().state is InstanceState.EMPTY
            await bench.engine.load(bench.cards[1], bench.store)
            reader = Reader(self.request(bench.cards[1]))
            await reader.read(bench.engine)
            await self.assert_whole(reader, bench.cards[1])

    @check
    async def test_a_loss_interrupts_a_load(self) -> None:
        self.need_loss()
        async with self.idle() as bench, anyio.create_task_group() as tasks:
            store = GatedStore(bench.store)

            async def lose_it() -> None:
                await store.reached.wait()
                self.lose(bench.engine)
                store.gate.set()

            tasks.start_soon(lose_it)
            with pytest.raises(InstanceLost):
                await bench.engine.load(bench.card, store)
            assert bench.engine.status().state is InstanceState.LOST
            assert bench.engine.status().weight_bytes == 0

    @check
    async def test_a_loss_interrupts_an_eviction(self) -> None:
        self.need_loss()
        async with self.serving() as bench:

            async def lose_it() -> None:
                await until(lambda: bench.engine.status().state is InstanceState.DRAINING)
                self.lose(bench.engine)

            async with (
                self.streaming(bench.engine, self.long_requests(bench.card)) as readers,
                anyio.create_task_group() as tasks,
            ):
                tasks.start_soon(lose_it)
                with pytest.raises(InstanceLost):
                    await bench.engine.evict(deadline_s=50.0)
            for reader in readers:
                assert isinstance(reader.error, InstanceLost)
                await self.assert_part(reader, bench.card)

    def need_loss(self) -> None:
        """Skip a check that loses an engine, where the suite cannot."""
        if not self.can_lose:
            pytest.skip("write lose(engine) and set can_lose")
