"""Operations on a running fleet, at once and cancelled midway: one of each kind, whole or not at all."""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, Self

import anyio
import pytest
from anyio.lowlevel import checkpoint

from hotswap import Fleet, InstanceId, InstanceState, Sampling
from hotswap.abc import Engine, EngineStatus, ModelCard, StatusListener, WrapperEngine
from hotswap.backends.sim import SimEngine
from hotswap.errors import ConfigError, HotswapError, InstanceError, SwapFailed, SwapRefused
from hotswap.offline.virtual_time import virtual_time
from hotswap.testing.cancel import cancel_everywhere
from tests.runtime.support import PROFILE, Idle, idle, read, sim_fleet, store_of, until
from tests.runtime.test_swap import Unreadable

LONG = Sampling(max_tokens=300, ignore_eos=True)
SOME = Sampling(max_tokens=25, ignore_eos=True)
E0 = InstanceId("e0")


class Slow(SimEngine):
    """Takes a while to start and to stop, and counts both."""

    def __init__(self, name: str, *, start_s: float = 0.5, stop_s: float = 0.5, fails: bool = False) -> None:
        super().__init__(name, PROFILE, kv_blocks=512, max_requests=8)
        self.start_s, self.stop_s, self.fails = start_s, stop_s, fails
        self.num_starts = self.num_stops = 0

    @asynccontextmanager
    async def __asynccontextmanager__(self) -> AsyncGenerator[Self]:
        self.num_starts += 1
        try:
            await anyio.sleep(self.start_s)
            if self.fails:
                raise OSError(f"{self.id} has no device")
            async with super().__asynccontextmanager__():
                yield self
            with anyio.CancelScope(shield=True):
                await anyio.sleep(self.stop_s)
        finally:
            self.num_stops += 1


class Full(Slow):
    """Has no room for a request."""

    def status(self) -> EngineStatus:
        return super().status().updated(max_requests=0)


def ids(fleet: Fleet) -> set[str]:
    return {instance.id for instance in fleet.view().instances}


def fleet_of(*names: str, **options: Any) -> Fleet:
    return sim_fleet(*names, **{"scheduler": Idle(), **options})


async def outcome(work: Awaitable[object], outcomes: list[object]) -> None:
    """Await work and write down what it returns or which error it ends by."""
    try:
        outcomes.append(await work)
    except HotswapError as exc:
        outcomes.append(type(exc))


# ---------------------------------------------------------------- one id, many operations at once


@pytest.mark.parametrize("start_s", [0.0, 0.5])
@pytest.mark.parametrize("count", [2, 7])
@virtual_time
async def test_of_engines_of_one_id_that_are_added_at_once_one_is_taken_in(
    count: int, start_s: float
) -> None:
    outcomes: list[object] = []
    engines = [Slow("new", start_s=start_s) for _ in range(count)]
    async with fleet_of("a", engines=1) as fleet:
        async with anyio.create_task_group() as operators:
            for engine in engines:
                operators.start_soon(outcome, fleet.add(engine), outcomes)
        assert outcomes.count(None) == 1
        assert outcomes.count(ConfigError) == count - 1
        assert ids(fleet) == {"e0", "new"}
        await fleet.swap("new", to="a")
        await read(fleet, "a", (1,), SOME)
    assert sorted(engine.num_starts - engine.num_stops for engine in engines) == [0] * count
    assert sum(engine.num_starts for engine in engines) == 1, "an engine that is refused is not started"


@virtual_time
async def test_engines_of_different_ids_are_added_at_once() -> None:
    async with fleet_of("a", engines=1) as fleet:
        async with anyio.create_task_group() as operators:
            for number in range(5):
                operators.start_soon(fleet.add, Slow(f"new{number}"))
        assert ids(fleet) == {"e0", *(f"new{number}" for number in range(5))}


@virtual_time
async def test_an_engine_added_while_another_of_its_id_is_removed_is_refused_until_that_has_stopped() -> None:
    old, new = Slow("more", stop_s=5.0), Slow("more")
    async with fleet_of("a", engines=1) as fleet:
        await fleet.add(old)
        refused = 0
        async with anyio.create_task_group() as operators:
            operators.start_soon(fleet.remove, "more")
            await anyio.sleep(0.01)
            while old.num_stops == 0:
                with pytest.raises(ConfigError, match="more"):
                    await fleet.add(new)
                refused += 1
                await anyio.sleep(0.1)
        assert refused > 10
        await fleet.add(new)
        await fleet.swap("more", to="a")
        await read(fleet, "a", (1,), SOME)
    assert (old.num_starts, old.num_stops) == (new.num_starts, new.num_stops) == (1, 1)


