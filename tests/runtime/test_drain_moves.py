"""A drain moves as many requests at once as it may, and goes on in the moment in which it can."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import replace

import anyio
import pytest

from hotswap import DrainRecord, Fleet, InstanceId, MigrationLimits, Request, RequestId, Sampling
from hotswap.abc import KVSink, KVSource
from hotswap.backends.sim import SimEngine
from hotswap.offline.virtual_time import run, virtual_time
from tests.runtime.counting import counted_opcodes
from tests.runtime.support import PROFILE, Idle, engine_of, idle, read, sim_fleet, until

LONG = Sampling(max_tokens=3000, ignore_eos=True)
E0, E1 = InstanceId("e0"), InstanceId("e1")


class Moving(SimEngine):
    """Hands requests over slowly, and counts how many moves it takes part in at once."""

    def __init__(self, name: str) -> None:
        super().__init__(name, replace(PROFILE, handover_s=0.5), kv_blocks=4096, max_requests=16)
        self.num_moves = self.most_moves = 0

    @asynccontextmanager
    async def _part(self) -> AsyncGenerator[None]:
        self.num_moves += 1
        self.most_moves = max(self.most_moves, self.num_moves)
        try:
            yield
        finally:
            self.num_moves -= 1

    @asynccontextmanager
    async def export_kv(self, request: RequestId) -> AsyncGenerator[KVSource]:
        async with self._part(), super().export_kv(request) as source:
            yield source

    @asynccontextmanager
    async def import_kv(self, request: Request) -> AsyncGenerator[KVSink]:
        async with self._part(), super().import_kv(request) as sink:
            yield sink


def end_s(record: DrainRecord) -> float:
    return record.started_s + record.seconds


async def drained(per_instance: int) -> tuple[DrainRecord, list[Moving], Counter[str]]:
    """Drain an instance of eight requests beside four that have none."""
    engines = [Moving(f"e{number}") for number in range(5)]
    limits = MigrationLimits(per_instance=per_instance)
    async with sim_fleet("a", engines=engines, scheduler=Idle(), migration_limits=limits) as fleet:
        await fleet.swap("e0", to="a")
        async with anyio.create_task_group() as clients:
            for number in range(8):
                clients.start_soon(read, fleet, "a", (1, number), LONG)
            await until(lambda: fleet.view().instance(E0).num_running == 8)
            for engine in engines[1:]:
                await fleet.swap(engine.id, to="a")
            record = await fleet.drain("e0")
            assert fleet.view().instance(E0).num_requests == 0
            went_to = Counter(str(move.destination) for move in fleet.migrations if move.outcome == "done")
        fleet.reopen("e0")
        idle(fleet)
    return record, engines, went_to


@pytest.mark.parametrize("per_instance", [1, 2, 4, 8])
def test_a_drain_moves_as_many_requests_at_once_as_an_instance_may(per_instance: int) -> None:
    record, engines, went_to = run(drained, per_instance)
    assert (record.num_moved, record.num_evicted) == (8, 0)
    assert engines[0].most_moves == per_instance
    assert all(engine.most_moves <= per_instance for engine in engines)
    assert went_to == {"e1": 2, "e2": 2, "e3": 2, "e4": 2}


def test_a_drain_with_eight_moves_at_once_takes_a_fraction_of_the_time() -> None:
    one_by_one, at_once = run(drained, 1)[0], run(drained, 8)[0]
    assert at_once.seconds < one_by_one.seconds / 4


# ---------------------------------------------------------------- without polling


@asynccontextmanager
async def alone(*engines: SimEngine) -> AsyncGenerator[Fleet]:
    """A fleet whose first instance serves."""
    async with sim_fleet("a", engines=engines, scheduler=Idle()) as fleet:
        await fleet.swap("e0", to="a")
        yield fleet
        fleet.reopen("e0")


@pytest.mark.parametrize("count", [1, 3])
@virtual_time
async def test_a_drain_ends_with_the_last_request(count: int) -> None:
    ended_s: list[float] = []

    async def client(fleet: Fleet, number: int) -> None:
        await read(fleet, "a", (1, number), Sampling(max_tokens=100 + 37 * number, ignore_eos=True))
        ended_s.append(anyio.current_time())

    async with alone(engine_of("e0")) as fleet, anyio.create_task_group() as clients:
        for number in range(count):
            clients.start_soon(client, fleet, number)
        await until(lambda: fleet.view().instance(E0).num_running == count)
        record = await fleet.drain("e0")
        assert end_s(record) == pytest.approx(max(ended_s), abs=1e-9)
        assert record.num_finished == count


@virtual_time
async def test_a_drain_ends_when_the_last_client_leaves() -> None:
    async with alone(engine_of("e0")) as fleet, anyio.create_task_group() as clients:
        clients.start_soon(read, fleet, "a", (1,), LONG)
        await until(lambda: fleet.view().instance(E0).num_running == 1)
        deadline_at_s = anyio.current_time() + 0.333

        async def leave() -> None:
            await anyio.sleep(0.333)
            clients.cancel_scope.cancel()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(leave)
            with anyio.CancelScope(shield=True), anyio.fail_after(60):
                record = await fleet.drain("e0")
        assert end_s(record) == pytest.approx(deadline_at_s, abs=1e-9)


@virtual_time
async def test_a_drain_ends_when_the_instance_is_lost() -> None:
    engine = engine_of("e0")
    async with alone(engine) as fleet, anyio.create_task_group() as tasks:
        tasks.start_soon(read, fleet, "a", (1,), Sampling(max_tokens=200, ignore_eos=True))
        await until(lambda: fleet.view().instance(E0).num_running == 1)
        lost_s = anyio.current_time() + 0.333

        async def lose() -> None:
            await anyio.sleep(0.333)
            engine.lose()

        tasks.start_soon(lose)
        record = await fleet.drain("e0")
        assert end_s(record) == pytest.approx(lost_s, abs=1e-9)
        fleet.reopen("e0")
        await until(lambda: fleet.view().instance(E0).free)
        await fleet.swap("e0", to="a")


@pytest.mark.parametrize("deadline_s", [0.0, 0.333])
@virtual_time
async def test_a_drain_ends_with_its_deadline(deadline_s: float) -> None:
    async with alone(engine_of("e0")) as fleet, anyio.create_task_group() as clients:
        for number in range(3):
            clients.start_soon(read, fleet, "a", (1, number), Sampling(max_tokens=200, ignore_eos=True))
        await until(lambda: fleet.view().instance(E0).num_running == 3)
        record = await fleet.drain("e0", deadline_s=deadline_s)
        assert record.seconds == pytest.approx(deadline_s, abs=1e-9)
        assert record.num_evicted == 3
        fleet.reopen("e0")


@virtual_time
async def test_requests_of_a_drain_move_when_an_instance_opens() -> None:
    async with alone(engine_of("e0"), engine_of("e1")) as fleet, anyio.create_task_group() as tasks:
        tasks.start_soon(read, fleet, "a", (1,), LONG)
        await until(lambda: fleet.view().instance(E0).num_running == 1)
        tasks.start_soon(fleet.drain, "e0")
        await anyio.sleep(0.333)
        swap = await fleet.swap("e1", to="a")
        await until(lambda: len(fleet.migrations) == 1)
        assert fleet.migrations[0].started_s == pytest.approx(swap.started_s + swap.seconds, abs=1e-9)


@virtual_time
async def test_requests_of_a_drain_move_when_a_place_becomes_free() -> None:
    ended_s: list[float] = []

    async def short(fleet: Fleet) -> None:
        await read(fleet, "a", (1, 2), Sampling(max_tokens=120, ignore_eos=True))
        ended_s.append(anyio.current_time())

    engines = engine_of("e0"), engine_of("e1", max_requests=1)
    async with alone(*engines) as fleet, anyio.create_task_group() as tasks:
        tasks.start_soon(read, fleet, "a", (1,), LONG)
        await until(lambda: fleet.view().instance(E0).num_running == 1)
        await fleet.swap("e1", to="a")
        tasks.start_soon(short, fleet)
        await until(lambda: fleet.view().instance(E1).num_running == 1)
        tasks.start_soon(fleet.drain, "e0")
        await until(lambda: len(fleet.migrations) == 1)
        assert fleet.migrations[0].started_s == pytest.approx(ended_s[0], abs=1e-9)


def test_a_drain_does_not_go_over_the_requests_of_other_instances() -> None:
    async def num_opcodes(num_others: int) -> int:
        """What the fleet does while it waits for one request to end, beside others that stand still."""
        still = SimEngine("e1", replace(PROFILE, floor_s=1e6), kv_blocks=4096, max_requests=2000)
        engines = [engine_of("e0"), still]
        async with sim_fleet("a", "b", engines=engines, scheduler=Idle(), interval_s=1e6) as fleet:
            await fleet.swap("e0", to="a")
            await fleet.swap("e1", to="b")
            async with anyio.create_task_group() as others:
                for number in range(num_others):
                    others.start_soon(fleet.generate, "b", (1, number), LONG)
                await until(lambda: fleet.view().instance(E1).num_requests == num_others)
                async with anyio.create_task_group() as client:
                    client.start_soon(read, fleet, "a", (1,), Sampling(max_tokens=100, ignore_eos=True))
                    await until(lambda: fleet.view().instance(E0).num_running == 1)
                    with counted_opcodes() as count:
                        await fleet.drain("e0")
                others.cancel_scope.cancel()
        return count.value

    assert run(num_opcodes, 1000) <= 1.3 * run(num_opcodes, 10)
