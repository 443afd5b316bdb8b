"""An engine that is watched tells of every change of its status."""

from __future__ import annotations

import threading
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Any, Literal

import anyio
import pytest
from anyio.lowlevel import checkpoint

from hotswap.engine import Engine
from hotswap.errors import InstanceLost, PromptTooLong, RequestEvicted, StoreError, UnknownAdapter
from hotswap.request import AdapterId, Request
from hotswap.testing.cancel import cancel_at
from hotswap.testing.conformance.engine_preload import able
from hotswap.testing.conformance.engine_suite import EngineSuite, Reader, cards, collect, no_requests
from hotswap.testing.conformance.engine_weights import FailingStore, GatedStore
from hotswap.testing.conformance.suite import check, until
from hotswap.testing.conformance.turns import each_turn
from hotswap.view import EngineStatus, InstanceState

__all__ = ["Listener", "StatusChecks", "all_told"]

# What `StatusListener.load_changed` is about.
LOAD = (
    "num_running",
    "num_waiting",
    "num_prefill_tokens",
    "num_free_kv_blocks",
    "num_next_kv_blocks",
    "kept_since_s",
    "preempted",
)


class Listener:
    """Asks for an engine's status when it was told of a change, and notes a change that it was not told of.

    Attributes:
        status: As it was when the listener asked last.
        num_calls: How often the engine has called it.
        fault: The first thing that went wrong; empty so far if nothing did.
    """

    def __init__(self, engine: Engine) -> None:
        self.status, self.num_calls, self.fault = engine.status(), 0, ""
        self._engine, self._thread = engine, threading.get_ident()
        self._told: Literal["nothing", "load", "state"] = "nothing"

    def load_changed(self) -> None:
        """See `StatusListener`."""
        self._note("load" if self._told == "nothing" else self._told)

    def state_changed(self) -> None:
        """See `StatusListener`."""
        self._note("state")

    def look(self) -> None:
        """Compare the status with what it may be by what was told since the last look."""
        told, self._told = self._told, "nothing"  # before the look, which may tell as well
        before, self.status = self.status, self._engine.status()
        if told == "state" or self.fault:
            return
        known = replace(before, **_load(self.status)) if told == "load" else before
        if known != self.status:
            self.fault = (
                f"the status changed, and the listener was told of {told}: {_difference(known, self.status)}"
            )

    def _note(self, told: Literal["load", "state"]) -> None:
        self._told = told
        self.num_calls += 1
        if threading.get_ident() != self._thread:
            self.fault = self.fault or f"{threading.current_thread().name!r} called the listener"


@contextmanager
def all_told(*engines: Engine) -> Generator[tuple[Listener, ...]]:
    """Raise at the end if a change of an engine was not told in the turn of the event loop in which it came.

    Skips the check if an engine tells nothing.
    """
    listeners = tuple(Listener(engine) for engine in engines)
    for engine, listener in zip(engines, listeners, strict=True):
        if not engine.watch(listener):
            pytest.skip("the engine tells of no changes")

    def look() -> None:
        for listener in listeners:
            listener.look()

    with each_turn(look):
        yield listeners
    look()
    for listener in listeners:
        assert not listener.fault, listener.fault


