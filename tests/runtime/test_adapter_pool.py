"""Adapters that are loaded before requests need them, without delaying other requests."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import anyio
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hotswap import Adapter, AdapterId, Fleet, FleetView, InstanceId, ModelId, Sampling
from hotswap.abc import Action, PinAdapters, Scheduler
from hotswap.backends.sim import SimEngine
from hotswap.errors import OutOfMemory, ShardMissing
from hotswap.offline.virtual_time import run, virtual_time
from hotswap.policies import AdapterPool
from tests.runtime.support import PROFILE, Idle, expected, idle, sim_fleet
from tests.runtime.test_telemetry import Recorder

LOAD_S = 0.5
SLOW = replace(PROFILE, adapter_s=LOAD_S)
NAMES = tuple(f"x{number}" for number in range(8))
ADAPTERS = tuple(Adapter(name, model) for model in ("a", "b") for name in NAMES)


class Noting(SimEngine):
    """Takes half a second to load an adapter, and calls a hook before it drops one."""

    def __init__(self, name: str = "e0", **options: Any) -> None:
        super().__init__(name, SLOW, **{"kv_blocks": 512, "max_requests": 64, "max_adapters": 2, **options})
        self.loaded: list[str] = []
        self.dropped: list[str] = []
        self.before_drop: Any = lambda name: None

    async def load_adapter(self, adapter: Adapter) -> None:
        await super().load_adapter(adapter)
        self.loaded.append(adapter.version)

    async def drop_adapter(self, adapter: AdapterId) -> None:
        self.before_drop(adapter)
        await super().drop_adapter(adapter)
        self.dropped.append(adapter)


class Wants(Scheduler):
    """Wants every instance to hold what it is told, whatever that is."""

    def __init__(self, *adapters: str, instance: str = "e0", model: str = "a") -> None:
        self.instance, self.model, self.adapters = instance, model, adapters

    def plan(self, fleet: FleetView) -> Sequence[Action]:
        names = tuple(map(AdapterId, self.adapters))
        return [PinAdapters(instance=InstanceId(self.instance), model=ModelId(self.model), adapters=names)]


def fleet_of(*engines: SimEngine, scheduler: Scheduler, **options: Any) -> Fleet:
    return sim_fleet("a", "b", engines=engines, scheduler=scheduler, **{"adapters": ADAPTERS, **options})


async def ttft_s(fleet: Fleet, adapter: str | None, *, model: str = "a", max_tokens: int = 5) -> float:
    """Ask for a generation, compare it with the undisturbed one, and return how long its first token took."""
    asked_s, first_s, seen = anyio.current_time(), None, list[int]()
    sampling = Sampling(max_tokens=max_tokens, ignore_eos=True)
    async with fleet.stream(model, (1, 2, 3), sampling, adapter=adapter) as stream:
        async for token in stream:
            first_s = anyio.current_time() if first_s is None else first_s
            seen.append(token.id)
        assert seen == expected(stream.request)
    assert first_s is not None
    return first_s - asked_s


async def asked(fleet: Fleet, times: Sequence[tuple[float, str]]) -> dict[str, list[float]]:
    """Play requests at their times from now, and return what each adapter's waited for their first tokens."""
    start_s = anyio.current_time()
    waited: dict[str, list[float]] = {}

    async def ask(name: str) -> None:
        waited.setdefault(name, []).append(await ttft_s(fleet, name))

    async with anyio.create_task_group() as clients:
        for at_s, name in times:
            await anyio.sleep_until(start_s + at_s)
            clients.start_soon(ask, name)
    return waited


# ------------------------------------------------------------------ what is popular is there sooner

# Every three seconds the popular one, and between two of its requests two others, each time other ones.
CROWDED = sorted(
    [(3.0 * n, "x0") for n in range(20)]
    + [(3.0 * n + 1 + at, NAMES[1 + (2 * n + at) % 7]) for n in range(20) for at in (0, 1)]
)


@pytest.mark.parametrize("pooled", [True, False])
def test_a_popular_adapter_is_there_when_it_is_asked_for(pooled: bool) -> None:
    """With two places, the least recently requested adapter is dropped: without a pool, the popular one."""

    @virtual_time
    async def scenario() -> None:
        engine = Noting()
        async with fleet_of(engine, scheduler=AdapterPool() if pooled else Idle()) as fleet:
            await fleet.swap("e0", to="a")
            waited = await asked(fleet, CROWDED)
            idle(fleet)
        assert len(waited["x0"]) == 20
        if pooled:
            assert max(waited["x0"][3:]) < LOAD_S
            assert engine.loaded.count("x0") <= 3
        else:
            assert min(waited["x0"]) > LOAD_S
        assert max(max(times) for times in waited.values()) < 3 * LOAD_S, "the others wait no longer for it"

    scenario()


