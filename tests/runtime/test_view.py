"""What the fleet itself adds to views, while requests come, move and go."""

from __future__ import annotations

import anyio

from hotswap import Fleet, InstanceId, Sampling
from hotswap.offline.virtual_time import virtual_time
from hotswap.policies import LeastLoadedRouter
from tests.runtime.support import Idle, engine_of, idle, sim_fleet, until

LONG = Sampling(max_tokens=300, ignore_eos=True)
E0, E1 = InstanceId("e0"), InstanceId("e1")


async def client(fleet: Fleet, priority: int, prompt: int = 3) -> None:
    async with fleet.stream("a", (1,) * prompt, LONG, priority=priority) as stream:
        await stream.collect()


@virtual_time
async def test_requests_of_high_priority_are_counted_where_they_are() -> None:
    async with sim_fleet("a", engines=2, scheduler=Idle()) as fleet, anyio.create_task_group() as clients:
        for instance in ("e0", "e1"):
            await fleet.swap(instance, to="a")
        for priority in (0, 2, 1, -1):
            clients.start_soon(client, fleet, priority)
        await until(lambda: len(fleet.view().running) == 4)
        high = [request for request in fleet.view().running if request.priority > 0]
        assert [i.num_high_priority for i in fleet.view().instances] == [1, 1]
        await fleet.migrate(high[0].id, to="e0" if high[0].instance == "e1" else "e1")
        assert sorted(i.num_high_priority for i in fleet.view().instances) == [0, 2]
        await until(lambda: not fleet.view().running)
        assert [i.num_high_priority for i in fleet.view().instances] == [0, 0]
        idle(fleet)


@virtual_time
async def test_a_move_under_way_is_counted_at_both_ends() -> None:
    async with sim_fleet("a", engines=3, scheduler=Idle()) as fleet, anyio.create_task_group() as clients:
        for instance in ("e0", "e1", "e2"):
            await fleet.swap(instance, to="a")
        clients.start_soon(client, fleet, 0)
        await until(lambda: any(request.begun for request in fleet.view().running))
        (request,) = fleet.view().running
        assert request.instance == E0
        clients.start_soon(lambda: fleet.migrate(request.id, to="e1"))
        await until(lambda: any(request.moving for request in fleet.view().running))
        assert [i.num_moves for i in fleet.view().instances] == [1, 1, 0]
        await until(lambda: not any(request.moving for request in fleet.view().running))
        assert [i.num_moves for i in fleet.view().instances] == [0, 0, 0]


@virtual_time
async def test_the_latest_assignment_of_each_instance_is_numbered() -> None:
    async with sim_fleet("a", engines=2, scheduler=Idle(), router=LeastLoadedRouter()) as fleet:
        for instance in ("e0", "e1"):
            await fleet.swap(instance, to="a")
        assert [i.last_assigned for i in fleet.view().instances] == [0, 0]
        async with anyio.create_task_group() as clients:
            for _ in range(3):
                clients.start_soon(client, fleet, 0)
            await until(lambda: len(fleet.view().running) == 3)
            assert [i.last_assigned for i in fleet.view().instances] == [3, 2]
            move = fleet.view().running[0]
            await fleet.migrate(move.id, to="e1")
            assert [i.last_assigned for i in fleet.view().instances] == [3, 4]


@virtual_time
async def test_a_request_has_begun_with_its_first_token_there() -> None:
    async with sim_fleet("a", engines=2, scheduler=Idle()) as fleet, anyio.create_task_group() as clients:
        await fleet.swap("e0", to="a")
        await anyio.sleep(1.5)
        began_s = anyio.current_time()
        clients.start_soon(client, fleet, 0, 2000)
        await until(lambda: len(fleet.view().running) == 1)
        (before,) = fleet.view().running
        assert (before.begun, before.arrived_s) == (False, began_s)
        await until(lambda: fleet.view().running[0].begun)
        assert fleet.view().running[0].num_tokens > 2000
        await fleet.swap("e1", to="a")
        clients.start_soon(lambda: fleet.unload("e0"))
        await until(lambda: fleet.view().running != () and fleet.view().running[0].instance == E1)
        (elsewhere,) = fleet.view().running  # evicted, and to be prefilled again
        assert (elsewhere.begun, elsewhere.arrived_s) == (False, began_s)
        await until(lambda: fleet.view().running[0].begun)


