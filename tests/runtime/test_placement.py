"""Placements as a fleet carries them out: victims move, and no request loses a token."""

from __future__ import annotations

from random import Random

import anyio
import pytest

from hotswap import Fleet, MigrationLimits, Sampling
from hotswap.offline.virtual_time import virtual_time
from hotswap.policies import (
    Chain,
    KeepAliveSwap,
    RestoreMinReplicas,
    ShepherdSwap,
    StartupCosts,
    StartupTimePlacement,
    StaticPinning,
    WeightedLoadSwap,
)
from tests.runtime.support import engine_of, idle, models, read, sim_fleet, until

LONG = Sampling(max_tokens=400, ignore_eos=True)
SHORT = Sampling(max_tokens=20, ignore_eos=True)


def running(fleet: Fleet, model: str) -> int:
    return sum(i.num_running for i in fleet.view().instances if i.model == model)


@virtual_time
async def test_victims_move_to_another_replica_and_the_model_starts_in_their_place() -> None:
    costs = StartupCosts()
    fleet = sim_fleet(
        "a",
        "b",
        models=[*models("a"), *models("b", min_replicas=1)],
        scheduler=Chain(RestoreMinReplicas(), StartupTimePlacement(costs=costs)),
        interval_s=0.1,
        on_swap=costs.learn_swap,
        on_migration=costs.learn_move,
    )
    async with fleet, anyio.create_task_group() as clients:
        await until(lambda: fleet.view().instance(fleet.view().instances[0].id).model == "b")
        await fleet.swap("e1", to="b")
        for turn in range(6):
            clients.start_soon(read, fleet, "b", (turn, 9), LONG)
        await until(lambda: running(fleet, "b") == 6)
        clients.start_soon(read, fleet, "a", (7, 8, 9), SHORT)
        await until(lambda: running(fleet, "a") == 1)
        assert [record.outcome for record in fleet.migrations] == ["done"] * 3
        swap = fleet.swaps[-1]
        assert (swap.model, swap.num_evicted) == ("a", 0)
        assert running(fleet, "b") == 6
    assert costs.loads.bandwidths.keys() == {"disk"} | {record.tier for record in fleet.swaps}
    assert "moves" in repr(costs)


@virtual_time
async def test_what_has_no_room_elsewhere_keeps_its_place() -> None:
    fleet = sim_fleet(
        "a",
        "b",
        engines=[engine_of(f"e{n}", max_requests=2) for n in range(2)],
        scheduler=StartupTimePlacement(),
        interval_s=0.1,
    )
    async with fleet:
        async with anyio.create_task_group() as clients:
            for turn in range(4):
                clients.start_soon(read, fleet, "b", (turn, 9), LONG)
            await until(lambda: running(fleet, "b") == 4)
            clients.start_soon(read, fleet, "a", (7, 8, 9), SHORT)
            await until(lambda: running(fleet, "a") == 1)
            assert running(fleet, "b") <= 2  # it waited until an instance could be emptied
        assert all(record.num_evicted == 0 for record in fleet.swaps)
        idle(fleet)


@virtual_time
async def test_moves_may_go_side_by_side() -> None:
    fleet = sim_fleet(
        "a",
        "b",
        scheduler=StartupTimePlacement(),
        interval_s=100.0,
        migration_limits=MigrationLimits(per_instance=8),
    )
    async with fleet, anyio.create_task_group() as clients:
        for name in ("e0", "e1"):
            await fleet.swap(name, to="b")
        for turn in range(6):
            clients.start_soon(read, fleet, "b", (turn, 9), LONG)
        await until(lambda: running(fleet, "b") == 6)
        clients.start_soon(read, fleet, "a", (7, 8, 9), SHORT)
        await until(lambda: running(fleet, "a") == 1)
        assert len(fleet.migrations) == 3
        assert fleet.swaps[-1].num_evicted == 0


@virtual_time
async def test_an_idle_model_is_unloaded_after_its_time_and_loaded_again_when_asked_for() -> None:
    async with sim_fleet("a", scheduler=KeepAliveSwap(keep_alive_s=60.0)) as fleet:
        await read(fleet, "a", (5, 6), SHORT)
        ended_s = anyio.current_time()
        await until(lambda: all(i.model is None for i in fleet.view().instances))
        assert 60.0 <= anyio.current_time() - ended_s < 62.0
        await read(fleet, "a", (5, 6), SHORT)
        assert [record.model for record in fleet.swaps] == ["a", None, "a"]


@virtual_time
async def test_one_instance_serves_three_models_in_turns_when_it_is_idle_between() -> None:
    async with sim_fleet("a", "b", "c", engines=1, scheduler=KeepAliveSwap()) as fleet:
        for name in "abcab":
            await read(fleet, name, (5, 6), SHORT)
        assert [record.model for record in fleet.swaps] == list("abcab")
        idle(fleet)


@virtual_time
async def test_much_waiting_work_preempts_and_the_preempted_go_on() -> None:
    async with sim_fleet("a", "b", engines=1, scheduler=ShepherdSwap(lambda_=3.0)) as fleet:
        async with anyio.create_task_group() as clients:
            clients.start_soon(read, fleet, "a", (1, 2), LONG)
            await until(lambda: running(fleet, "a") == 1)
            for turn in range(3):
                clients.start_soon(read, fleet, "b", (turn, 9), SHORT)
            await anyio.sleep(1.0)
            assert running(fleet, "a") == 1  # three are not more than three times one
            clients.start_soon(read, fleet, "b", (3, 9), SHORT)
            await until(lambda: running(fleet, "b") == 4)
        assert [(record.model, record.num_evicted) for record in fleet.swaps] == [
            ("a", 0),
            ("b", 1),
            ("a", 0),
        ]
        idle(fleet)


@virtual_time
async def test_pinned_models_are_there_before_a_request_asks() -> None:
    async with sim_fleet("a", "b", scheduler=StaticPinning({"e0": "a", "e1": "b"})) as fleet:
        await until(lambda: {i.model for i in fleet.view().instances if i.serving_since_s} == {"a", "b"})
        await fleet.swap("e0", to="b")
        await until(lambda: {i.model for i in fleet.view().instances if i.serving_since_s} == {"a", "b"})


@virtual_time
@pytest.mark.parametrize("seed", range(4))
async def test_more_models_than_engines_are_all_served_whatever_comes(seed: int) -> None:
    """Placement first, and a less patient policy behind it; every stream is compared with a quiet run."""
    rng = Random(seed)
    names = [f"m{n}" for n in range(5)]
    costs = StartupCosts(tpot_s=0.011)
    fleet = sim_fleet(
        *names,
        engines=[engine_of(f"e{n}", max_requests=rng.choice([1, 2, 4])) for n in range(3)],
        scheduler=Chain(
            StartupTimePlacement(costs=costs), WeightedLoadSwap(t1=2, t2=8, b=1.5, patience_s=1.0, sigmas=0)
        ),
        interval_s=0.25,
        on_swap=costs.learn_swap,
        on_migration=costs.learn_move,
        migration_limits=MigrationLimits(per_instance=2),
    )
    async with fleet:
        async with anyio.create_task_group() as clients:
            for turn in range(60):
                sampling = Sampling(max_tokens=rng.choice([10, 60, 200]), ignore_eos=True)
                clients.start_soon(read, fleet, rng.choice(names), (turn, 9), sampling)
                await anyio.sleep(rng.expovariate(4.0))
        idle(fleet)
        assert {record.model for record in fleet.swaps} >= set(names)
        assert costs.loads.median_error is not None
        assert costs.loads.median_error < 0.1  # nothing but the profile decides what a simulated load takes
