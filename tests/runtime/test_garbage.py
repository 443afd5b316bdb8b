"""A fleet that closed is garbage: no meter, tracer or task keeps it, its engines or its store."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import anyio
import pytest
from opentelemetry.metrics import MeterProvider, NoOpMeterProvider
from opentelemetry.sdk.metrics import MeterProvider as SdkMeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider

from hotswap import Fleet, Sampling
from hotswap.errors import HotswapError
from hotswap.offline.virtual_time import run
from tests.runtime.support import Idle, engine_of, read, sim_fleet, store_of, until

SOME = Sampling(max_tokens=20, ignore_eos=True)

Alive = dict[str, weakref.ref[Any]]


def sdk_meters() -> MeterProvider:
    return SdkMeterProvider([InMemoryMetricReader()])


def default_meters() -> MeterProvider | None:
    return None


METERS = [default_meters, NoOpMeterProvider, sdk_meters]


def collected(alive: Alive) -> list[str]:
    """The names of those that are still there after a collection."""
    gc.collect()
    return sorted(name for name, ref in alive.items() if ref() is not None)


def parts(fleet: Fleet, **others: object) -> Alive:
    return {"fleet": weakref.ref(fleet), **{name: weakref.ref(part) for name, part in others.items()}}


async def swapped_and_served(**options: Any) -> Alive:
    engines, store = [engine_of("e0"), engine_of("e1")], store_of("a", "b")
    async with sim_fleet("a", "b", engines=engines, store=store, scheduler=Idle(), **options) as fleet:
        for engine in engines:
            await fleet.swap(engine.id, to="a")
        await read(fleet, "a", (1, 2), SOME)
        await fleet.swap("e0", to="b")
        await read(fleet, "b", (1, 2), SOME)
    return parts(fleet, e0=engines[0], e1=engines[1], store=store)


async def moved_and_replaced(**options: Any) -> Alive:
    engines, new = [engine_of("e0"), engine_of("e1")], engine_of("new")
    async with sim_fleet("a", engines=engines, scheduler=Idle(), **options) as fleet:
        for engine in engines:
            await fleet.swap(engine.id, to="a")
        async with anyio.create_task_group() as clients:
            clients.start_soon(read, fleet, "a", (1,), Sampling(max_tokens=200, ignore_eos=True))
            await until(lambda: len(fleet.view().running) == 1)
            await fleet.replace("e0", by=new)
    return parts(fleet, e0=engines[0], e1=engines[1], new=new)


async def broken_off(**options: Any) -> Alive:
    engine = engine_of("e0")
    fleet = sim_fleet("a", engines=[engine], scheduler=Idle(), **options)
    alive = parts(fleet, engine=engine)
    try:
        async with fleet:
            await fleet.swap("e0", to="a")
            async with fleet.stream("a", (1,), SOME) as stream:
                await anext(stream)
                raise ZeroDivisionError("the block's own error")
    except ZeroDivisionError:
        return alive


async def never_opened(**options: Any) -> Alive:
    engine = engine_of("e0")
    fleet = sim_fleet("a", engines=[engine], store=store_of("b"), **options)
    alive = parts(fleet, engine=engine)
    try:
        async with fleet:
            raise AssertionError("it opened without its model")
    except HotswapError:
        return alive


LIVES = [swapped_and_served, moved_and_replaced, broken_off, never_opened]


@pytest.mark.parametrize("meters", METERS)
@pytest.mark.parametrize("life", LIVES)
def test_a_fleet_that_ended_is_collected_with_its_engines_and_store(
    life: Callable[..., Any], meters: Callable[[], MeterProvider | None]
) -> None:
    provider = meters()  # applications keep it after the fleet
    assert collected(run(lambda: life(meter_provider=provider))) == []


@pytest.mark.parametrize("life", LIVES)
def test_a_tracer_keeps_no_fleet_that_ended(life: Callable[..., Any]) -> None:
    provider = TracerProvider()
    alive = run(lambda: life(tracer_provider=provider, meter_provider=NoOpMeterProvider()))
    assert collected(alive) == []


def test_a_hundred_fleets_one_after_the_other_leave_nothing_behind() -> None:
    provider = sdk_meters()

    async def one_after_the_other() -> Alive:
        alive: Alive = {}
        for number in range(100):
            fleet = sim_fleet("a", engines=1, meter_provider=provider)
            async with fleet:
                alive[f"fleet {number}"] = weakref.ref(fleet)
            del fleet
        return alive

    assert collected(run(one_after_the_other)) == []


@pytest.mark.parametrize("meters", METERS)
def test_an_engine_that_was_removed_is_collected_while_its_fleet_is_open(
    meters: Callable[[], MeterProvider | None],
) -> None:
    async def scenario() -> list[str]:
        async with sim_fleet("a", engines=1, scheduler=Idle(), meter_provider=meters()) as fleet:
            engine = engine_of("more")
            await fleet.add(engine)
            await fleet.swap("more", to="a")
            await read(fleet, "a", (1,), SOME)
            await fleet.remove("more")
            alive: Alive = {"engine": weakref.ref(engine)}
            del engine
            await anyio.sleep(10)
            return collected(alive)

    assert run(scenario) == []