@virtual_time
async def test_an_engine_added_while_another_of_its_id_comes_by_replace_is_refused() -> None:
    outcomes: list[object] = []
    async with fleet_of("a", engines=1) as fleet:
        await fleet.swap("e0", to="a")
        async with anyio.create_task_group() as operators:
            operators.start_soon(lambda: fleet.replace("e0", by=Slow("new")))
            for _ in range(20):
                await anyio.sleep(0.04)
                await outcome(fleet.add(Slow("new", start_s=0.0)), outcomes)
        assert set(outcomes) == {ConfigError}
        assert ids(fleet) == {"new"}
        await read(fleet, "a", (1,), SOME)


@virtual_time
async def test_two_instances_replaced_at_once_by_engines_of_one_id_leave_one_replaced() -> None:
    outcomes: list[object] = []
    async with fleet_of("a", engines=2) as fleet:
        for instance in ("e0", "e1"):
            await fleet.swap(instance, to="a")
        async with anyio.create_task_group() as operators:
            for instance in ("e0", "e1"):
                operators.start_soon(outcome, fleet.replace(instance, by=Slow("new")), outcomes)
        assert outcomes.count(ConfigError) == 1
        assert len(ids(fleet)) == 2
        assert "new" in ids(fleet)
        assert all(instance.open for instance in fleet.view().instances)


@virtual_time
async def test_an_instance_replaced_twice_at_once_is_replaced_once() -> None:
    outcomes: list[object] = []
    engines = [Slow("one"), Slow("other")]
    async with fleet_of("a", engines=1) as fleet:
        await fleet.swap("e0", to="a")
        async with anyio.create_task_group() as tasks:
            for number in range(3):
                tasks.start_soon(read, fleet, "a", (1, number), LONG)
            await until(lambda: len(fleet.view().running) == 3)
            async with anyio.create_task_group() as operators:
                for engine in engines:
                    operators.start_soon(outcome, fleet.replace("e0", by=engine), outcomes)
            assert [end for end in outcomes if isinstance(end, type)] in ([SwapRefused], [ConfigError])
            assert ids(fleet) in ({"one"}, {"other"})
            assert all(instance.open for instance in fleet.view().instances)
    assert sorted(engine.num_starts - engine.num_stops for engine in engines) == [0, 0]


@virtual_time
async def test_the_id_of_an_engine_that_could_not_start_is_free_again() -> None:
    async with fleet_of("a", engines=1) as fleet:
        async with anyio.create_task_group() as operators:

            async def fail() -> None:
                with pytest.raises(OSError, match="no device"):
                    await fleet.add(Slow("new", fails=True))

            operators.start_soon(fail)
            await anyio.sleep(0.1)
            with pytest.raises(ConfigError, match="new"):
                await fleet.add(Slow("new"))
        await fleet.add(Slow("new"))
        assert ids(fleet) == {"e0", "new"}


class Faulty(Slow):
    """Raises an error of its own in one of the calls with which a fleet takes it in."""

    faulty = ""

    def check_model(self, model: ModelCard) -> None:
        if self.faulty == "check_model":
            raise OSError("check_model")

    def watch(self, listener: StatusListener) -> bool:
        if self.faulty == "watch":
            raise OSError("watch")
        return super().watch(listener)


@pytest.mark.parametrize("call", ["check_model", "watch"])
@virtual_time
async def test_an_engine_that_fails_as_it_is_taken_in_is_stopped_and_its_id_free(call: str) -> None:
    engine = Faulty("new")
    async with fleet_of("a", engines=1) as fleet:
        engine.faulty = call
        for _ in range(2):
            with pytest.raises(OSError, match=call):
                await fleet.add(engine)
            assert engine.num_starts == engine.num_stops
            assert ids(fleet) == {"e0"}
        engine.faulty = ""
        await fleet.add(engine)
        await fleet.swap("new", to="a")
        await read(fleet, "a", (1,), SOME)
    assert engine.num_starts == engine.num_stops == 3


# ---------------------------------------------------------------- two operations on one instance