class StatusChecks(EngineSuite):
    """Checks of `Engine.watch`."""

    @check
    async def test_a_listener_is_told_of_every_change_while_requests_run(self) -> None:
        async with self.serving() as setup:
            engine, card = setup.engine, setup.card
            most = engine.status().max_tokens
            assert most is not None
            half = min(most, card.max_context_tokens) // 2 - 4
            with all_told(engine):
                # Two fill the KV blocks, so that one waits and one is preempted, where the context allows.
                async with self.streaming(engine, [self.request(card, half, salt=salt) for salt in range(3)]):
                    pass
                async with self.streaming(engine, self.long_requests(card, 1)):
                    for request in (self.request(card, salt=7), self.request(card, salt=8, max_tokens=1)):
                        await collect(engine, request)
                    for num_read in (0, 3):
                        await read_some(engine, self.long_requests(card)[0], num_read)
                    with pytest.raises(UnknownAdapter):
                        await collect(
                            engine, replace(self.request(card), adapter=AdapterId("no-such-adapter"))
                        )
                    with pytest.raises(PromptTooLong):
                        await collect(engine, self.request(card, most + 1))
                await until(lambda: no_requests(engine))

    @check
    async def test_a_listener_is_told_of_requests_that_are_cancelled(self) -> None:
        async with self.serving() as setup:
            with all_told(setup.engine):
                for number in (1, 2, 3, 5, 8):
                    await cancel_at(number, lambda: collect(setup.engine, self.long_requests(setup.card)[0]))
                await until(lambda: no_requests(setup.engine))

    @check
    async def test_a_listener_is_told_of_every_change_while_models_come_and_go(self) -> None:
        async with self.idle() as setup:
            engine = setup.engine
            with all_told(engine):
                for num_chunks in (0, 1):
                    with pytest.raises(StoreError, match="planted"):
                        await engine.load(setup.card, FailingStore(setup.store, num_chunks))
                for card in setup.cards[:2]:
                    await engine.load(card, setup.store)
                    async with self.streaming(engine, self.long_requests(card, 2)):
                        await engine.unload()
                await engine.unload()

    @check
    async def test_a_listener_is_told_of_loads_that_are_cancelled(self) -> None:
        async with self.idle() as setup:
            engine = setup.engine
            with all_told(engine):
                for number in (1, 2, 3, 5, 8, 13):
                    await cancel_at(number, lambda: engine.load(setup.card, setup.store))
                    await engine.unload()

    @check
    async def test_a_listener_is_told_of_every_change_while_requests_are_evicted(self) -> None:
        async with self.serving() as setup:
            engine = setup.engine
            with all_told(engine):
                async with self.streaming(engine, self.long_requests(setup.card, 2)):
                    await cancel_at(1, lambda: engine.evict(deadline_s=50.0))
                    await cancel_at(2, lambda: engine.evict(deadline_s=50.0))
                    await engine.evict(deadline_s=0.01)
                with pytest.raises(RequestEvicted):
                    await collect(engine, self.request(setup.card))
                await until(lambda: no_requests(engine))
                await engine.unload()

    @check
    async def test_a_listener_is_told_of_every_change_while_a_model_is_staged(self) -> None:
        async with self.serving() as setup:
            engine, stager = setup.engine, able(setup)
            with all_told(engine):
                async with self.streaming(engine, self.long_requests(setup.card, 2)):
                    with pytest.raises(StoreError, match="planted"):
                        await stager.preload(setup.cards[1], FailingStore(setup.store, 1))
                    for number in (1, 2, 3, 5):
                        await cancel_at(number, lambda: stager.preload(setup.cards[1], setup.store))
                        await stager.drop_preload()
                    await stager.preload(setup.cards[1], setup.store)
                    await engine.evict(deadline_s=0)
                await engine.unload()
                await engine.load(setup.cards[1], setup.store)
                await collect(engine, self.request(setup.cards[1]))

    @check
    async def test_a_listener_is_told_of_a_loss_and_of_what_follows(self) -> None:
        if not self.can_lose:
            pytest.skip("write lose(engine) and set can_lose")
        async with self.serving() as setup:
            engine = setup.engine
            with all_told(engine):
                async with self.streaming(engine, self.long_requests(setup.card)):
                    self.lose(engine)
                await until(lambda: engine.status().state is InstanceState.LOST)
                try:
                    await engine.unload()
                except InstanceLost:  # some do not come back
                    return
                store = GatedStore(setup.store)

                async def lose_it() -> None:
                    await store.reached.wait()
                    self.lose(engine)
                    store.gate.set()

                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(lose_it)
                    with pytest.raises(InstanceLost):
                        await engine.load(setup.card, store)

    @check
    async def test_a_listener_is_told_of_every_change_when_the_engine_is_left(self) -> None:
        async with self.make_store() as store, anyio.create_task_group() as tasks:
            card, *_ = await cards(self.models, store)
            async with self.make_engine() as engine:
                with all_told(engine) as (listener,):
                    await engine.load(card, store)
                    reader = Reader(self.long_requests(card)[0])
                    tasks.start_soon(reader.read, engine)
                    await reader.began.wait()
                listener.look()
            listener.look()
            assert not listener.fault, listener.fault

    @check
    async def test_a_second_listener_takes_the_place_of_the_first(self) -> None:
        async with self.serving() as setup:
            with all_told(setup.engine) as (first,):
                pass
            num_calls = first.num_calls
            with all_told(setup.engine) as (second,):
                await collect(setup.engine, self.request(setup.card))
            assert first.num_calls == num_calls
            assert second.num_calls > 0


async def read_some(engine: Engine, request: Request, num_tokens: int) -> None:
    """Read the first tokens of a request and leave its stream."""
    async with engine.stream(request) as tokens:
        await checkpoint()
        for _ in range(num_tokens):
            await anext(tokens)


def _load(status: EngineStatus) -> dict[str, Any]:
    return {name: getattr(status, name) for name in LOAD}


def _difference(before: EngineStatus, now: EngineStatus) -> str:
    old, new = asdict(before), asdict(now)
    return ", ".join(f"{name} {old[name]!r} -> {new[name]!r}" for name in old if old[name] != new[name])
