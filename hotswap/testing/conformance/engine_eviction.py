"""Checks of eviction: at once, by a deadline, and cancelled, without losing a token."""

from __future__ import annotations

import anyio
import pytest

from hotswap.errors import InstanceError, RequestEvicted
from hotswap.testing.cancel import cancel_everywhere
from hotswap.testing.conformance.engine_suite import EngineSetup, EngineSuite, Reader, collect, no_requests
from hotswap.testing.conformance.suite import check, until
from hotswap.view import InstanceState

__all__ = ["EvictionChecks"]

SOON_S = 0.02
LATE_S = 500.0


class EvictionChecks(EngineSuite):
    """Checks of `Engine.evict`."""

    @check
    async def test_eviction_at_once_ends_every_stream_after_its_tokens(self) -> None:
        async with self.serving() as setup:
            async with self.streaming(setup.engine, self.long_requests(setup.card)) as readers:
                began_s = anyio.current_time()
                assert await setup.engine.evict(deadline_s=0) == 3
                assert anyio.current_time() - began_s <= self.step_s, "at once means at once"
                assert setup.engine.status().state is InstanceState.DRAINING
                assert setup.engine.status().num_running == 0
            for reader in readers:
                assert isinstance(reader.error, RequestEvicted)
                await self.assert_part(reader, setup.card)
            await until(lambda: no_requests(setup.engine))
            await setup.engine.unload()

    @check
    async def test_unread_tokens_survive_an_eviction(self) -> None:
        async with self.serving() as setup:
            request = self.request(setup.card)
            async with setup.engine.stream(request) as tokens:
                await until(lambda: no_requests(setup.engine))
                assert await setup.engine.evict(deadline_s=0) == 0
                await setup.engine.unload()
                read = [token.id for token in await tokens.collect()]
            assert read == await self.expected(request, setup.card)

    @check
    async def test_an_evicted_request_goes_on_elsewhere_as_if_undisturbed(self) -> None:
        async with self.serving() as setup, self.make_engine() as elsewhere:
            await elsewhere.load(setup.card, setup.store)
            async with self.streaming(setup.engine, self.long_requests(setup.card)) as readers:
                await setup.engine.evict(deadline_s=0)
            for reader in readers:
                rest = await collect(elsewhere, reader.request.continued(reader.ids))
                whole = reader.ids + [token.id for token in rest]
                assert whole == await self.expected(reader.request, setup.card)

    @check
    async def test_what_ends_before_the_deadline_is_not_evicted(self) -> None:
        async with self.serving() as setup:
            request = self.request(setup.card, max_tokens=10)
            async with self.streaming(setup.engine, [request]) as readers:
                began_s = anyio.current_time()
                assert await setup.engine.evict(deadline_s=LATE_S) == 0
                assert anyio.current_time() - began_s < LATE_S, "it waits only while something runs"
            await self.assert_whole(readers[0], setup.card)

    @check
    async def test_what_still_runs_at_the_deadline_is_evicted_then(self) -> None:
        async with self.serving() as setup:
            async with self.streaming(setup.engine, self.long_requests(setup.card)) as readers:
                began_s = anyio.current_time()
                num_evicted = await setup.engine.evict(deadline_s=SOON_S)
                waited_s = anyio.current_time() - began_s
            assert num_evicted == sum(reader.error is not None for reader in readers)
            assert num_evicted, f"the requests ended within {SOON_S} s: raise long_tokens"
            assert SOON_S <= waited_s <= SOON_S + self.step_s
            for reader in readers:
                if reader.error is not None:
                    await self.assert_part(reader, setup.card)

    @check
    async def test_a_draining_engine_admits_none(self) -> None:
        async with self.serving() as setup:
            async with (
                self.streaming(setup.engine, self.long_requests(setup.card)) as readers,
                anyio.create_task_group() as tasks,
            ):
                tasks.start_soon(_evict, setup, SOON_S)
                await until(lambda: setup.engine.status().state is not InstanceState.SERVING)
                assert setup.engine.status().state is InstanceState.DRAINING
                with pytest.raises(RequestEvicted):
                    await collect(setup.engine, self.request(setup.card))
            assert all(isinstance(reader.error, RequestEvicted) for reader in readers)
            with pytest.raises(RequestEvicted):  # and until it is unloaded
                await collect(setup.engine, self.request(setup.card))

    @check
    async def test_an_idle_engine_drains_at_once(self) -> None:
        async with self.serving() as setup:
            began_s = anyio.current_time()
            assert await setup.engine.evict(deadline_s=LATE_S) == 0
            assert anyio.current_time() - began_s < LATE_S
            assert setup.engine.status().state is InstanceState.DRAINING

    @check
    async def test_an_empty_engine_cannot_be_drained(self) -> None:
        async with self.idle() as setup:
            with pytest.raises(InstanceError):
                await setup.engine.evict(deadline_s=0)
            assert setup.engine.status().state is InstanceState.EMPTY

    @check
    async def test_an_eviction_called_off_loses_nothing(self) -> None:
        async with self.serving() as setup:
            async with self.streaming(setup.engine, self.long_requests(setup.card)) as readers:
                with anyio.CancelScope() as scope:
                    async with anyio.create_task_group() as tasks:
                        tasks.start_soon(_evict, setup, LATE_S)
                        await until(lambda: setup.engine.status().state is InstanceState.DRAINING)
                        scope.cancel()
                assert setup.engine.status().state is InstanceState.SERVING
                late = Reader(self.request(setup.card, salt=9))
                await late.read(setup.engine)
            for reader in (*readers, late):
                await self.assert_whole(reader, setup.card)

    @check
    async def test_an_eviction_cancelled_anywhere_is_done_or_not_begun(self) -> None:
        async with self.idle() as setup:

            async def evict_one() -> None:
                with anyio.CancelScope(shield=True):
                    if setup.engine.status().state is InstanceState.EMPTY:
                        await setup.engine.load(setup.card, setup.store)
                async with self.streaming(setup.engine, self.long_requests(setup.card, 1)):
                    await setup.engine.evict(deadline_s=0)

            async def look() -> None:
                await until(lambda: no_requests(setup.engine))
                state = setup.engine.status().state
                assert state in (InstanceState.SERVING, InstanceState.DRAINING), f"it is {state}"
                await setup.engine.unload()

            await cancel_everywhere(evict_one, look)


async def _evict(setup: EngineSetup, deadline_s: float) -> None:
    await setup.engine.evict(deadline_s=deadline_s)