@pytest.mark.parametrize("turns_before_the_swap", range(6))
@virtual_time
async def test_an_empty_instance_that_is_swapped_while_it_is_removed_stays_or_is_gone(
    turns_before_the_swap: int,
) -> None:
    outcomes: list[object] = []
    engine = Slow("e1")
    async with fleet_of("a", engines=[Slow("e0"), engine]) as fleet:

        async def swap() -> None:
            for _ in range(turns_before_the_swap):
                await checkpoint()
            await outcome(fleet.swap("e1", to="a"), outcomes)

        async with anyio.create_task_group() as operators:
            operators.start_soon(outcome, fleet.remove("e1"), outcomes)
            operators.start_soon(swap)
        if "e1" in ids(fleet):
            assert SwapRefused in outcomes, "the removal"
            assert fleet.view().instance(InstanceId("e1")).state is InstanceState.SERVING
            await read(fleet, "a", (1,), SOME)
        else:
            assert ConfigError in outcomes, "the swap"
            assert engine.num_stops == 1
        idle(fleet)


@pytest.mark.parametrize("operation", ["remove", "replace", "roll"])
@virtual_time
async def test_an_instance_that_is_reopened_while_it_is_emptied_stays_as_it_is(operation: str) -> None:
    """Its requests go on where they are: none is evicted."""
    async with fleet_of("a", "b", engines=1) as fleet:
        await fleet.swap("e0", to="a")
        work: dict[str, Callable[[], Awaitable[object]]] = {
            "remove": lambda: fleet.remove("e0"),
            "replace": lambda: fleet.replace("e0", by=Full("new")),
            "roll": lambda: fleet.roll("a", to="b"),
        }
        outcomes: list[object] = []
        async with fleet.stream("a", (1,), LONG) as stream, anyio.create_task_group() as operators:
            await anext(stream)
            operators.start_soon(lambda: outcome(work[operation](), outcomes))
            await until(lambda: fleet.view().instance(E0).draining)
            fleet.reopen("e0")
            await stream.collect()
        assert outcomes == [SwapRefused]
        assert stream.num_hops == 1
        assert ids(fleet) == {"e0"}
        assert fleet.view().instance(E0).model == "a"
        await read(fleet, "a", (1,), SOME)
        idle(fleet)


# ---------------------------------------------------------------- engines in use


@asynccontextmanager
async def entered(engine: Engine) -> AsyncGenerator[None]:
    async with engine:
        yield


@asynccontextmanager
async def in_another_fleet(engine: Engine) -> AsyncGenerator[None]:
    async with fleet_of("a", engines=[engine]):
        yield


@asynccontextmanager
async def added_to_another_fleet(engine: Engine) -> AsyncGenerator[None]:
    async with fleet_of("a", engines=1) as other:
        await other.add(engine)
        yield


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("used", [entered, in_another_fleet, added_to_another_fleet])
@virtual_time
async def test_an_engine_that_is_in_use_already_is_refused(
    used: Callable[[Engine], AbstractAsyncContextManager[None]], wrapped: bool
) -> None:
    engine = Slow("new")
    given = WrapperEngine(engine) if wrapped else engine
    async with fleet_of("a", engines=1) as fleet:
        async with used(engine):
            with pytest.raises(ConfigError, match="'new' is in use already"):
                await fleet.add(given)
            with pytest.raises(ConfigError, match="'new' is in use already"):
                await fleet.replace("e0", by=given)
            with pytest.raises(ConfigError, match="'new' is in use already"):
                async with fleet_of("a", engines=[given]):
                    raise AssertionError("the fleet was opened")
            assert ids(fleet) == {"e0"}
        await fleet.add(given)  # it has been left, and may be used again
        await fleet.swap("new", to="a")
        await read(fleet, "a", (1,), SOME)
    assert engine.num_starts == engine.num_stops == 2


@virtual_time
async def test_a_store_that_is_in_use_already_is_refused() -> None:
    store = store_of("a")
    async with fleet_of("a", store=store):
        with pytest.raises(ConfigError, match="store is in use already"):
            async with fleet_of("a", store=store):
                raise AssertionError("the fleet was opened")


# ---------------------------------------------------------------- a replacement that fails


async def cannot_read(fleet: Fleet, new: Slow) -> None:
    """The store fails to read the model."""


async def is_lost(fleet: Fleet, new: Slow) -> None:
    await until(lambda: new.status().state is InstanceState.LOADING)
    new.lose("its device failed")


async def is_lost_for_good(fleet: Fleet, new: Slow) -> None:
    await until(lambda: new.status().state is InstanceState.LOADING)
    new.lose("its device burnt", for_good=True)


