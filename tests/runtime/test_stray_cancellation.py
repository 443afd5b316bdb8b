"""An engine or a store that awaits a cancelled future: that one call has failed, and nothing else ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import Any, Self

import anyio
import pytest
from anyio.lowlevel import checkpoint

from hotswap import Adapter, Fleet, InstanceId, Request, Sampling
from hotswap.abc import ModelCard, TokenStream, WeightStore, WrapperStore
from hotswap.backends.sim import SimEngine
from hotswap.errors import HotswapError, InstanceError, SwapFailed
from hotswap.offline.virtual_time import virtual_time
from hotswap.stray_cancellation import no_stray_cancellation
from tests.runtime.support import PROFILE, Idle, engine_of, idle, models, read, sim_fleet, store_of, until

SOME = Sampling(max_tokens=25, ignore_eos=True)
LONG = Sampling(max_tokens=300, ignore_eos=True)
E0 = InstanceId("e0")


async def await_a_cancelled_future() -> None:
    future = asyncio.get_running_loop().create_future()
    future.cancel()
    await future


class Stray(SimEngine):
    """Awaits a cancelled future in one of its verbs, some times or always."""

    stray, times = "", -1

    def __init__(self, name: str) -> None:
        super().__init__(name, PROFILE, kv_blocks=512, max_requests=8, max_adapters=2)

    async def _in(self, verb: str) -> None:
        if verb == self.stray and self.times:
            self.times -= 1
            await await_a_cancelled_future()

    @asynccontextmanager
    async def __asynccontextmanager__(self) -> AsyncGenerator[Self]:
        await self._in("start")
        async with super().__asynccontextmanager__():
            yield self

    async def load(self, model: ModelCard, store: WeightStore) -> None:
        await self._in("load")
        await super().load(model, store)

    async def preload(self, model: ModelCard, store: WeightStore) -> None:
        await self._in("preload")
        await super().preload(model, store)

    async def evict(self, *, deadline_s: float) -> int:
        await self._in("evict")
        return await super().evict(deadline_s=deadline_s)

    async def unload(self) -> None:
        await self._in("unload")
        await super().unload()

    async def load_adapter(self, adapter: Adapter) -> None:
        await self._in("load_adapter")
        await super().load_adapter(adapter)

    @asynccontextmanager
    async def stream(self, request: Request) -> AsyncGenerator[TokenStream]:
        await self._in("stream")
        async with super().stream(request) as tokens:
            yield tokens
        await self._in("end of a stream")


async def beside(fleet: Fleet, work: Callable[[], Any], error: type[HotswapError] | None) -> None:
    """Do some work that ends by an error, or by none, while a client of another instance reads a stream."""
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(read, fleet, "b", (1, 2), LONG)
        await until(lambda: len(fleet.view().running) == 1)
        if error is None:
            await work()
        else:
            with pytest.raises(error, match="not asked for"):
                await work()
        assert len(fleet.view().running) == 1, "the other client reads on"
    assert fleet.is_open


@pytest.mark.parametrize("verb", ["load", "preload", "evict", "unload"])
@virtual_time
async def test_a_swap_fails_and_works_when_it_is_tried_again(verb: str) -> None:
    engine = Stray("e0")
    async with sim_fleet("a", "b", "c", engines=[engine, engine_of("e1")], scheduler=Idle()) as fleet:
        await fleet.swap("e1", to="b")
        if verb != "load":
            await fleet.swap("e0", to="a")
        engine.stray = verb
        await beside(fleet, lambda: fleet.swap("e0", to="c"), SwapFailed)
        assert fleet.swaps[-1].outcome == "failed"
        engine.stray = ""
        await until(lambda: fleet.view().instance(E0).free)
        await fleet.swap("e0", to="c")
        await read(fleet, "c", (1,), SOME)
        idle(fleet)


@pytest.mark.parametrize("verb", ["stream", "load_adapter"])
@virtual_time
async def test_a_request_is_tried_again_and_gets_an_error_after_three_times(verb: str) -> None:
    engine = Stray("e0")
    options: dict[str, Any] = {"scheduler": Idle(), "adapters": [Adapter("x", "a")]}
    async with sim_fleet("a", "b", engines=[engine, engine_of("e1")], **options) as fleet:
        await fleet.swap("e1", to="b")
        await fleet.swap("e0", to="a")
        for times, error in ((2, None), (3, InstanceError)):
            engine.stray, engine.times = verb, times
            await beside(fleet, lambda: fleet.generate("a", (1,), SOME, adapter="x"), error)
            await fleet.unload("e0")
            await fleet.swap("e0", to="a")
        idle(fleet)


@virtual_time
async def test_a_request_that_has_its_last_token_has_ended() -> None:
    engine = Stray("e0")
    async with sim_fleet("a", "b", engines=[engine, engine_of("e1")], scheduler=Idle()) as fleet:
        await fleet.swap("e1", to="b")
        await fleet.swap("e0", to="a")
        engine.stray = "end of a stream"
        await beside(fleet, lambda: read(fleet, "a", (1,), SOME), None)
        idle(fleet)


@virtual_time
async def test_planned_swaps_and_restarts_are_tried_again_after_a_pause() -> None:
    engine = Stray("e0")
    async with sim_fleet("a", engines=[engine]) as fleet, anyio.create_task_group() as tasks:
        engine.stray = "load"
        tasks.start_soon(read, fleet, "a", (1,), SOME)
        await until(lambda: len(fleet.swaps) > 1)
        engine.stray = ""
        await until(lambda: not fleet.view().waiting)
        engine.stray = "unload"
        engine.lose()
        await anyio.sleep(5.0)
        engine.stray = ""
        await read(fleet, "a", (2,), SOME)


@virtual_time
async def test_an_engine_that_does_not_start_is_not_taken_in() -> None:
    engine = Stray("new")
    async with sim_fleet("a", "b", engines=[engine_of("e1")], scheduler=Idle()) as fleet:
        await fleet.swap("e1", to="b")
        engine.stray = "start"
        await beside(fleet, lambda: fleet.add(engine), InstanceError)
        engine.stray = ""
        await fleet.add(engine)


class StrayStore(WrapperStore):
    """Awaits a cancelled future where the manifest of a model is asked for."""

    async def manifest(self, model: Any) -> Any:
        if model == "c":
            await await_a_cancelled_future()
        return await super().manifest(model)


@virtual_time
async def test_a_model_whose_manifest_cannot_be_had_is_not_added() -> None:
    store = StrayStore(store_of("b", "c"))
    async with sim_fleet(
        engines=[engine_of("e1")], scheduler=Idle(), store=store, models=models("b")
    ) as fleet:
        await fleet.swap("e1", to="b")
        await beside(fleet, lambda: fleet.models.add(models("c")[0]), InstanceError)
        assert len(fleet.models) == 1


# ---------------------------------------------------------------- what is asked for


@virtual_time
async def test_a_cancellation_of_a_scope_passes() -> None:
    with anyio.move_on_after(1.0) as outer, no_stray_cancellation("it"):
        await anyio.sleep(2.0)
    with no_stray_cancellation("it"), anyio.CancelScope() as inner:
        inner.cancel()
        await checkpoint()
    assert outer.cancelled_caught
    assert inner.cancelled_caught


@virtual_time
async def test_a_cancellation_of_the_task_passes() -> None:
    async def work() -> None:
        with no_stray_cancellation("it"):
            await anyio.sleep(2.0)

    with pytest.raises(TimeoutError):
        await asyncio.wait_for(work(), 1.0)
