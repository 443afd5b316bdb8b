"""Engines and stores of the nodes of a Ray cluster, as nodes come and go."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import anyio
import pytest
import ray
from anyio import to_thread

from hotswap import FleetView, InstanceState, Model, ModelId
from hotswap.abc import ModelCard, SupportsPrefetch, WeightStore
from hotswap.backends.nodes import LinkedStore
from hotswap.backends.ray import RayEngine, RayEngines
from hotswap.backends.sim import SimEngine
from hotswap.errors import ConfigError, InstanceLost
from hotswap.policies import StartupTimePlacement
from tests.backends.ray.local_cluster import NODES, LocalCluster
from tests.backends.ray.support import (
    LONG,
    PROMPT,
    engine_on,
    hanging_engine,
    settled,
    sim_engine,
    sim_store,
    until,
)
from tests.patience import PATIENCE_S
from tests.runtime.support import Idle, read, sim_fleet

JOINING = "127.0.0.5"


def _instances(view: FleetView) -> set[str]:
    return {instance.id for instance in view.instances}


def _no_engine() -> SimEngine:
    raise ValueError("there is no device 'cuda:9'")


class _Doomed(SimEngine):
    """An engine that its first load costs for good."""

    def __init__(self) -> None:
        super().__init__("e0")

    async def load(self, model: ModelCard, store: WeightStore) -> None:
        self.lose("its device fails", for_good=True)
        await super().load(model, store)


async def test_a_model_is_placed_where_its_tier_is_fastest_and_elsewhere_when_that_node_dies(
    cluster: LocalCluster,
) -> None:
    engines = RayEngines.per_node(sim_engine, sim_store, silence_s=3.0)
    async with engines, anyio.create_task_group() as tasks:
        stores = engines.stores()
        placement = StartupTimePlacement()
        async with sim_fleet("a", "b", engines=engines.engines, store=stores, scheduler=placement) as fleet:
            tasks.start_soon(engines.follow, fleet)
            near = stores.on("127.0.0.4")
            assert isinstance(near, SupportsPrefetch)
            await near.prefetch(ModelId("a"))
            assert [r.node for r in fleet.view().store.residency if r.tier == "host"] == ["127.0.0.4"]
            await read(fleet, "a", PROMPT, LONG)
            assert [(swap.instance, swap.tier) for swap in fleet.swaps] == [("127.0.0.4-0", "host")]
            async with anyio.create_task_group() as clients:
                clients.start_soon(read, fleet, "a", PROMPT, LONG)
                await until(lambda: fleet.view().running != ())
                clients.start_soon(cluster.lose, "127.0.0.4")
            last = [swap for swap in fleet.swaps if swap.model_after == "a"][-1]
            assert (last.instance, last.tier) in {("127.0.0.2-0", "disk"), ("127.0.0.3-0", "disk")}
            await until(lambda: _instances(fleet.view()) == {"127.0.0.2-0", "127.0.0.3-0"})
            await until(lambda: set(stores.nodes) == {"127.0.0.2", "127.0.0.3"})
            await settled(fleet)
            tasks.cancel_scope.cancel()


async def test_engines_of_a_node_join_the_fleet_with_it_and_leave_with_it(cluster: LocalCluster) -> None:
    engines = RayEngines.per_node(sim_engine, sim_store, labels={"at": JOINING}, silence_s=3.0)
    async with engines, anyio.create_task_group() as tasks:
        assert engines.engines == ()
        stores = engines.stores()
        async with stores, sim_fleet("a", engines=[], scheduler=Idle()) as fleet:
            tasks.start_soon(engines.follow, fleet)
            await cluster.add(JOINING)
            await until(lambda: "127.0.0.5-0" in _instances(fleet.view()))
            assert stores.nodes == (JOINING,)
            await fleet.swap("127.0.0.5-0", to="a")
            await read(fleet, "a", PROMPT, LONG)
            await settled(fleet)
            await cluster.lose(JOINING)
            await until(lambda: fleet.view().instances == ())
            await until(lambda: stores.nodes == ())
            tasks.cancel_scope.cancel()


async def test_gpus_are_shared_out_and_one_more_engine_finds_no_place(cluster: LocalCluster) -> None:
    await cluster.add(JOINING, num_gpus=1)
    engines = RayEngines.per_gpu(sim_engine, sim_store, share=0.5)
    async with engines:
        assert [engine.id for engine in engines.engines] == ["127.0.0.5-0", "127.0.0.5-1"]
        late = RayEngine("late", partial(sim_engine, "late"), sim_store, options={"num_gpus": 1}, start_s=2.0)
        with pytest.raises(InstanceLost, match="within 2 s"):
            async with late:
                pass
    with pytest.raises(ConfigError, match="share"):
        RayEngines.per_gpu(sim_engine, sim_store, share=1.5)


async def test_a_restart_that_finds_no_place_ends_in_an_error(cluster: LocalCluster) -> None:
    await cluster.add(JOINING)
    async with engine_on(JOINING, "e0", silence_s=3.0, start_s=15.0) as engine:
        await cluster.lose(JOINING)
        await until(lambda: engine.status().state is InstanceState.LOST)
        with pytest.raises(InstanceLost, match=f"within 15 s.*{JOINING}"):
            await engine.unload()
        await cluster.add(JOINING)
        await engine.unload()
        assert engine.status().state is InstanceState.EMPTY


@pytest.mark.parametrize(("make", "reason"), [(_no_engine, "no device"), (sys.exit, "SystemExit")])
async def test_an_engine_that_cannot_be_made_is_refused_with_its_reason(
    cluster: LocalCluster, make: Callable[[], SimEngine], reason: str
) -> None:
    with anyio.fail_after(PATIENCE_S), pytest.raises(InstanceLost, match=reason):
        async with RayEngine("e0", make, sim_store, start_s=PATIENCE_S):
            pass


@pytest.mark.parametrize(
    ("options", "locked"),
    [({"num_cpu": 1}, False), ({"num_cpus": -1}, False), ({"label_selector": "x"}, False), ({}, True)],
)
async def test_what_ray_does_not_take_is_an_error_of_the_settings(
    cluster: LocalCluster, options: dict[str, object], locked: bool
) -> None:
    what: Any = threading.Lock() if locked else "e0"  # a lock cannot be pickled
    make = partial(sim_engine, what)
    with pytest.raises(ConfigError, match="no actor of engine 'e0'"):
        async with RayEngine("e0", make, sim_store, options=options):
            pass


@pytest.mark.parametrize("make", [sim_engine, hanging_engine])
async def test_a_start_that_is_cancelled_leaves_no_actor(
    cluster: LocalCluster, make: Callable[[str], SimEngine]
) -> None:
    engines = [RayEngine(f"e{number}", partial(make, f"e{number}"), sim_store) for number in range(6)]
    async with sim_fleet("a", engines=[], scheduler=Idle()) as fleet:
        for number, engine in enumerate(engines):
            with anyio.move_on_after(0.1 * number**2) as limit:
                await fleet.add(engine)
            if not limit.cancelled_caught:
                await fleet.remove(engine.id)
        assert fleet.view().instances == ()
        await cluster.no_actors()
    assert {engine.pid for engine in engines} == {None}


async def test_a_cancelled_start_leaves_an_actor_alone_that_was_there_before(cluster: LocalCluster) -> None:
    first = engine_on("127.0.0.3", "kept", detached=True)
    try:
        async with first:
            pid = first.pid
        for number in range(8):
            later = engine_on("127.0.0.3", "kept", detached=True)
            with anyio.move_on_after(0.01 * number):
                async with later:
                    assert later.pid == pid
        last = engine_on("127.0.0.3", "kept", detached=True)
        async with last:
            assert last.pid == pid
    finally:
        await first.stop()


async def test_an_engine_that_cannot_come_back_is_made_anew_beside_its_store_and_then_in_another_actor(
    cluster: LocalCluster,
) -> None:
    async with RayEngine("e0", _Doomed, sim_store) as engine:
        first, store = engine.pid, sim_store()
        async with LinkedStore("of e0", engine.open_store_channel) as node:
            await node.prefetch(ModelId("a"))
        card = ModelCard.of(Model("a"), await store.manifest(ModelId("a")))
        for is_renewed in (True, False):
            with pytest.raises(InstanceLost, match="its device fails"):
                await engine.load(card, store)
            assert engine.status().lost_because == "its device fails"
            await engine.unload()
            assert engine.status().state is InstanceState.EMPTY
            assert (engine.pid == first) is is_renewed
            async with LinkedStore("of e0", engine.open_store_channel) as node:
                assert ("host" in {of.tier for of in node.view().residency if of.model == "a"}) is is_renewed


async def test_a_placement_group_spreads_engines_over_nodes(cluster: LocalCluster) -> None:
    group = ray.util.placement_group([{"CPU": 1}] * 2, strategy="STRICT_SPREAD")
    try:
        engines = [
            RayEngine(id, partial(sim_engine, id), sim_store, options={"scheduling_strategy": strategy})
            for number, id in enumerate(("e0", "e1"))
            for strategy in [ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(group, number)]
        ]
        async with engines[0], engines[1]:
            first, second = (engine.status().node for engine in engines)
            assert {first, second} < set(NODES)
            assert first != second
    finally:
        await to_thread.run_sync(ray.util.remove_placement_group, group)


async def test_options_that_the_engine_sets_itself_are_refused_by_name(cluster: LocalCluster) -> None:
    for name in ("max_restarts", "lifetime", "name"):
        with pytest.raises(ConfigError, match=name):
            RayEngine("e0", partial(sim_engine, "e0"), sim_store, options={name: 1})
        with pytest.raises(ConfigError, match=name):
            RayEngines.per_node(sim_engine, sim_store, options={name: 1})
    wrong: Any = "num_cpus"
    with pytest.raises(ConfigError, match="options is 'num_cpus'"):
        RayEngine("e0", partial(sim_engine, "e0"), sim_store, options=wrong)
