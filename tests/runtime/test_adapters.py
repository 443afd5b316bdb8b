"""Requests with adapters: loaded where they run, shared, dropped when unused, and never another's tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import anyio
import pytest
from anyio.lowlevel import checkpoint
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from hotswap import Adapter, AdapterId, Fleet, FleetView, InstanceId, Request, Sampling
from hotswap.abc import Router, WrapperEngine
from hotswap.backends.sim import SimEngine
from hotswap.errors import ConfigError, OutOfMemory, ShardMissing, UnknownAdapter, UnsupportedAdapter
from hotswap.offline.virtual_time import virtual_time
from hotswap.policies import AffinityRouter, LeastLoadedRouter
from hotswap.testing.cancel import cancel_everywhere
from tests.runtime.support import PROFILE, Idle, engine_of, expected, idle, sim_fleet, until
from tests.runtime.test_telemetry import Recorder

NAMES = tuple(f"x{number}" for number in range(12))
ADAPTERS = tuple(Adapter(name, model) for model in ("a", "b") for name in NAMES)


class Counting(SimEngine):
    """Writes down what it loads and drops."""

    def __init__(self, name: str, **options: Any) -> None:
        super().__init__(name, PROFILE, kv_blocks=512, max_requests=64, **options)
        self.loaded: list[str] = []
        self.dropped: list[str] = []

    async def load_adapter(self, adapter: Adapter) -> None:
        await super().load_adapter(adapter)
        self.loaded.append(adapter.version)

    async def drop_adapter(self, adapter: AdapterId) -> None:
        await super().drop_adapter(adapter)
        self.dropped.append(adapter)


def fleet_of(*engines: Counting, **options: Any) -> Fleet:
    return sim_fleet("a", "b", engines=engines, **{"adapters": ADAPTERS, "scheduler": Idle(), **options})


async def read(fleet: Fleet, model: str, adapter: str | None, seed: int = 0, max_tokens: int = 30) -> None:
    sampling = Sampling(max_tokens=max_tokens, ignore_eos=True, seed=seed, temperature=1.0)
    async with fleet.stream(model, (1, 2, 3), sampling, adapter=adapter) as stream:
        assert [token.id for token in await stream.collect()] == expected(stream.request)


@virtual_time
async def test_a_request_runs_with_its_adapter_which_is_loaded_once_for_all() -> None:
    engine = Counting("e0")
    async with fleet_of(engine) as fleet:
        await fleet.swap("e0", to="a")
        async with anyio.create_task_group() as clients:
            for seed in range(5):
                for adapter in ("x0", "x1", None):
                    clients.start_soon(read, fleet, "a", adapter, seed)
        assert sorted(engine.loaded) == ["x0", "x1"]
        await read(fleet, "a", "x1")
        assert sorted(engine.loaded) == ["x0", "x1"], "what is unused stays while there is room"
        assert set(fleet.view().instances[0].adapters) == {"x0", "x1"}
        idle(fleet)


@virtual_time
async def test_more_adapters_than_fit_all_have_their_turn() -> None:
    engine = Counting("e0", max_adapters=3)
    async with fleet_of(engine) as fleet:
        await fleet.swap("e0", to="a")
        async with anyio.create_task_group() as clients:
            for seed in range(3):
                for adapter in NAMES:
                    clients.start_soon(read, fleet, "a", adapter, seed)
        assert set(engine.loaded) == set(NAMES)
        idle(fleet)


@virtual_time
async def test_the_longest_unused_goes_first() -> None:
    engine = Counting("e0", max_adapters=2)
    async with fleet_of(engine) as fleet:
        await fleet.swap("e0", to="a")
        for adapter in ("x0", "x1", "x0", "x2", "x0"):
            await read(fleet, "a", adapter)
        assert engine.dropped == ["x1"]
        assert engine.loaded == ["x0", "x1", "x2"]


@virtual_time
async def test_a_popular_adapter_does_not_keep_a_rare_one_out() -> None:
    engine = Counting("e0", max_adapters=1)
    async with fleet_of(engine) as fleet:
        await fleet.swap("e0", to="a")
        served = anyio.Event()

        async def crowd(seed: int) -> None:
            while not served.is_set():
                await read(fleet, "a", "x0", seed)

        async def stranger() -> None:
            await anyio.sleep(0.5)
            await read(fleet, "a", "x1")
            served.set()

        with anyio.fail_after(60):
            async with anyio.create_task_group() as clients:
                for seed in range(4):
                    clients.start_soon(crowd, seed)
                clients.start_soon(stranger)
        idle(fleet)


@virtual_time
async def test_evicted_requests_go_on_elsewhere_with_their_adapter() -> None:
    engines = Counting("e0"), Counting("e1")
    async with fleet_of(*engines) as fleet:
        await fleet.swap("e0", to="a")
        async with anyio.create_task_group() as clients:
            for seed in range(4):
                clients.start_soon(read, fleet, "a", NAMES[seed], seed, 200)
            await until(lambda: fleet.view().instances[0].num_running == 4)
            await anyio.sleep(0.2)
            await fleet.swap("e1", to="a")
            await fleet.swap("e0", to="b")
        assert set(engines[1].loaded) == set(NAMES[:4])
        await read(fleet, "b", "x0")
        await fleet.swap("e0", to="a")
        assert fleet.view().instances[0].adapters == ()
        idle(fleet)


@virtual_time
async def test_who_waits_for_room_moves_on_when_its_instance_is_swapped() -> None:
    engines = Counting("e0", max_adapters=1), Counting("e1")
    async with fleet_of(*engines) as fleet:
        await fleet.swap("e0", to="a")
        async with anyio.create_task_group() as clients:
            for seed in range(3):
                clients.start_soon(read, fleet, "a", NAMES[seed], seed, 100)
            await until(lambda: fleet.view().instances[0].num_requests == 3)
            await anyio.sleep(0.1)
            await fleet.swap("e1", to="a")
            await fleet.swap("e0", to="b")
        assert set(engines[1].loaded) == set(NAMES[:3])
        idle(fleet)


@pytest.mark.parametrize("num_turns", range(0, 60, 6))
@virtual_time
async def test_a_request_that_moves_in_does_not_wait_for_another_that_waits_for_its_adapter_to_go(
    num_turns: int,
) -> None:
    """The move uses the adapter that has to be dropped for the other request; waiting would be a deadlock."""
    engines = Counting("e0"), Counting("e1", max_adapters=1)
    async with fleet_of(*engines) as fleet:
        await fleet.swap("e0", to="a")
        async with anyio.create_task_group() as clients:
            clients.start_soon(read, fleet, "a", "x0", 0, 200)
            await until(lambda: fleet.view().instances[0].num_running == 1)
            await anyio.sleep(0.3)
            await fleet.swap("e1", to="a")
            clients.start_soon(fleet.drain, "e0")
            for _ in range(num_turns):  # wherever the move is then
                await checkpoint()
            clients.start_soon(read, fleet, "a", "x1")
        [move] = fleet.migrations
        assert move.outcome == "done"
        assert move.downtime_s < 0.2
        assert engines[1].loaded in (["x0", "x1"], ["x1", "x0"])
        fleet.reopen("e0")
        idle(fleet)


@virtual_time
async def test_a_lost_instance_takes_no_adapter_with_it() -> None:
    engines = Counting("e0"), Counting("e1")
    async with fleet_of(*engines) as fleet:
        await fleet.swap("e0", to="a")
        await fleet.swap("e1", to="a")
        async with anyio.create_task_group() as clients:
            for seed in range(6):
                clients.start_soon(read, fleet, "a", NAMES[seed % 3], seed, 100)
            await anyio.sleep(0.3)
            engines[0].lose()
        idle(fleet)


class Refusing(Counting):
    """Knows no good of three adapters."""

    async def load_adapter(self, adapter: Adapter) -> None:
        if adapter.id == "x1":
            raise ShardMissing("There is no adapter_model.safetensors; fetch it.")
        if adapter.id == "x2":
            raise UnsupportedAdapter("It has other shapes; train it on this model.")
        if adapter.id == "x3":
            raise OutOfMemory("It finds no room; drop one.")
        await super().load_adapter(adapter)


@virtual_time
async def test_an_adapter_that_cannot_be_had_fails_its_request_alone() -> None:
    engine = Refusing("e0")
    async with fleet_of(engine) as fleet:
        await fleet.swap("e0", to="a")
        async with anyio.create_task_group() as clients:
            for seed, adapter in enumerate([None, "x0", None, "x0"]):
                clients.start_soon(read, fleet, "a", adapter, seed, 100)
            await anyio.sleep(0.2)
            for adapter, error in (("x1", ShardMissing), ("x2", UnsupportedAdapter)):
                with pytest.raises(error):
                    await fleet.generate("a", (1,), adapter=adapter)
        assert (engine.loaded, engine.dropped) == (["x0"], []), (
            "no adapter is dropped for one that cannot be loaded"
        )
        with pytest.raises(OutOfMemory):
            await fleet.generate("a", (1,), adapter="x3")
        assert engine.dropped == ["x0"], "it might have found room beside fewer"
        idle(fleet)


@virtual_time
async def test_an_unknown_adapter_is_refused_at_once() -> None:
    async with fleet_of(Counting("e0"), adapters=[Adapter("sql", "a"), Adapter("law", "b")]) as fleet:
        for adapter in ("law", "poems"):
            with pytest.raises(UnknownAdapter, match="'sql'"):
                await fleet.generate("a", (1,), adapter=adapter)
        with pytest.raises(UnknownAdapter, match="adapter of 'b'"):
            await fleet.generate("a", (1,), adapter="law")
        idle(fleet)


def test_a_set_up_that_cannot_work_is_refused() -> None:
    with pytest.raises(ConfigError, match="'c'"):
        fleet_of(Counting("e0"), adapters=[Adapter("x", "c")])
    with pytest.raises(ConfigError, match="called 'x'"):
        fleet_of(Counting("e0"), adapters=[Adapter("x", "a", "/one"), Adapter("x", "a", "/two")])
    with pytest.raises(ConfigError, match="empty"):
        Adapter("", "a")


async def test_adapters_that_no_engine_can_hold_are_refused_when_the_fleet_opens() -> None:
    for engine in (Counting("e0", max_adapters=0), WrapperEngine(Counting("e0"))):
        with pytest.raises(ConfigError, match="hold"):
            async with sim_fleet("a", "b", engines=[engine], adapters=ADAPTERS):
                pass
        async with sim_fleet("a", "b", engines=[engine]) as fleet:
            with pytest.raises(ConfigError, match="hold"):
                fleet.adapters.add(ADAPTERS[0])


class Stubborn(Router):
    """Wants everything on the first instance that it sees."""

    def __init__(self) -> None:
        self.seen: set[int] = set()

    def route(self, request: Request, fleet: FleetView) -> InstanceId | None:
        self.seen.add(len(fleet.instances))
        serving = fleet.serving(request.model)
        return serving[0].id if serving else None


@pytest.mark.parametrize("router", [Stubborn(), LeastLoadedRouter(), AffinityRouter()])
def test_engines_that_hold_no_adapters_are_not_routed_to(router: Router) -> None:
    @virtual_time
    async def scenario() -> None:
        engines: Sequence[Any] = WrapperEngine(engine_of("e0")), Counting("e1")
        async with sim_fleet(
            "a", engines=engines, adapters=[Adapter("x0", "a")], router=router, scheduler=Idle()
        ) as fleet:
            await fleet.swap("e0", to="a")
            await fleet.swap("e1", to="a")
            await read(fleet, "a", None)
            for _ in range(3):
                await read(fleet, "a", "x0")
            idle(fleet)

    scenario()


@virtual_time
async def test_affinity_keeps_an_adapter_where_it_is() -> None:
    engines = Counting("e0"), Counting("e1")
    async with fleet_of(*engines, router=AffinityRouter()) as fleet:
        for name in ("e0", "e1"):
            await fleet.swap(name, to="a")
        for _ in range(3):
            async with anyio.create_task_group() as clients:
                for seed, adapter in enumerate(NAMES[:4]):
                    clients.start_soon(read, fleet, "a", adapter, seed)
        assert sorted(engines[0].loaded + engines[1].loaded) == sorted(NAMES[:4])


@virtual_time
async def test_a_client_that_leaves_anywhere_leaves_nothing_behind() -> None:
    async with fleet_of(Counting("e0", max_adapters=1)) as fleet:
        await fleet.swap("e0", to="a")
        turn = 0

        async def visit() -> None:
            nonlocal turn
            turn += 1
            await read(fleet, "a", NAMES[turn % 2], max_tokens=4)

        async def look() -> None:
            await until(lambda: fleet.view().instances[0].num_requests == 0)
            idle(fleet)
            await read(fleet, "a", "x5", max_tokens=2)

        await cancel_everywhere(visit, look)


@virtual_time
async def test_loads_of_adapters_can_be_seen() -> None:
    recorder, reader = Recorder(), InMemoryMetricReader()
    meter = MeterProvider(metric_readers=[reader])
    async with fleet_of(Counting("e0"), tracer_provider=recorder.provider, meter_provider=meter) as fleet:
        await fleet.swap("e0", to="a")
        await read(fleet, "a", "x0")
        await read(fleet, "a", "x0")
        data = reader.get_metrics_data()
    (span,) = recorder.spans("hotswap.adapter")
    assert span.attributes is not None
    assert span.attributes["hotswap.adapter"] == "x0"
    assert span.attributes["hotswap.instance"] == "e0"
    assert span.attributes["hotswap.seconds"] == pytest.approx(PROFILE.adapter_s)
    hop = next(hop for hop in recorder.spans("hotswap.hop") if span in recorder.children(hop))
    assert hop.attributes is not None
    assert hop.attributes["hotswap.instance"] == "e0"
    assert data is not None
    metrics = {m.name: m.data for r in data.resource_metrics for s in r.scope_metrics for m in s.metrics}
    assert metrics["hotswap.adapters.held"].data_points[0].value == 1  # type: ignore[union-attr]
    assert metrics["hotswap.adapter.load.duration"].data_points[0].count == 1  # type: ignore[union-attr]
