"""Checks of adapters: requests of one batch each run with their own adapter, or none."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

import anyio
import pytest

from hotswap.engine import Engine, SupportsAdapters
from hotswap.errors import (
    InstanceError,
    InstanceLost,
    OutOfMemory,
    StoreError,
    UnknownAdapter,
    UnsupportedAdapter,
)
from hotswap.model import Adapter
from hotswap.request import AdapterId, Request
from hotswap.testing.cancel import cancel_at, cancel_everywhere
from hotswap.testing.conformance.engine_status import all_told
from hotswap.testing.conformance.engine_suite import EngineSetup, EngineSuite, Reader, collect, no_requests
from hotswap.testing.conformance.suite import Heartbeat, check, until
from hotswap.view import InstanceState

__all__ = ["AdapterChecks"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterSetup(EngineSetup):
    """A setup whose engine can hold adapters: `able` is the same engine."""

    able: SupportsAdapters


class AdapterChecks(EngineSuite):
    """Checks of `SupportsAdapters`."""

    @check
    async def test_the_view_says_which_adapters_are_held(self) -> None:
        async with self.adaptable() as setup:
            one, two = self.adapters[:2]
            assert setup.engine.status().adapters == ()
            await setup.able.load_adapter(one)
            assert held(setup.engine) == {one.id}
            await setup.able.load_adapter(two)
            await setup.able.load_adapter(one)
            assert held(setup.engine) == {one.id, two.id}
            await setup.able.drop_adapter(AdapterId(one.id))
            await setup.able.drop_adapter(AdapterId(one.id))
            assert held(setup.engine) == {two.id}

    @check
    async def test_requests_of_one_batch_each_run_with_their_own_adapter(self) -> None:
        async with self.adaptable(*self.adapters) as setup:
            requests = [
                replace(self.request(setup.card, 1 + 9 * salt, salt=salt, max_tokens=20), adapter=adapter)
                for salt, adapter in enumerate([*(AdapterId(a.id) for a in self.adapters), None] * 2)
            ]
            async with self.streaming(setup.engine, requests) as readers:
                pass
            for reader in readers:
                await self.assert_whole(reader, setup.card)

    @check
    async def test_an_adapter_changes_the_tokens(self) -> None:
        async with self.adaptable(*self.adapters) as setup:
            request = self.request(setup.card)
            seen = {tuple(t.id for t in await collect(setup.engine, request))}
            for adapter in self.adapters:
                adapted = replace(request, adapter=AdapterId(adapter.id))
                seen.add(tuple(t.id for t in await collect(setup.engine, adapted)))
            assert len(seen) == 1 + len(self.adapters), "adapters that change nothing would hide a mistake"

    @check
    async def test_a_continued_request_goes_on_with_its_adapter(self) -> None:
        async with self.adaptable(*self.adapters) as setup:
            request = self.with_adapter(setup, 0)
            whole = await self.expected(request, setup.card)
            tokens = await collect(setup.engine, request.continued(whole[:5]))
            assert [token.id for token in tokens] == whole[5:]

    @check
    async def test_adapters_come_and_go_beside_running_streams(self) -> None:
        async with self.adaptable(*self.adapters[:1]) as setup:
            requests = self.long_requests(setup.card, 2)
            requests[0] = replace(requests[0], adapter=AdapterId(self.adapters[0].id))
            async with self.streaming(setup.engine, requests) as readers:
                for _ in range(3):
                    await setup.able.load_adapter(self.adapters[1])
                    await setup.able.drop_adapter(AdapterId(self.adapters[1].id))
            for reader in readers:
                await self.assert_whole(reader, setup.card)

    @check
    async def test_an_adapter_in_use_is_not_dropped(self) -> None:
        async with self.adaptable(*self.adapters[:1]) as setup:
            request = replace(self.long_requests(setup.card)[0], adapter=AdapterId(self.adapters[0].id))
            async with self.streaming(setup.engine, [request]) as readers:
                with pytest.raises(InstanceError, match=self.adapters[0].id):
                    await setup.able.drop_adapter(AdapterId(self.adapters[0].id))
                assert held(setup.engine) == {self.adapters[0].id}
            await self.assert_whole(readers[0], setup.card)
            await setup.able.drop_adapter(AdapterId(self.adapters[0].id))
            with pytest.raises(UnknownAdapter):
                await collect(setup.engine, request)

    @check
    async def test_an_adapter_loaded_in_the_place_of_another_is_itself(self) -> None:
        async with self.adaptable() as setup:
            for adapter in (*self.adapters, *self.adapters):
                await setup.able.load_adapter(adapter)
                reader = Reader(replace(self.request(setup.card), adapter=AdapterId(adapter.id)))
                await reader.read(setup.engine)
                await self.assert_whole(reader, setup.card)
                await setup.able.drop_adapter(AdapterId(adapter.id))

    @check
    async def test_a_new_version_of_an_adapter_is_held_beside_the_old_one(self) -> None:
        async with self.adaptable(*self.adapters[:1]) as setup:
            old = self.adapters[0]
            new = replace(self.adapters[1], id=old.id, epoch=1)
            request = replace(self.long_requests(setup.card)[0], adapter=old.version)
            async with self.streaming(setup.engine, [request]) as readers:
                await setup.able.load_adapter(new)
                assert held(setup.engine) == {old.version, new.version}
                wish = replace(self.request(setup.card), adapter=new.version)
                seen = [[token.id for token in await collect(setup.engine, wish)]]
            await self.assert_whole(readers[0], setup.card)
            seen += [
                [token.id for token in await collect(setup.engine, replace(wish, adapter=adapter))]
                for adapter in (old.version, None)
            ]
            assert len({tuple(tokens) for tokens in seen}) == 3, "each of its own weights"
            await setup.able.drop_adapter(old.version)
            assert held(setup.engine) == {new.version}
            assert [token.id for token in await collect(setup.engine, wish)] == seen[0]

    @check
    async def test_an_unload_forgets_every_adapter(self) -> None:
        async with self.adaptable(*self.adapters) as setup:
            request = self.with_adapter(setup, 0)
            await setup.engine.evict(deadline_s=0)
            await setup.engine.unload()
            assert setup.engine.status().adapters == ()
            await setup.engine.load(setup.card, setup.store)
            assert setup.engine.status().adapters == ()
            with pytest.raises(UnknownAdapter):
                await collect(setup.engine, request)
            await setup.able.load_adapter(self.adapters[0])
            reader = Reader(request)
            await reader.read(setup.engine)
            await self.assert_whole(reader, setup.card)

    @check
    async def test_an_adapter_needs_its_model(self) -> None:
        async with self.adaptable() as setup:
            with pytest.raises(InstanceError):
                await setup.able.load_adapter(replace(self.adapters[0], model=setup.cards[1].id))
            await setup.engine.evict(deadline_s=0)
            await setup.engine.unload()
            with pytest.raises(InstanceError):
                await setup.able.load_adapter(self.adapters[0])
            assert setup.engine.status().adapters == ()

    @check
    async def test_what_does_not_fit_is_refused_and_disturbs_no_request(self) -> None:
        async with self.adaptable() as setup:
            loaded: list[Adapter] = []

            async def fill() -> None:
                for number in range(1000):
                    adapter = replace(self.adapters[number % len(self.adapters)], id=f"copy-{number}")
                    await setup.able.load_adapter(adapter)
                    loaded.append(adapter)

            with pytest.raises(OutOfMemory):
                await fill()
            assert held(setup.engine) == {adapter.id for adapter in loaded}
            assert len(loaded) <= setup.engine.status().max_adapters
            await setup.able.drop_adapter(AdapterId(loaded[0].id))
            await setup.able.load_adapter(self.adapters[0])
            reader = Reader(self.with_adapter(setup, 0))
            await reader.read(setup.engine)
            await self.assert_whole(reader, setup.card)

    @check
    async def test_a_bad_adapter_is_refused_and_disturbs_no_request(self) -> None:
        if self.bad_adapter is None:
            pytest.skip("no adapter is bad here")
        async with self.adaptable(*self.adapters[:1]) as setup:
            requests = self.long_requests(setup.card, 2)
            requests[0] = replace(requests[0], adapter=AdapterId(self.adapters[0].id))
            async with self.streaming(setup.engine, requests) as readers:
                with pytest.raises((UnsupportedAdapter, StoreError)):
                    await setup.able.load_adapter(self.bad_adapter)
                assert held(setup.engine) == {self.adapters[0].id}
            for reader in readers:
                await self.assert_whole(reader, setup.card)

    @check
    async def test_a_load_of_an_adapter_cancelled_anywhere_can_be_repeated(self) -> None:
        async with self.adaptable() as setup:
            adapter = self.adapters[0]

            async def look() -> None:
                assert held(setup.engine) <= {adapter.id}
                await setup.able.drop_adapter(AdapterId(adapter.id))

            await cancel_everywhere(lambda: setup.able.load_adapter(adapter), look)
            await setup.able.load_adapter(adapter)
            reader = Reader(self.with_adapter(setup, 0))
            await reader.read(setup.engine)
            await self.assert_whole(reader, setup.card)

    @check
    async def test_loading_an_adapter_lets_the_event_loop_go_on(self) -> None:
        async with self.adaptable() as setup:
            async with Heartbeat().beating() as heart:
                await setup.able.load_adapter(self.adapters[0])  # one: several would share the pause out
            assert not heart.blocked, heart

    @check
    async def test_a_lost_engine_forgets_its_adapters(self) -> None:
        if not self.can_lose:
            pytest.skip("write lose(engine) and set can_lose")
        async with self.adaptable(*self.adapters) as setup:
            self.lose(setup.engine)
            await until(lambda: setup.engine.status().state is InstanceState.LOST)
            assert setup.engine.status().adapters == ()
            with pytest.raises(InstanceLost):
                await setup.able.load_adapter(self.adapters[0])

    @check
    async def test_a_stream_left_anywhere_lets_its_adapter_go(self) -> None:
        async with self.adaptable(*self.adapters[:1]) as setup:
            request = replace(self.long_requests(setup.card)[0], adapter=AdapterId(self.adapters[0].id))

            async def read_a_little() -> None:
                async with setup.engine.stream(request) as tokens:
                    for _ in range(4):
                        await anext(tokens)

            async def look() -> None:
                await until(lambda: no_requests(setup.engine))
                await setup.able.drop_adapter(AdapterId(self.adapters[0].id))
                await setup.able.load_adapter(self.adapters[0])

            await cancel_everywhere(read_a_little, look)

    @check
    async def test_loads_of_one_adapter_side_by_side_end_as_one(self) -> None:
        async with self.adaptable() as setup:
            async with anyio.create_task_group() as tasks:
                for _ in range(4):
                    tasks.start_soon(setup.able.load_adapter, self.adapters[0])
            assert setup.engine.status().adapters == (self.adapters[0].id,)

    @check
    async def test_a_listener_is_told_of_every_change_while_adapters_come_and_go(self) -> None:
        async with self.adaptable(*self.adapters[:1]) as setup:
            engine, (one, two) = setup.engine, self.adapters[:2]
            with all_told(engine):
                async with self.streaming(engine, [self.with_adapter(setup, 0), self.request(setup.card)]):
                    await setup.able.load_adapter(two)
                    await setup.able.drop_adapter(two.version)
                await setup.able.drop_adapter(one.version)
                for number in (1, 2, 3, 5):
                    await cancel_at(number, lambda: setup.able.load_adapter(one))
                    await setup.able.drop_adapter(one.version)
                await setup.able.load_adapter(one)
                await engine.evict(deadline_s=0)
                await engine.unload()

    # ------------------------------------------------------------------ for the checks

    @asynccontextmanager
    async def adaptable(self, *adapters: Adapter) -> AsyncGenerator[AdapterSetup]:
        """An engine that serves the first model and holds `adapters`; skips one that can hold none."""
        if not self.adapters:
            pytest.skip("there are no adapters to check with")
        async with self.serving() as setup:
            engine = setup.engine
            if not isinstance(engine, SupportsAdapters) or not engine.status().max_adapters:
                pytest.skip("the engine does not support adapters")
            for adapter in adapters:
                await engine.load_adapter(adapter)
            yield AdapterSetup(engine=engine, store=setup.store, cards=setup.cards, able=engine)

    def with_adapter(self, setup: EngineSetup, index: int) -> Request:
        """A request with one of the adapters."""
        return replace(self.request(setup.card), adapter=AdapterId(self.adapters[index].id))


def held(engine: Engine) -> set[str]:
    """Return the ids of the adapters that an engine holds; raise if one is listed twice."""
    adapters: Sequence[str] = engine.status().adapters
    assert len(adapters) == len(set(adapters)), f"an adapter is listed twice: {adapters}"
    return set(adapters)