@virtual_time
async def test_the_end_of_the_latest_swap_is_told_of_empty_instances_too() -> None:
    async with sim_fleet("a", engines=2, scheduler=Idle()) as fleet:
        assert [i.swapped_s for i in fleet.view().instances] == [None, None]
        record = await fleet.swap("e0", to="a")
        assert [i.swapped_s for i in fleet.view().instances] == [record.started_s + record.seconds, None]
        await anyio.sleep(3.0)
        record = await fleet.unload("e0")
        view = fleet.view().instance(E0)
        assert (view.model, view.swapped_s) == (None, record.started_s + record.seconds)


@virtual_time
async def test_requests_that_wait_for_a_turn_open_it_until_each_has_a_token() -> None:
    async with sim_fleet("a", engines=1, scheduler=Idle()) as fleet, anyio.create_task_group() as clients:
        for prompt in (3, 2000):
            clients.start_soon(client, fleet, 0, prompt)
        await until(lambda: len(fleet.view().waiting) == 2)
        await fleet.swap("e0", to="a")
        assert fleet.view().instance(E0).num_opening == 2
        clients.start_soon(client, fleet, 0, 500)  # comes later than the beginning
        await until(lambda: len(fleet.view().running) == 3)
        assert fleet.view().instance(E0).num_opening == 2
        await until(lambda: fleet.view().instance(E0).num_opening == 0)
        assert sum(request.begun for request in fleet.view().running) >= 2
        await until(lambda: not fleet.view().running)


@virtual_time
async def test_a_request_that_left_without_a_token_opens_wherever_it_comes() -> None:
    async with sim_fleet("a", engines=2, scheduler=Idle()) as fleet, anyio.create_task_group() as clients:
        await fleet.swap("e0", to="a")
        clients.start_soon(client, fleet, 0, 2000)
        await until(lambda: len(fleet.view().running) == 1)
        (before,) = fleet.view().running
        assert (before.num_evicted, before.num_stalls) == (0, 0)
        assert (before.since_s, fleet.view().instance(E0).num_opening) == (before.arrived_s, 0)
        await fleet.unload("e0")
        await until(lambda: fleet.view().waiting != ())
        (waits,) = fleet.view().waiting
        assert (waits.num_evicted, waits.num_stalls) == (1, 1)
        await fleet.swap("e1", to="a")
        await until(lambda: fleet.view().running != ())
        (again,) = fleet.view().running
        assert (again.num_evicted, again.num_stalls) == (1, 1)
        assert again.since_s > before.since_s
        assert fleet.view().instance(E1).num_opening == 1
        await until(lambda: fleet.view().running[0].begun)
        (begun,) = fleet.view().running
        assert (begun.num_evicted, begun.num_stalls, fleet.view().instance(E1).num_opening) == (1, 0, 0)


@virtual_time
async def test_a_turn_opens_with_no_more_requests_than_its_blocks_hold() -> None:
    engine = engine_of("e0", kv_blocks=128)  # of 16 tokens
    async with sim_fleet("a", engines=[engine], scheduler=Idle()) as fleet:
        async with anyio.create_task_group() as clients:
            for _ in range(4):
                clients.start_soon(client, fleet, 0, 900)
            await until(lambda: len(fleet.view().waiting) == 4)
            await fleet.swap("e0", to="a")
            assert fleet.view().instance(E0).num_opening == 2
            assert len(fleet.view().running) + fleet.view().instance(E0).num_requests >= 4
        idle(fleet)
