"""The policies by freeness in a fleet: queues dissolve, instances come and go, and no token is lost."""

from __future__ import annotations

from dataclasses import replace

import anyio

from hotswap import Fleet, InstanceId, InstanceState, Sampling
from hotswap.offline.virtual_time import virtual_time
from hotswap.policies import (
    Chain,
    FreenessAutoscaler,
    FreenessRouter,
    RoundRobinRouter,
    VirtualUsageRescheduler,
)
from tests.runtime.support import engine_of, idle, read, sim_fleet, until

LONG = Sampling(max_tokens=300, ignore_eos=True)
E0, E1 = InstanceId("e0"), InstanceId("e1")


def serving(fleet: Fleet) -> list[InstanceId]:
    return [i.id for i in fleet.view().instances if i.state is InstanceState.SERVING]


@virtual_time
async def test_requests_leave_an_instance_whose_memory_runs_out() -> None:
    engines = [engine_of(f"e{n}", kv_blocks=64) for n in range(2)]
    async with sim_fleet(
        "a", engines=engines, router=FreenessRouter(), scheduler=VirtualUsageRescheduler(), interval_s=0.1
    ) as fleet:
        await fleet.swap("e0", to="a")
        async with anyio.create_task_group() as clients:
            for number in range(6):  # of 25 blocks each in the end, of 64
                clients.start_soon(read, fleet, "a", (1 + number,) * 100, LONG)
            await until(lambda: fleet.view().instance(E0).num_waiting > 0)
            await fleet.swap("e1", to="a")
            await until(lambda: len(fleet.migrations) >= 2)
            assert {move.source for move in fleet.migrations} == {E0}
            assert {move.method for move in fleet.migrations} == {"kv"}
        assert any(move.outcome == "done" for move in fleet.migrations)
        idle(fleet)


@virtual_time
async def test_a_fleet_grows_under_load_and_shrinks_by_moves() -> None:
    policy = Chain(FreenessAutoscaler(interval_s=1.0, drain_s=100.0), VirtualUsageRescheduler())
    engines = [engine_of(f"e{n}", kv_blocks=256, max_requests=16) for n in range(3)]
    async with sim_fleet(
        "a", engines=engines, router=RoundRobinRouter(), scheduler=policy, interval_s=0.1
    ) as fleet:
        await until(lambda: serving(fleet) == [E0])
        async with anyio.create_task_group() as clients:
            for number in range(14):
                clients.start_soon(read, fleet, "a", (1 + number,) * 150, LONG)
            await until(lambda: len(serving(fleet)) == 3)
            for number in range(3):  # one for each, and alone before long
                clients.start_soon(read, fleet, "a", (40 + number,) * 10, replace(LONG, max_tokens=900))
            await until(lambda: len(serving(fleet)) == 1)
            assert len(fleet.view().running) == 3
        downs = [record for record in fleet.swaps if record.model is None]
        assert [record.num_evicted for record in downs] == [0, 0]
        assert downs[1].started_s >= downs[0].started_s + downs[0].seconds + 1.0
        left = [(m.source, m.outcome) for m in fleet.migrations if m.started_s >= downs[0].started_s]
        assert left == [(record.instance, "done") for record in downs]
        idle(fleet)


@virtual_time
async def test_a_drain_of_a_fleet_in_turns_spreads_what_it_moves() -> None:
    async with sim_fleet(
        "a", engines=3, router=RoundRobinRouter(), scheduler=VirtualUsageRescheduler()
    ) as fleet:
        for name in ("e0", "e1", "e2"):
            await fleet.swap(name, to="a")
        async with anyio.create_task_group() as clients:
            for number in range(12):
                clients.start_soon(read, fleet, "a", (1 + number, 2), LONG)
            await until(lambda: [i.num_running for i in fleet.view().instances] == [4, 4, 4])
            await fleet.drain("e0")
            assert [i.num_requests for i in fleet.view().instances] == [0, 6, 6]
        idle(fleet)