async def is_refused(fleet: Fleet, new: Slow) -> None:
    """The old instance is drained already."""
    await fleet.drain("e0")


FAILURES = [cannot_read, is_lost, is_lost_for_good, is_refused]


@pytest.mark.parametrize("happens", FAILURES)
@virtual_time
async def test_a_replacement_that_fails_leaves_no_new_engine_behind(
    happens: Callable[[Fleet, Slow], Coroutine[Any, Any, None]],
) -> None:
    store, new = Unreadable(store_of("a")), Slow("new")
    async with fleet_of("a", engines=1, store=store) as fleet:
        await fleet.swap("e0", to="a")
        if happens is cannot_read:
            store.models.add("a")
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(read, fleet, "a", (1,), LONG)
            await until(lambda: len(fleet.view().running) == 1)
            tasks.start_soon(happens, fleet, new)
            await checkpoint()
            with anyio.fail_after(300), pytest.raises((SwapFailed, SwapRefused)):
                await fleet.replace("e0", by=new)
            assert ids(fleet) == {"e0"}
            fleet.reopen("e0")
        assert fleet.view().instance(E0).model == "a"
        assert new.num_starts == new.num_stops
        await read(fleet, "a", (2,), SOME)
        idle(fleet)


# ---------------------------------------------------------------- engines that fail as they stop


@virtual_time
async def test_the_engines_of_a_fleet_start_and_stop_at_the_same_time() -> None:
    engines = [Slow(f"e{n}", start_s=2.0, stop_s=1.0) for n in range(8)]
    async with sim_fleet("a", engines=engines):
        assert anyio.current_time() == 2.0
    assert anyio.current_time() == 3.0
    assert all(engine.num_starts == engine.num_stops == 1 for engine in engines)


@virtual_time
async def test_an_engine_that_cannot_start_has_the_others_stopped() -> None:
    engines = [Slow("e0", start_s=0.1), Slow("e1", start_s=9.0), Slow("e2", start_s=0.5, fails=True)]
    with pytest.raises(OSError, match="e2 has no device"):
        async with sim_fleet("a", engines=engines):
            raise AssertionError("it is open")
    assert [engine.num_stops for engine in engines] == [1, 1, 1]
    assert anyio.current_time() < 9.0, "it did not wait for the slowest"


class Stuck(SimEngine):
    """Cannot be stopped without an error."""

    @asynccontextmanager
    async def __asynccontextmanager__(self) -> AsyncGenerator[Self]:
        async with super().__asynccontextmanager__():
            yield self
        raise OSError(f"{self.id} does not let go of its device")