@virtual_time
async def test_after_a_swap_the_popular_ones_are_back_before_a_request_asks() -> None:
    async with fleet_of(Noting(), scheduler=AdapterPool()) as fleet:
        await fleet.swap("e0", to="a")
        await asked(fleet, [(n / 2, NAMES[n % 2]) for n in range(8)])
        await fleet.swap("e0", to="b")
        await fleet.swap("e0", to="a")
        await anyio.sleep(3 * LOAD_S)
        assert set(fleet.view().instances[0].adapters) == {"x0", "x1"}
        assert await ttft_s(fleet, "x1") < LOAD_S


@virtual_time
async def test_what_comes_regularly_is_there_before_it_comes() -> None:
    """`x0` comes every half minute; others, each once, push it out in between."""
    times = sorted(
        [(30.0 * n, "x0") for n in range(5)]
        + [(at_s, NAMES[1 + n]) for n, at_s in enumerate((11, 17, 38, 44, 63, 77, 101))]
    )
    pool = AdapterPool(least_popularity=100, lead_s=3)
    async with fleet_of(Noting(max_adapters=1), scheduler=pool) as fleet:
        await fleet.swap("e0", to="a")
        waited = (await asked(fleet, times))["x0"]
    assert all(seconds > LOAD_S for seconds in waited[:2]), "its rhythm is not known yet"
    assert all(seconds < LOAD_S for seconds in waited[2:])


# ------------------------------------------------------------------ cost for other requests


@virtual_time
async def test_adapters_in_use_stay_and_requests_that_need_an_adapter_go_first() -> None:
    engine = Noting(max_adapters=2)
    async with fleet_of(engine, scheduler=Wants("x6", "x7"), interval_s=0.1) as fleet:
        await fleet.swap("e0", to="a")
        await anyio.sleep(3 * LOAD_S)
        assert engine.loaded == ["x6", "x7"]
        async with anyio.create_task_group() as clients:
            for name in ("x0", "x1"):
                clients.start_soon(lambda name: ttft_s(fleet, name, max_tokens=400), name)
            await anyio.sleep(4 * LOAD_S)
            assert set(fleet.view().instances[0].adapters) == {"x0", "x1"}
            assert engine.dropped == ["x7", "x6"], "the least wanted went first"
        await anyio.sleep(3 * LOAD_S)
        assert set(fleet.view().instances[0].adapters) == {"x6", "x7"}, "and came back afterwards"
        idle(fleet)


@virtual_time
async def test_what_a_request_waits_for_is_not_displaced_by_a_plan() -> None:
    engine, plans = Noting(max_adapters=1, max_requests=1), Wants()
    async with fleet_of(engine, scheduler=plans, interval_s=0.1) as fleet:
        await fleet.swap("e0", to="a")
        await ttft_s(fleet, "x0")
        plans.adapters = ("x6",)
        async with anyio.create_task_group() as clients:
            clients.start_soon(lambda: ttft_s(fleet, None, max_tokens=300))
            clients.start_soon(lambda: ttft_s(fleet, "x0"))
            await anyio.sleep(4 * LOAD_S)
            assert fleet.view().instances[0].adapters == ("x0",)
        await anyio.sleep(2 * LOAD_S)
        assert engine.loaded == ["x0", "x6"]


@virtual_time
async def test_a_request_waits_for_one_load_ahead_at_most() -> None:
    engine = Noting(max_adapters=8)
    async with fleet_of(engine, scheduler=Wants(*NAMES[:6]), interval_s=0.1) as fleet:
        await fleet.swap("e0", to="a")
        await anyio.sleep(0.2)
        assert await ttft_s(fleet, "x7") < 2 * LOAD_S + 0.1
        assert len(engine.loaded) == 2
        await anyio.sleep(6 * LOAD_S)
        assert sorted(engine.loaded) == sorted([*NAMES[:6], "x7"])


_STEPS = st.lists(
    st.tuples(
        st.floats(0.0, 1.0),
        st.sampled_from(["x0", "x1", None]) | st.lists(st.sampled_from(NAMES), max_size=3, unique=True),
    ),
    max_size=30,
)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(_STEPS)
def test_no_load_ahead_ever_displaces_what_a_request_has(steps: list[tuple[float, Any]]) -> None:
    """Two adapters are asked for where there are two places, and plans want all kinds of others.

    Requests have an adapter also before they get a place, and on their way to it.
    """

    async def scenario() -> None:
        engine, plans = Noting(max_adapters=2, max_requests=1), Wants()
        async with fleet_of(engine, scheduler=plans, interval_s=0.05) as fleet:

            def check(adapter: AdapterId) -> None:
                (asked_for,) = [a.num_requests for a in fleet.view().adapters if a.id == adapter] or [0]
                assert not asked_for, f"{adapter} was dropped while {asked_for} requests had it"

            engine.before_drop = check
            await fleet.swap("e0", to="a")
            async with anyio.create_task_group() as clients:
                for after_s, what in steps:
                    await anyio.sleep(after_s)
                    if isinstance(what, list):
                        plans.adapters = tuple(what)
                    else:
                        clients.start_soon(lambda name: ttft_s(fleet, name, max_tokens=60), what)
            idle(fleet)

    run(scenario)


# ------------------------------------------------------------------ what cannot be done


