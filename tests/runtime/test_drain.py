"""Instances are emptied, replaced and given new weights without a request refused or a token lost."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial

import anyio
import pytest

from hotswap import (
    Fleet,
    InstanceId,
    InstanceState,
    MigrationLimits,
    MigrationMethod,
    ModelId,
    RollStreams,
    Sampling,
)
from hotswap.abc import Scheduler
from hotswap.backends.sim import DeviceProfile, SimEngine
from hotswap.errors import ConfigError, SwapFailed, SwapRefused
from hotswap.offline.virtual_time import virtual_time
from tests.runtime.support import (
    PROFILE,
    Idle,
    engine_of,
    expected,
    idle,
    models,
    read,
    sim_fleet,
    store_of,
    until,
)

LONG = Sampling(max_tokens=300, ignore_eos=True)
E0, E1 = InstanceId("e0"), InstanceId("e1")


@asynccontextmanager
async def replicas(count: int, *names: str, serving: str = "a") -> AsyncGenerator[Fleet]:
    """A fleet whose instances all serve one model; it must be idle at the end."""
    async with sim_fleet(*names, engines=count, scheduler=Idle()) as fleet:
        for instance in fleet.view().instances:
            await fleet.swap(instance.id, to=serving)
        yield fleet
        await until(lambda: not any(i.num_requests for i in fleet.view().instances))
        idle(fleet)


def num_running(fleet: Fleet, instance: InstanceId) -> int:
    return fleet.view().instance(instance).num_running


@virtual_time
async def test_a_drained_instance_is_empty_and_its_requests_have_moved() -> None:
    async with replicas(2, "a") as fleet, anyio.create_task_group() as clients:
        for number in range(8):
            clients.start_soon(read, fleet, "a", (1, 2, number), LONG)
        await until(lambda: num_running(fleet, E0) == num_running(fleet, E1) == 4)
        record = await fleet.drain("e0")
        view = fleet.view().instance(E0)
        assert (view.num_requests, view.state, view.open) == (0, InstanceState.SERVING, False)
        assert (record.num_moved, record.num_evicted) == (4, 0)
        assert {move.method for move in fleet.migrations} == {"kv"}
        assert num_running(fleet, E1) == 8


@virtual_time
async def test_a_drained_instance_gets_no_request_until_it_is_reopened() -> None:
    async with replicas(2, "a") as fleet:
        await fleet.drain("e0")
        for number in range(3):
            await read(fleet, "a", (number + 1,), replace(LONG, max_tokens=3))
        assert fleet.view().instance(E0).num_requests == 0
        fleet.reopen("e0")
        async with fleet.stream("a", (1,), LONG) as stream:
            await anext(stream)
            assert stream.hops[0].instance == "e0"


@virtual_time
async def test_requests_without_a_place_elsewhere_end_where_they_are() -> None:
    async with replicas(1, "a") as fleet, anyio.create_task_group() as clients:
        for number in range(3):
            clients.start_soon(read, fleet, "a", (1, number), LONG)
        await until(lambda: num_running(fleet, E0) == 3)
        record = await fleet.drain("e0")
        assert (record.num_moved, record.num_finished, record.num_evicted) == (0, 3, 0)


@asynccontextmanager
async def moving_to_a_slow_one(limits: MigrationLimits) -> AsyncGenerator[Fleet]:
    """A request decodes on one instance, and another takes seconds to prefill what it has."""
    slow = SimEngine("e1", replace(PROFILE, token_s=0.005), kv_blocks=512)
    async with sim_fleet(
        "a", engines=[engine_of("e0"), slow], scheduler=Idle(), migration_limits=limits
    ) as fleet:
        await fleet.swap("e0", to="a")
        async with (
            fleet.stream("a", range(1, 900), Sampling(max_tokens=3000, ignore_eos=True)) as stream,
            anyio.create_task_group() as tasks,
        ):
            first = await anext(stream)
            await fleet.swap("e1", to="a")
            tasks.start_soon(lambda: fleet.migrate(stream.request.id, to="e1", method="tokens"))
            await until(lambda: num_running(fleet, E1) == 1)
            yield fleet
            assert [first.id, *[token.id async for token in stream]] == expected(stream.request)
        idle(fleet)


@virtual_time
async def test_a_drain_does_not_wait_for_a_move_that_would_bring_a_request() -> None:
    async with moving_to_a_slow_one(MigrationLimits()) as fleet:
        record = await fleet.drain("e1")
        assert record.seconds < 1
        [move] = fleet.migrations
        assert (move.outcome, move.stage) == ("aborted", "rounds")
        assert "takes no more requests" in move.error
        assert fleet.view().instance(E1).num_requests == 0


@virtual_time
async def test_a_round_for_a_client_that_has_left_keeps_no_drain_waiting() -> None:
    slow = SimEngine("e1", replace(PROFILE, token_s=1.0), kv_blocks=512)
    async with sim_fleet("a", engines=[engine_of("e0"), slow], scheduler=Idle()) as fleet:
        await fleet.swap("e0", to="a")
        async with anyio.create_task_group() as tasks:
            async with fleet.stream("a", range(1, 900), LONG) as stream:
                await anext(stream)
                await fleet.swap("e1", to="a")
                tasks.start_soon(lambda: fleet.migrate(stream.request.id, to="e1", method="tokens"))
                await until(lambda: num_running(fleet, E1) == 1)
            record = await fleet.drain("e1")
        assert record.seconds < 1
        assert [(move.outcome, move.stage) for move in fleet.migrations] == [("finished", "rounds")]
        idle(fleet)


@pytest.mark.parametrize(("limit_s", "error"), [(1.0, "longer than 1 s"), (600.0, "kept 0 of")])
@virtual_time
async def test_rounds_of_tokens_have_a_limit_of_their_own(limit_s: float, error: str) -> None:
    """The request runs on during them, so they may take longer than a stage that stops the request."""
    async with moving_to_a_slow_one(MigrationLimits(stage_s=2.0, round_s=limit_s)) as fleet:
        await until(lambda: len(fleet.migrations) == 1)
        assert error in fleet.migrations[0].error  # simulated engines keep no prefixes, so a second is vain


@virtual_time
async def test_only_what_ended_there_counts_as_finished() -> None:
    engine = engine_of("e0")
    async with sim_fleet("a", engines=[engine, engine_of("e1")], scheduler=Idle()) as fleet:
        await fleet.swap("e0", to="a")
        async with anyio.create_task_group() as clients:
            for number, max_tokens in enumerate([40, 40, 400, 400]):
                clients.start_soon(read, fleet, "a", (1, number), replace(LONG, max_tokens=max_tokens))
            await until(lambda: num_running(fleet, E0) == 4)

            async def lose() -> None:
                await until(lambda: num_running(fleet, E0) == 2)
                engine.lose()
                await fleet.swap("e1", to="a")

            clients.start_soon(lose)
            record = await fleet.drain("e0")
        assert (record.num_moved, record.num_finished, record.num_evicted) == (0, 2, 0)


@virtual_time
async def test_after_the_deadline_the_rest_wait_for_a_place_and_go_on() -> None:
    async with replicas(1, "a") as fleet, anyio.create_task_group() as clients:
        for number in range(3):
            clients.start_soon(read, fleet, "a", (1, number), LONG)
        await until(lambda: num_running(fleet, E0) == 3)
        record = await fleet.drain("e0", deadline_s=0.05)
        assert record.num_evicted == 3
        assert len(fleet.view().waiting) == 3
        fleet.reopen("e0")


@virtual_time
async def test_a_request_that_was_sent_before_the_drain_is_not_forgotten() -> None:
    async with replicas(1, "a") as fleet, fleet.stream("a", (1, 2, 3), LONG) as stream:
        # Its place is granted, and its task has not run.
        record = await fleet.drain("e0", deadline_s=0.0)
        assert (record.num_evicted, fleet.view().instance(E0).num_requests) == (1, 0)
        fleet.reopen("e0")
        assert [token.id async for token in stream] == expected(stream.request)


@pytest.mark.parametrize("method", ["kv", "tokens"])
@virtual_time
async def test_no_move_brings_a_request_to_an_instance_that_drains(method: MigrationMethod) -> None:
    async with replicas(2, "a") as fleet, fleet.stream("a", range(1, 900), LONG) as stream:
        first = await anext(stream)
        at = stream.hops[-1].instance
        other = E1 if at == E0 else E0
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(lambda: fleet.migrate(stream.request.id, to=other, method=method))
            await until(lambda: fleet.view().running[0].moving)
            await fleet.drain(other)
            assert fleet.view().instance(other).num_requests == 0
        assert [(move.outcome, stream.num_hops) for move in fleet.migrations] == [("aborted", 1)]
        assert [first.id, *[token.id async for token in stream]] == expected(stream.request)


@virtual_time
async def test_a_cancelled_drain_reopens_the_instance() -> None:
    async with replicas(1, "a") as fleet, anyio.create_task_group() as clients:
        clients.start_soon(read, fleet, "a", (1,), LONG)
        await until(lambda: num_running(fleet, E0) == 1)
        with anyio.move_on_after(0.1) as scope:
            await fleet.drain("e0")
        assert scope.cancelled_caught
        assert fleet.view().instance(E0).open


@virtual_time
async def test_an_instance_is_drained_once_at_a_time() -> None:
    async with replicas(2, "a") as fleet:
        await fleet.drain("e0")
        with pytest.raises(SwapRefused, match="drained"):
            await fleet.drain("e0")
        with pytest.raises(ConfigError, match="e9"):
            await fleet.drain("e9")


@virtual_time
async def test_a_drained_instance_can_be_replaced() -> None:
    async with replicas(1, "a") as fleet:
        await fleet.drain("e0")
        await fleet.replace("e0", by=engine_of("new"))
        (view,) = fleet.view().instances
        assert (view.id, view.model, view.open) == ("new", "a", True)
        await read(fleet, "a", (1, 2), LONG)


@virtual_time
async def test_a_drained_instance_can_be_removed() -> None:
    async with replicas(2, "a") as fleet:
        await fleet.drain("e0")
        await fleet.remove("e0")
        assert [instance.id for instance in fleet.view().instances] == ["e1"]


@virtual_time
async def test_a_drained_instance_stays_closed_when_its_replacement_cannot_load() -> None:
    async with replicas(1, "a") as fleet:
        await fleet.drain("e0")
        small = SimEngine("small", replace(PROFILE, memory_bytes=1), kv_blocks=512)
        with pytest.raises(SwapFailed):
            await fleet.replace("e0", by=small)
        (view,) = fleet.view().instances
        assert (view.id, view.model, view.draining) == ("e0", "a", True)


@virtual_time
async def test_a_swap_reopens_a_drained_instance() -> None:
    async with replicas(1, "a", "b") as fleet:
        await fleet.drain("e0")
        await fleet.swap("e0", to="b")
        assert fleet.view().instance(E0).open
        await read(fleet, "b", (1, 2), LONG)


QUICK = replace(PROFILE, unload_s=0.0, load_bytes_per_s=1 << 50)


@pytest.mark.parametrize("profile", [PROFILE, QUICK], ids=["slow", "quick"])
@pytest.mark.parametrize("deadline_s", [0.0, 0.5])
@virtual_time
async def test_a_swap_ends_a_drain_under_way_and_leaves_the_instance_open(
    profile: DeviceProfile, deadline_s: float
) -> None:
    engines = [SimEngine(name, profile, kv_blocks=512, max_requests=4) for name in ("e0", "e1")]
    async with (
        sim_fleet("a", "b", engines=engines, scheduler=Idle()) as fleet,
        anyio.create_task_group() as clients,
    ):
        for engine in engines:
            await fleet.swap(engine.id, to="a")
        for number in range(8):  # there is no room to move to
            clients.start_soon(read, fleet, "a", (1, number), LONG)
        await until(lambda: num_running(fleet, E0) == num_running(fleet, E1) == 4)
        async with fleet.stream("b", (1,), LONG) as stream:
            async with anyio.create_task_group() as operators:
                operators.start_soon(fleet.drain, "e0")
                await until(lambda: fleet.view().instance(E0).draining)
                await fleet.swap("e0", to="b", deadline_s=deadline_s)
                view = fleet.view().instance(E0)
                assert (view.model, view.open) == ("b", True)
            assert [token.id async for token in stream] == expected(stream.request)
            assert stream.num_hops == 1, "the drain took the new model's request away"
        await fleet.swap("e0", to="a")  # for the requests that had no room elsewhere


@virtual_time
async def test_reopening_an_instance_ends_a_drain_under_way() -> None:
    async with replicas(1, "a") as fleet, anyio.create_task_group() as clients:
        for number in range(2):
            clients.start_soon(read, fleet, "a", (1, number), LONG)
        await until(lambda: num_running(fleet, E0) == 2)
        async with anyio.create_task_group() as operators:
            operators.start_soon(partial(fleet.drain, "e0", deadline_s=0.5))
            await until(lambda: fleet.view().instance(E0).draining)
            fleet.reopen("e0")
            await until(lambda: not fleet.view().instance(E0).draining)
        assert num_running(fleet, E0) == 2
        assert fleet.view().instance(E0).open
        await anyio.sleep(1)
        assert fleet.view().instance(E0).num_requests == 2, "the drain's deadline came"


@virtual_time
async def test_an_engine_takes_the_place_of_another_while_requests_run() -> None:
    async with replicas(1, "a") as fleet, anyio.create_task_group() as clients:
        for number in range(6):
            clients.start_soon(read, fleet, "a", (1, number), LONG)
        await until(lambda: num_running(fleet, E0) == 6)
        record = await fleet.replace("e0", by=engine_of("new"))
        assert record.num_moved == 6
        (view,) = fleet.view().instances
        assert (view.id, view.model, view.num_running) == ("new", "a", 6)


@virtual_time
async def test_an_engine_that_came_can_go_again_and_come_back() -> None:
    async with replicas(1, "a") as fleet:
        for _ in range(2):
            engine = engine_of("more")
            await fleet.add(engine)
            await fleet.swap("more", to="a")
            await fleet.remove("more")
            assert [i.id for i in fleet.view().instances] == ["e0"]
            assert engine.status().state is InstanceState.EMPTY


@virtual_time
async def test_a_replacement_that_cannot_load_changes_nothing() -> None:
    async with replicas(1, "a") as fleet, anyio.create_task_group() as clients:
        clients.start_soon(read, fleet, "a", (1,), LONG)
        await until(lambda: num_running(fleet, E0) == 1)
        small = SimEngine("small", replace(PROFILE, memory_bytes=1), kv_blocks=512)
        with pytest.raises(SwapFailed):
            await fleet.replace("e0", by=small)
        assert [i.id for i in fleet.view().instances] == ["e0"]
        assert fleet.view().instance(E0).open


@virtual_time
async def test_two_instances_of_one_name_are_refused() -> None:
    async with replicas(1, "a") as fleet:
        with pytest.raises(ConfigError, match="already"):
            await fleet.add(engine_of("e0"))


@virtual_time
async def test_pinned_streams_end_with_the_weights_they_began_with() -> None:
    async with replicas(3, "a", "a2") as fleet, anyio.create_task_group() as clients:
        for number in range(9):
            clients.start_soon(read, fleet, "a", (1, number), LONG)
        await until(lambda: sum(i.num_running for i in fleet.view().instances) == 9)
        rolled = await fleet.roll("a", to="a2")
        assert sorted(rolled) == ["e0", "e1", "e2"]
        assert {i.model for i in fleet.view().instances} == {"a2"}
        async with fleet.stream("a", (1,), LONG) as stream:
            first = await anext(stream)
            assert stream.request.model == "a2"
            assert first.id == expected(stream.request)[0]


@virtual_time
async def test_moved_streams_go_on_with_the_new_weights_from_some_token_on() -> None:
    async with replicas(2, "a", "a2") as fleet:
        old = ModelId("a")
        tokens: list[list[int]] = [[] for _ in range(4)]

        async def client(number: int) -> None:
            async with fleet.stream("a", (1, number), LONG) as stream:
                as_made = stream.request
                async for token in stream:
                    tokens[number].append(token.id)
                before, after = (expected(replace(as_made, model=m)) for m in (old, ModelId("a2")))
                seam = next(n for n in range(301) if n == 300 or tokens[number][n] != before[n])
                assert 0 < seam < 300
                assert tokens[number] == before[:seam] + after[seam:]

        async with anyio.create_task_group() as clients:
            for number in range(4):
                clients.start_soon(client, number)
            await until(lambda: all(tokens))
            await fleet.roll("a", to="a2", streams="moved")
        assert {i.model for i in fleet.view().instances} == {"a2"}


@pytest.mark.parametrize("scheduler", [Idle(), None])
@pytest.mark.parametrize("streams", ["pinned", "moved"])
@virtual_time
async def test_requests_that_wait_for_the_old_weights_get_the_new(
    streams: RollStreams, scheduler: Scheduler | None
) -> None:
    served: list[str] = []

    async def client(number: int) -> None:
        async with fleet.stream("a", (1, number), replace(LONG, max_tokens=30)) as stream:
            tokens = [token.id async for token in stream]
            assert tokens == expected(stream.request)
            served.append(stream.request.model)

    async with sim_fleet("a", "a2", engines=1, scheduler=scheduler) as fleet:
        await fleet.swap("e0", to="a")
        with anyio.fail_after(60):
            async with anyio.create_task_group() as clients:
                for number in range(30):
                    clients.start_soon(client, number)
                await until(lambda: num_running(fleet, E0) == 8)
                await fleet.roll("a", to="a2", streams=streams)
                assert fleet.view().instance(E0).model == "a2"
        assert served == ["a"] * 8 + ["a2"] * 22
        assert len(fleet.swaps) == 2
        idle(fleet)


@virtual_time
async def test_the_last_replica_waits_for_pinned_requests_that_wait() -> None:
    async with replicas(1, "a", "a2") as fleet, anyio.create_task_group() as clients:
        for number in range(3):
            clients.start_soon(read, fleet, "a", (1, number), LONG)
        await until(lambda: num_running(fleet, E0) == 3)
        await anyio.sleep(0.5)
        await fleet.drain("e0", deadline_s=0.0)
        for number in range(8):  # these have the places first
            clients.start_soon(partial(fleet.generate, "a", (2, number), LONG, priority=1))
        await until(lambda: len(fleet.view().waiting) == 11)
        fleet.reopen("e0")
        assert sum(waiting.num_generated > 0 for waiting in fleet.view().waiting) == 3
        with anyio.fail_after(60):
            assert await fleet.roll("a", to="a2") == ("e0",)
            await until(lambda: not fleet.view().waiting)


@virtual_time
async def test_new_weights_take_over_the_least_number_of_replicas() -> None:
    options = {"models": models("a", min_replicas=2) + models("a2"), "store": store_of("a", "a2")}
    async with sim_fleet(engines=2, scheduler=Idle(), **options) as fleet:
        for instance in ("e0", "e1"):
            await fleet.swap(instance, to="a")
        await fleet.roll("a", to="a2")
        least = {model.id: model.min_replicas for model in fleet.view().models}
        assert least == {"a": 0, "a2": 2}
