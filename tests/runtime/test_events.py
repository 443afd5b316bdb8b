"""What a fleet tells of itself as it happens, and how a reader that is slow goes on."""

from __future__ import annotations

import anyio
import pytest

from hotswap import Adapter, FleetEvent, InstanceId, Model, Sampling, SwapRecord
from hotswap.errors import ConfigError, FleetClosed
from hotswap.offline.virtual_time import virtual_time
from hotswap.runtime.events import MAX_EVENTS
from tests.runtime.support import Idle, engine_of, sim_fleet, store_of, until

LONG = Sampling(max_tokens=200, ignore_eos=True)


def kinds(events: list[FleetEvent]) -> list[str]:
    return [event.kind for event in events]


@virtual_time
async def test_a_swap_is_told_phase_by_phase() -> None:
    events: list[FleetEvent] = []
    async with sim_fleet("a", scheduler=Idle()) as fleet, anyio.create_task_group() as readers:
        stream = fleet.events()

        async def read() -> None:
            while latest := await stream.take():
                events.extend(latest)

        readers.start_soon(read)
        await anyio.wait_all_tasks_blocked()
        await fleet.swap("e0", to="a", reason="a test")
        since_then = await fleet.events(after=0).take()
        readers.cancel_scope.cancel()
    assert kinds(since_then)[-1] == "swap_ended"
    assert [event.number for event in events] == list(range(1, len(events) + 1))
    assert events[0].kind == "swap_started"
    assert {(event.instance, event.model) for event in events} == {("e0", "a")}
    phases = [event.phase.name for event in events if event.kind == "swap_phase" and event.phase]
    ended = events[-1]
    assert isinstance(ended.record, SwapRecord)
    assert phases == [phase.name for phase in ended.record.phases]
    assert (ended.kind, ended.reason, ended.record.outcome) == ("swap_ended", "a test", "done")
    progress = [event.phase for event in events if event.kind == "swap_progress"]
    assert progress
    assert all(phase and 0 < phase.loaded_bytes <= phase.total_bytes == 1 << 20 for phase in progress)


@virtual_time
async def test_a_reader_gets_each_event_once_as_it_happens() -> None:
    found: list[FleetEvent] = []
    async with sim_fleet("a", engines=1, scheduler=Idle(), store=store_of("a", "b")) as fleet:
        stream = fleet.events()

        async def read() -> None:
            while events := await stream.take():
                found.extend(events)

        async with anyio.create_task_group() as readers:
            readers.start_soon(read)
            await anyio.wait_all_tasks_blocked()
            await fleet.models.add(Model("b"))
            await fleet.add(engine_of("e9", max_adapters=2))
            fleet.adapters.add(Adapter("x", "a"))
            await fleet.adapters.update(Adapter("x", "a", "/another"))
            await fleet.adapters.remove("a", "x")
            await fleet.remove("e9")
            await fleet.models.remove("b")
            await until(lambda: len(found) == 8)
            readers.cancel_scope.cancel()
    assert kinds(found) == [
        "model_added",
        "instance_added",
        "adapter_added",
        "adapter_updated",
        "adapter_removed",
        "drain_ended",
        "instance_removed",
        "model_removed",
    ]


@virtual_time
async def test_moves_losses_and_restarts_are_told() -> None:
    engines = [engine_of("e0"), engine_of("e1")]
    async with sim_fleet("a", engines=engines, scheduler=Idle()) as fleet:
        for engine in engines:
            await fleet.swap(engine.id, to="a")
        stream = fleet.events()
        async with fleet.stream("a", [1] * 8, LONG) as tokens:
            await anext(tokens)
            source = tokens.hops[0].instance
            await fleet.migrate(tokens.request.id, to="e1" if source == "e0" else "e0")
            lost = tokens.hops[-1].instance
            next(engine for engine in engines if engine.id == lost).lose("its cable was pulled")
            await until(lambda: "cable" in fleet.view().instance(lost).lost_because)
            assert fleet.view().instance(lost).state == "LOST"
        await until(lambda: fleet.view().instance(lost).state == "EMPTY")
        assert fleet.view().instance(lost).lost_because == ""
        events = await stream.take()
    assert kinds(events) == ["move_ended", "instance_lost", "instance_restarted"]
    assert [event.instance for event in events] == [lost] * 3


@virtual_time
async def test_a_slow_reader_is_told_of_a_gap_and_holds_nothing() -> None:
    async with sim_fleet("a", engines=1, scheduler=Idle()) as fleet:
        slow = fleet.events()
        fleet.models.alias("other", "a")
        for _ in range(MAX_EVENTS // 2 + 5):
            fleet.adapters.add(Adapter("x", "a"))
            await fleet.adapters.remove("a", "x")
        events = await slow.take()
        assert events[0].kind == "gap"
        assert len(events) == MAX_EVENTS + 1
        assert [event.number for event in events] == list(range(events[0].number, events[-1].number + 1))
        # A number of a fleet that ran before is none of this one.
        assert (await fleet.events(after=10**6).take())[0].kind == "gap"


@virtual_time
async def test_events_end_with_the_fleet() -> None:
    async with anyio.create_task_group() as readers, sim_fleet("a", scheduler=Idle()) as fleet:
        stream = fleet.events()
        left = fleet.events(after=0)
        readers.start_soon(stream.take)
        await anyio.wait_all_tasks_blocked()
        await fleet.swap("e0", to="a")
    assert (await left.take())[-1].kind == "swap_ended"
    assert [event async for event in left] == []
    with pytest.raises(FleetClosed):
        fleet.events()


@virtual_time
async def test_a_number_that_is_none_is_refused() -> None:
    async with sim_fleet("a", scheduler=Idle()) as fleet:
        with pytest.raises(ConfigError, match="after is -1"):
            fleet.events(after=-1)


@virtual_time
async def test_a_view_tells_the_phase_of_a_swap_and_its_bytes() -> None:
    async with sim_fleet("a", scheduler=Idle()) as fleet, anyio.create_task_group() as tasks:

        async def swap() -> None:
            await fleet.swap("e0", to="a")

        e0 = InstanceId("e0")
        assert fleet.view().instance(e0).phase is None
        began_s = anyio.current_time()
        tasks.start_soon(swap)
        await until(lambda: bool((phase := fleet.view().instance(e0).phase) and phase.name == "load"))
        phase = fleet.view().instance(e0).phase
        assert phase
        assert began_s <= phase.since_s <= anyio.current_time()
        assert 0 < phase.loaded_bytes <= phase.total_bytes == 1 << 20
        await until(lambda: fleet.view().instance(e0).state == "SERVING")
        await until(lambda: fleet.view().instance(e0).phase is None)