class Refusing(Noting):
    """Has no files of one adapter, and no room for another."""

    async def load_adapter(self, adapter: Adapter) -> None:
        if adapter.id == "x1":
            raise ShardMissing("There is no adapter_model.safetensors; fetch it.")
        if adapter.id == "x2":
            raise OutOfMemory("It finds no room; drop one.")
        await super().load_adapter(adapter)


@virtual_time
async def test_what_cannot_be_had_is_said_once_and_the_rest_is_loaded(
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = Refusing(max_adapters=4)
    with caplog.at_level(logging.WARNING, "hotswap"):
        async with fleet_of(engine, scheduler=Wants("x1", "x0"), interval_s=0.1) as fleet:
            await fleet.swap("e0", to="a")
            await anyio.sleep(5)
            assert engine.loaded == ["x0"]
            with pytest.raises(ShardMissing):
                await fleet.generate("a", (1,), adapter="x1")
    assert len(caplog.records) == 1


@virtual_time
async def test_a_plan_for_what_has_gone_or_been_swapped_is_dropped() -> None:
    engine, plans = Noting(), Wants("x0", model="b")
    async with fleet_of(engine, scheduler=plans, interval_s=0.1) as fleet:
        await fleet.swap("e0", to="a")
        for wrong in (Wants("x0", model="b"), Wants("x0", instance="gone"), Wants("unknown", "x0@3")):
            plans.instance, plans.model, plans.adapters = wrong.instance, wrong.model, wrong.adapters
            await anyio.sleep(3 * LOAD_S)
        assert engine.loaded == []
        plans.adapters = ("x0", "x1")
        await anyio.sleep(LOAD_S)
        await fleet.swap("e0", to="b")  # in the middle of a load
        await anyio.sleep(2 * LOAD_S)
        assert fleet.view().instances[0].adapters == ()
        await fleet.adapters.remove("a", "x1")
        await fleet.swap("e0", to="a")
        await anyio.sleep(3 * LOAD_S)
        assert fleet.view().instances[0].adapters == ("x0",)
        engine.lose()
        await anyio.sleep(2)
        idle(fleet)


@virtual_time
async def test_an_adapter_removed_while_it_is_loaded_ahead_is_not_kept() -> None:
    async with fleet_of(Noting(), scheduler=Wants("x0"), interval_s=0.1) as fleet:
        await fleet.swap("e0", to="a")
        await anyio.sleep(LOAD_S / 2)
        await fleet.adapters.remove("a", "x0")
        await anyio.sleep(2 * LOAD_S)
        assert fleet.view().instances[0].adapters == ()


# ------------------------------------------------------------------ what views say


@virtual_time
async def test_views_say_who_asks_for_an_adapter_how_much_and_how_often() -> None:
    async with fleet_of(Noting(max_requests=1), scheduler=Idle()) as fleet:
        assert fleet.view().adapters == ()
        await fleet.swap("e0", to="a")
        start_s = anyio.current_time()
        async with anyio.create_task_group() as clients:
            for number in range(3):
                await anyio.sleep_until(start_s + 10.0 * number)
                clients.start_soon(lambda: ttft_s(fleet, "x0", max_tokens=3500))
            await anyio.sleep(1)
            (seen,) = fleet.view().adapters
            assert (seen.id, seen.model, seen.num_running, seen.num_waiting) == ("x0", "a", 1, 2)
            assert seen.gap_s == pytest.approx(10)
            assert seen.asked_s == pytest.approx(start_s + 20)
            weights = [0.5 ** (age_s / 60) for age_s in (21, 11, 1)]
            assert seen.popularity == pytest.approx(sum(weights))
        (after,) = fleet.view().adapters
        assert after.num_requests == 0
        assert after.popularity < seen.popularity
        await fleet.adapters.remove("a", "x0")
        assert fleet.view().adapters == ()


@virtual_time
async def test_a_new_version_is_as_popular_as_the_old_one_and_has_requests_of_its_own() -> None:
    old, new = Adapter("sql", "a", "/sql/1"), Adapter("sql", "a", "/sql/2")
    async with fleet_of(Noting(), scheduler=Idle(), adapters=[old]) as fleet:
        await fleet.swap("e0", to="a")
        async with anyio.create_task_group() as clients:
            clients.start_soon(lambda: ttft_s(fleet, "sql", max_tokens=300))
            await anyio.sleep(1)
            await fleet.adapters.update(new)
            (seen,) = fleet.view().adapters
            assert (seen.id, seen.num_requests) == ("sql@1", 0)
            assert seen.popularity > 0.9


@virtual_time
async def test_loads_ahead_can_be_seen() -> None:
    recorder = Recorder()
    async with fleet_of(Noting(), scheduler=Wants("x0"), tracer_provider=recorder.provider) as fleet:
        await fleet.swap("e0", to="a")
        await anyio.sleep(2)
    (load,) = recorder.spans("hotswap.adapter")
    (hold,) = [span for span in recorder.spans("hotswap.adapter.pin") if load in recorder.children(span)]
    assert hold.attributes is not None
    assert hold.attributes["hotswap.instance"] == "e0"
