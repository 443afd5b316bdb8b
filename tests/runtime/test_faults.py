"""What breaks stays with what broke it: the fleet goes on, closes, and gives everything back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import anyio
import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider

from hotswap import FleetView, InstanceId, InstanceState, ModelId, Sampling, SwapRecord
from hotswap.abc import (
    Action,
    Engine,
    EngineStatus,
    Migrate,
    ModelCard,
    MoveChoice,
    Mover,
    MoveView,
    Prefetch,
    Scheduler,
    Swap,
    WeightStore,
    WrapperEngine,
    WrapperStore,
)
from hotswap.errors import MemoryNotReclaimed, SwapFailed
from hotswap.offline.virtual_time import virtual_time
from tests.runtime.support import Idle, engine_of, expected, idle, read, sim_fleet, store_of, until
from tests.runtime.test_telemetry import metrics_of

SOME = Sampling(max_tokens=25, ignore_eos=True)
E0 = InstanceId("e0")


class Raising(WrapperEngine):
    """Raises `error` the first `times` that `verb` is called, once the wrapped engine has done it."""

    def __init__(self, engine: Engine, verb: str, error: Exception, *, times: int = 1) -> None:
        super().__init__(engine)
        self.verb, self.error, self.times = verb, error, times

    def _raise(self, verb: str) -> None:
        if verb == self.verb and self.times:
            self.times -= 1
            raise self.error

    async def load(self, model: ModelCard, store: WeightStore) -> None:
        self._raise("load")
        await super().load(model, store)

    async def unload(self) -> None:
        self._raise("unload")
        await super().unload()

    async def evict(self, *, deadline_s: float) -> int:
        num_evicted = await super().evict(deadline_s=deadline_s)
        self._raise("evict")
        return num_evicted


@virtual_time
async def test_a_listener_that_raises_disturbs_no_request(caplog: pytest.LogCaptureFixture) -> None:
    def listen(record: SwapRecord) -> None:
        raise ZeroDivisionError("a listener's own fault")

    async with sim_fleet("a", on_swap=listen) as fleet:
        await read(fleet, "a", (1,), SOME)
        record = await fleet.unload(fleet.swaps[-1].instance)
        assert record.outcome == "done"
        idle(fleet)
    assert "listener's own fault" in caplog.text


@pytest.mark.parametrize("error", [MemoryNotReclaimed("still there"), RuntimeError("a library's own")])
@pytest.mark.parametrize("verb", ["evict", "unload"])
@virtual_time
async def test_an_instance_that_broke_half_way_is_brought_back(verb: str, error: Exception) -> None:
    engine = Raising(engine_of("e0"), verb, error, times=3)
    async with sim_fleet("a", "b", engines=[engine]) as fleet:
        await read(fleet, "a", (1,), SOME)
        await read(fleet, "b", (1,), SOME)
        assert "failed" in {record.outcome for record in fleet.swaps}
        idle(fleet)


@virtual_time
async def test_a_lost_engine_whose_restart_fails_in_any_way_is_tried_again() -> None:
    inner = engine_of("e0")
    engine = Raising(inner, "unload", RuntimeError("a driver's own"), times=2)
    async with sim_fleet("a", engines=[engine]) as fleet:
        await read(fleet, "a", (1,), SOME)
        inner.lose()
        await read(fleet, "a", (2,), SOME)
        assert engine.times == 0


class Asking(Scheduler):
    """Asks once for what it is told, as a generator, and then fails."""

    def __init__(self, *actions: Action) -> None:
        self.actions = list(actions)

    def plan(self, fleet: FleetView) -> Iterator[Action]:  # type: ignore[override]  # a likely mistake
        while self.actions:
            yield self.actions.pop()
        raise ZeroDivisionError("a scheduler's own fault")


@virtual_time
async def test_a_scheduler_that_raises_while_its_plan_is_read_does_not_end_the_fleet(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with sim_fleet("a", scheduler=Asking()) as fleet:
        await fleet.swap("e0", to="a")
        await read(fleet, "a", (1,), SOME)
    assert "failed to plan" in caplog.text


class Moody(Scheduler):
    """Does something else with every plan, in turn, and says how often it was asked."""

    def __init__(self, *moods: Callable[[FleetView], object]) -> None:
        self.moods, self.num_plans = moods, 0

    def plan(self, fleet: FleetView) -> Any:
        self.num_plans += 1
        return self.moods[self.num_plans % len(self.moods)](fleet)


def blow_up(fleet: FleetView) -> None:
    raise ZeroDivisionError("a scheduler's own fault")


def talk_nonsense(fleet: FleetView) -> object:
    return ["swap", Swap(instance=["e0"], model={}), Migrate(request=[], destination=E0)]  # type: ignore[arg-type]


def move_about(fleet: FleetView) -> list[Action]:
    """Move every request to the other of two instances."""
    here = {InstanceId("e0"): InstanceId("e1"), InstanceId("e1"): InstanceId("e0")}
    return [Migrate(request=running.id, destination=here[running.instance]) for running in fleet.running]


class NoIdea(Mover):
    """Cannot choose."""

    def choose(self, move: MoveView) -> MoveChoice:
        raise ZeroDivisionError("a mover's own fault")


@virtual_time
async def test_streams_go_on_whatever_the_scheduler_does(caplog: pytest.LogCaptureFixture) -> None:
    scheduler, reader = Moody(blow_up, talk_nonsense, move_about), InMemoryMetricReader()
    meters = MeterProvider([reader])
    async with sim_fleet("a", scheduler=scheduler, interval_s=0.1, meter_provider=meters) as fleet:
        for name in ("e0", "e1"):
            await fleet.swap(name, to="a")
        async with anyio.create_task_group() as clients:
            for number in range(4):
                clients.start_soon(read, fleet, "a", (number,), Sampling(max_tokens=200, ignore_eos=True))
        idle(fleet)
        assert "done" in {move.outcome for move in fleet.migrations}, "a plan is as good as ever afterwards"
    assert scheduler.num_plans > 10
    assert "a scheduler's own fault" in caplog.text
    assert "is no action" in caplog.text
    assert sum(metrics_of(reader.get_metrics_data())["hotswap.control.errors"]) > 10


@virtual_time
async def test_a_mover_that_raises_in_a_drain_ends_the_drain_alone_and_by_its_own_error() -> None:
    async with sim_fleet("a", scheduler=Idle(), mover=NoIdea()) as fleet:
        for instance in fleet.view().instances:
            await fleet.swap(instance.id, to="a")
        async with fleet.stream("a", [1], Sampling(max_tokens=50, ignore_eos=True)) as stream:
            await anext(stream)
            with pytest.raises(ZeroDivisionError):
                await fleet.drain(stream.hops[0].instance)
            tokens = await stream.collect()
        assert [token.id for token in tokens] == expected(stream.request)[1:]
        assert not any(instance.draining for instance in fleet.view().instances)
        idle(fleet)


@virtual_time
async def test_a_mover_that_raises_in_a_planned_move_ends_nothing(caplog: pytest.LogCaptureFixture) -> None:
    async with sim_fleet("a", scheduler=Moody(move_about), mover=NoIdea(), interval_s=0.1) as fleet:
        for name in ("e0", "e1"):
            await fleet.swap(name, to="a")
        await read(fleet, "a", (1,), Sampling(max_tokens=100, ignore_eos=True))
        idle(fleet)
    assert "a mover's own fault" in caplog.text


class Shy(WrapperEngine):
    """Says nothing of itself for some turns of the control loop."""

    num_secrets = 0

    def status(self) -> EngineStatus:
        if self.num_secrets:
            self.num_secrets -= 1
            raise ZeroDivisionError("an engine's own fault")
        return super().status()


@virtual_time
async def test_an_engine_that_cannot_be_looked_at_ends_no_stream(caplog: pytest.LogCaptureFixture) -> None:
    engine = Shy(engine_of("e0"))
    async with sim_fleet("a", engines=[engine], interval_s=0.01) as fleet:
        async with fleet.stream("a", (1,), SOME) as stream:
            await anext(stream)
            engine.num_secrets = 3
            assert len(await stream.collect()) == 24
        assert engine.num_secrets == 0
        idle(fleet)
    assert "an engine's own fault" in caplog.text


class NoDisk(WrapperStore):
    """Prefetches, and fails as no store should."""

    async def prefetch(self, model: ModelId) -> None:
        raise OSError("no such disk")

    async def drop(self, model: ModelId) -> None:
        raise OSError("no such disk")


@virtual_time
async def test_a_prefetch_that_fails_in_any_way_ends_nothing(caplog: pytest.LogCaptureFixture) -> None:
    class Early(Idle):
        def plan(self, fleet: FleetView) -> list[Action]:
            return [Prefetch(model=ModelId("a"))]

    async with sim_fleet("a", store=NoDisk(store_of("a")), scheduler=Early()) as fleet:
        await fleet.swap("e0", to="a")
        await read(fleet, "a", (1,), SOME)
    assert "no such disk" in caplog.text


class Pretending(WrapperEngine):
    """Says that it loaded, and did not."""

    async def load(self, model: ModelCard, store: WeightStore) -> None:
        await anyio.lowlevel.checkpoint()


@virtual_time
async def test_an_engine_that_did_not_load_what_it_says_fails_its_swap() -> None:
    class Always(Idle):
        def plan(self, fleet: FleetView) -> list[Action]:
            return [Swap(instance=E0, model=ModelId("a"))]

    async with sim_fleet("a", engines=[Pretending(engine_of("e0"))], scheduler=Always()) as fleet:
        await until(lambda: len(fleet.swaps) == 3)
        assert {record.outcome for record in fleet.swaps} == {"failed"}
        assert anyio.current_time() > 1
        with pytest.raises(SwapFailed, match="EMPTY"):
            await fleet.swap("e0", to="a")


class Unrecorded(SpanProcessor):
    """Fails at the end of every span of one name."""

    def __init__(self, name: str) -> None:
        self.name = name

    def on_end(self, span: ReadableSpan) -> None:
        if span.name == self.name:
            raise ZeroDivisionError("an exporter's own fault")


@pytest.mark.parametrize("name", ["text_completion a", "hotswap.swap"])
@virtual_time
async def test_a_tracer_that_raises_ends_neither_streams_nor_the_fleet(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    provider = TracerProvider()
    provider.add_span_processor(Unrecorded(name))
    async with sim_fleet("a", tracer_provider=provider) as fleet:
        with anyio.fail_after(60):
            await read(fleet, "a", (1,), SOME)
        idle(fleet)
    assert "an exporter's own fault" in caplog.text


@virtual_time
async def test_losing_an_instance_in_every_load_turns_no_client_away() -> None:
    engine = engine_of("e0")
    async with sim_fleet("a", engines=[engine]) as fleet, anyio.create_task_group() as clients:
        clients.start_soon(read, fleet, "a", (1,), SOME)
        for _ in range(5):
            await until(lambda: engine.status().state is InstanceState.LOADING)
            engine.lose("it has a bad day")