@pytest.mark.parametrize("operation", ["remove", "replace"])
@virtual_time
async def test_an_engine_that_fails_as_it_stops_ends_nothing_but_its_removal(
    operation: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with fleet_of("a", engines=1) as fleet:
        await fleet.swap("e0", to="a")
        await fleet.add(Stuck("more", PROFILE, kv_blocks=512, max_requests=8))
        await fleet.swap("more", to="a")
        async with anyio.create_task_group() as clients:
            for number in range(4):
                clients.start_soon(read, fleet, "a", (1, number), LONG)
            await until(lambda: len(fleet.view().running) == 4)
            with pytest.raises(InstanceError, match="does not let go") as raised:
                await (
                    fleet.remove("more") if operation == "remove" else fleet.replace("more", by=Slow("new"))
                )
        assert isinstance(raised.value.__cause__, OSError)
        assert any("'more' failed as it stopped" in record.getMessage() for record in caplog.records)
        assert ids(fleet) == ({"e0"} if operation == "remove" else {"e0", "new"})
        await fleet.add(Slow("more"))  # its id is free
        await read(fleet, "a", (5,), SOME)
        idle(fleet)


# ---------------------------------------------------------------- cancelled at every turn


class Counted:
    """Makes engines and counts those that run."""

    def __init__(self) -> None:
        self.engines: list[Slow] = []

    def __call__(self, name: str) -> Slow:
        self.engines.append(Slow(name, start_s=0.02, stop_s=0.02))
        return self.engines[-1]

    @property
    def num_running(self) -> int:
        return sum(engine.num_starts - engine.num_stops for engine in self.engines)


async def settled(fleet: Fleet, *, instances: int) -> None:
    """Let what is shielded end; then all instances are open for their model or empty, and none is claimed."""
    with anyio.fail_after(60):
        await anyio.sleep(5)
    idle(fleet)
    view = fleet.view()
    assert len(view.instances) == instances
    assert not any(instance.draining or instance.num_moves for instance in view.instances)
    assert all(instance.free for instance in view.instances)


async def serving(fleet: Fleet, *instances: str) -> None:
    for instance in instances:
        if fleet.view().instance(InstanceId(instance)).model != "a":
            await fleet.swap(instance, to="a")


async def beside_requests(fleet: Fleet, work: Callable[[], Awaitable[object]]) -> None:
    async with anyio.create_task_group() as clients:
        for number in range(3):
            clients.start_soon(read, fleet, "a", (1, number), SOME)
        await anyio.sleep(0.05)
        await work()


@virtual_time
async def test_a_drain_cancelled_at_every_turn_leaves_all_instances_open() -> None:
    async with fleet_of("a", engines=2) as fleet:
        await serving(fleet, "e0", "e1")

        async def drain() -> None:
            await fleet.drain("e0", deadline_s=0.1)
            fleet.reopen("e0")

        async def check() -> None:
            await settled(fleet, instances=2)
            assert [instance.open for instance in fleet.view().instances] == [True, True]

        assert await cancel_everywhere(lambda: beside_requests(fleet, drain), check, every="turn") > 20


@virtual_time
async def test_a_removal_cancelled_at_every_turn_leaves_the_instance_open_or_gone() -> None:
    made = Counted()
    async with fleet_of("a", engines=1) as fleet:
        await serving(fleet, "e0")

        async def prepare() -> None:
            if "more" not in ids(fleet):
                await fleet.add(made("more"))
            await serving(fleet, "more")

        async def check() -> None:
            await settled(fleet, instances=len(ids(fleet)))
            assert made.num_running == len(ids(fleet) - {"e0"})
            await read(fleet, "a", (5,), SOME)
            await prepare()

        await prepare()
        number = await cancel_everywhere(
            lambda: beside_requests(fleet, lambda: fleet.remove("more", deadline_s=0.1)), check, every="turn"
        )
        assert number > 20


@virtual_time
async def test_an_addition_cancelled_at_every_turn_leaves_the_engine_running_or_its_id_free() -> None:
    made = Counted()
    # Without turns of the control loop, so that a hang is a deadlock in virtual time.
    async with fleet_of("a", engines=1, interval_s=math.inf) as fleet:

        async def check() -> None:
            await settled(fleet, instances=len(ids(fleet)))
            assert made.num_running == len(ids(fleet) - {"e0"})
            if "more" not in ids(fleet):
                await fleet.add(made("more"))
            await fleet.remove("more")
            assert made.num_running == 0

        assert await cancel_everywhere(lambda: fleet.add(made("more")), check, every="turn") > 2


@virtual_time
async def test_a_replacement_cancelled_at_every_turn_leaves_the_old_engine_or_the_new_one() -> None:
    made = Counted()
    async with fleet_of("a", engines=1) as fleet:
        await serving(fleet, "e0")
        await fleet.replace("e0", by=made("old"))

        async def replace() -> None:
            await fleet.replace("old", by=made("new"), deadline_s=0.1)

        async def check() -> None:
            await settled(fleet, instances=1)
            assert made.num_running == 1
            if "old" not in ids(fleet):
                await serving(fleet, "new")
                await fleet.replace("new", by=made("old"))
            await serving(fleet, "old")
            await read(fleet, "a", (5,), SOME)

        assert await cancel_everywhere(lambda: beside_requests(fleet, replace), check, every="turn") > 40


@virtual_time
async def test_a_roll_cancelled_at_every_turn_leaves_all_instances_open_and_can_go_on() -> None:
    async with fleet_of("a", "b", engines=2) as fleet:
        await serving(fleet, "e0", "e1")

        async def check() -> None:
            await settled(fleet, instances=2)
            for old, new in (("a", "b"), ("b", "a")):
                await fleet.roll(old, to=new)
                assert {instance.model for instance in fleet.view().instances} <= {new, None}
            await serving(fleet, "e0", "e1")
            await settled(fleet, instances=2)

        async def roll() -> None:
            async with anyio.create_task_group() as clients:
                clients.start_soon(fleet.generate, "a", (1, 2), SOME)
                await anyio.sleep(0.05)
                await fleet.roll("a", to="b")

        assert await cancel_everywhere(roll, check, every="turn") > 40
