"""Engines that are lost for good, hang in a restart or tell no status: the fleet goes on without them."""

from __future__ import annotations

import logging
import re
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from itertools import pairwise
from typing import cast

import anyio
import pytest

from hotswap import Adapter, AdapterId, Fleet, InstanceId, InstanceState, Sampling, SwapLimits
from hotswap.abc import Engine, EngineStatus, WrapperEngine
from hotswap.backends.sim import SimEngine
from hotswap.errors import HotswapError, InstanceError
from hotswap.offline.virtual_time import run, virtual_time
from tests.runtime.support import PROFILE, Idle, engine_of, idle, models, read, sim_fleet, until

LONG = Sampling(max_tokens=300, ignore_eos=True)
SOME = Sampling(max_tokens=25, ignore_eos=True)
E0 = InstanceId("e0")


def ids(fleet: Fleet) -> set[str]:
    return {instance.id for instance in fleet.view().instances}


# ---------------------------------------------------------------- lost for good: removed and replaced

# When the engine is lost, seconds after its removal began; each step of it takes a second.
MOMENTS_S = (-0.5, 0.1, 0.3, 0.6, 1.1)


@asynccontextmanager
async def two_with_requests() -> AsyncGenerator[tuple[Fleet, SimEngine]]:
    """Two replicas with requests on both; the first takes a while to hand over and to unload."""
    first = SimEngine("e0", replace(PROFILE, unload_s=1.0, handover_s=0.1), kv_blocks=512, max_requests=16)
    engines = [first, engine_of("e1", max_requests=16)]
    async with sim_fleet("a", engines=engines, scheduler=Idle()) as fleet:
        for engine in engines:
            await fleet.swap(engine.id, to="a")
        async with anyio.create_task_group() as clients:
            for number in range(8):
                clients.start_soon(read, fleet, "a", (1, number), LONG)
            await until(lambda: fleet.view().instance(E0).num_running == 4)
            yield fleet, first
        idle(fleet)


async def lost_after(engine: SimEngine, seconds: float) -> None:
    await anyio.sleep(max(seconds, 0.0))
    engine.lose("its device burnt", for_good=True)


@pytest.mark.parametrize("moment_s", MOMENTS_S)
@virtual_time
async def test_an_engine_that_is_lost_for_good_can_be_removed(moment_s: float) -> None:
    async with two_with_requests() as (fleet, first), anyio.create_task_group() as tasks:
        tasks.start_soon(lost_after, first, moment_s)
        await anyio.sleep(max(-moment_s, 0.0))
        with anyio.fail_after(60):
            record = await fleet.remove("e0")
        assert ids(fleet) == {"e1"}
        assert record.instance == "e0"
        await anyio.sleep(60)
        assert ids(fleet) == {"e1"}


@pytest.mark.parametrize("moment_s", MOMENTS_S)
@virtual_time
async def test_an_engine_that_is_lost_for_good_can_be_replaced(moment_s: float) -> None:
    async with two_with_requests() as (fleet, first), anyio.create_task_group() as tasks:
        tasks.start_soon(lost_after, first, moment_s)
        await anyio.sleep(max(-moment_s, 0.0))
        with anyio.fail_after(60):
            await fleet.replace("e0", by=engine_of("new"))
        assert ids(fleet) == {"e1", "new"}
        assert all(instance.open or instance.free for instance in fleet.view().instances)
        if fleet.view().instance(InstanceId("new")).model is None:  # the lost one served nothing any more
            await fleet.swap("new", to="a")
        await read(fleet, "a", (9,), SOME)


@virtual_time
async def test_an_engine_that_came_later_and_is_lost_for_good_can_be_removed_and_come_back() -> None:
    async with sim_fleet("a", engines=1, scheduler=Idle()) as fleet:
        await fleet.swap("e0", to="a")
        for _ in range(2):
            more = engine_of("more")
            await fleet.add(more)
            await fleet.swap("more", to="a")
            more.lose("its device burnt", for_good=True)
            await anyio.sleep(30)
            with anyio.fail_after(60):
                await fleet.remove("more")
            assert ids(fleet) == {"e0"}
        await read(fleet, "a", (1,), SOME)


@virtual_time
async def test_the_last_engine_of_a_model_that_is_lost_for_good_gives_its_requests_to_a_new_one() -> None:
    engine = engine_of("e0")
    async with sim_fleet("a", engines=[engine]) as fleet, anyio.create_task_group() as clients:
        for number in range(3):
            clients.start_soon(read, fleet, "a", (1, number), LONG)
        await until(lambda: fleet.view().instance(E0).num_running == 3)
        engine.lose("its device burnt", for_good=True)
        await anyio.sleep(1)
        with anyio.fail_after(60):
            await fleet.replace("e0", by=engine_of("new"))
        assert ids(fleet) == {"new"}


# ---------------------------------------------------------------- restarts


class Restarting(WrapperEngine):
    """Counts its restarts; the first of them hang, for as long as nothing cancels them."""

    def __init__(self, engine: Engine, *, num_hang: int = 0) -> None:
        super().__init__(engine)
        self.num_hang = num_hang
        self.unloaded_s: list[float] = []

    async def unload(self) -> None:
        self.unloaded_s.append(anyio.current_time())
        if len(self.unloaded_s) <= self.num_hang:
            await anyio.sleep_forever()
        await super().unload()


@virtual_time
async def test_an_engine_that_is_lost_for_good_is_not_restarted_for_ever(
    caplog: pytest.LogCaptureFixture,
) -> None:
    inner = engine_of("e0")
    engine = Restarting(inner)
    async with sim_fleet("a", engines=[engine, engine_of("e1")], scheduler=Idle()) as fleet:
        for instance in ("e0", "e1"):
            await fleet.swap(instance, to="a")
        inner.lose("its device burnt", for_good=True)
        await read(fleet, "a", (1,), SOME)
        with caplog.at_level(logging.WARNING, "hotswap"):
            await anyio.sleep(3600)
        assert 1 <= len(engine.unloaded_s) <= 16
        warned = [r.getMessage() for r in caplog.records if r.name == "hotswap" and "e0" in r.getMessage()]
        assert len(warned) <= len(engine.unloaded_s) + 1
        assert re.search(r"for good|given up|not (be )?(tried|restarted) again", warned[-1]), warned[-1]
        assert fleet.view().instance(E0).state is InstanceState.LOST
        await read(fleet, "a", (2,), SOME)


@virtual_time
async def test_a_lost_engine_that_comes_back_late_serves_again() -> None:
    inner = engine_of("e0")
    async with sim_fleet("a", engines=[inner]) as fleet:
        await read(fleet, "a", (1,), SOME)
        inner.lose("its host restarts", for_good=True)
        await anyio.sleep(4)
        inner.lose("its host has restarted")
        with anyio.fail_after(120):
            await read(fleet, "a", (2,), SOME)


@pytest.mark.parametrize("num_hang", [1, 3])
@virtual_time
async def test_a_restart_that_hangs_is_given_up_after_the_limit_of_an_unload_and_tried_again(
    num_hang: int,
) -> None:
    inner = engine_of("e0")
    engine = Restarting(inner, num_hang=num_hang)
    async with sim_fleet("a", engines=[engine], limits=SwapLimits(unload_s=5)) as fleet:
        await read(fleet, "a", (1,), SOME)
        lost_s = anyio.current_time()
        inner.lose()
        with anyio.fail_after(600):
            await read(fleet, "a", (2,), SOME)
        assert len(engine.unloaded_s) == num_hang + 1
        assert engine.unloaded_s[0] == pytest.approx(lost_s, abs=0.01)
        pauses_s = [later - earlier for earlier, later in pairwise(engine.unloaded_s)]
        assert all(5 <= pause_s <= 5 + 31 for pause_s in pauses_s)


@virtual_time
async def test_an_engine_that_hangs_in_every_restart_can_be_removed() -> None:
    inner = engine_of("e0")
    engine = Restarting(inner, num_hang=1_000_000)
    limits = SwapLimits(unload_s=5)
    async with sim_fleet("a", engines=[engine, engine_of("e1")], scheduler=Idle(), limits=limits) as fleet:
        await fleet.swap("e1", to="a")
        await fleet.swap("e0", to="a")
        inner.lose()
        await anyio.sleep(1)
        with anyio.fail_after(60):
            await fleet.remove("e0")
        assert ids(fleet) == {"e1"}
        await read(fleet, "a", (1,), SOME)


@virtual_time
async def test_a_fleet_ends_while_a_restart_hangs() -> None:
    inner = engine_of("e0")
    with anyio.fail_after(60):
        async with sim_fleet("a", engines=[Restarting(inner, num_hang=1_000_000)]) as fleet:
            await read(fleet, "a", (1,), SOME)
            inner.lose()
            await anyio.sleep(1)


# ---------------------------------------------------------------- an engine that tells no status


class Silent(WrapperEngine):
    """Raises at one look at its status, counted from `arm` on."""

    countdown = 0
    num_looks = 0

    def arm(self, look: int) -> None:
        self.countdown, self.num_looks = look, 0

    def status(self) -> EngineStatus:
        self.num_looks += 1
        if self.num_looks == self.countdown:
            raise OSError("the driver does not answer")
        return super().status()


async def settles(fleet: Fleet) -> None:
    await until(lambda: fleet.view().instance(E0).free, within_s=120)


async def swapped_by_hand(look: int) -> int:
    """Swap beside a status that fails once, and swap again; return how often the status was looked at."""
    engine = Silent(engine_of("e0"))
    async with sim_fleet("a", "b", engines=[engine], scheduler=Idle()) as fleet:
        await fleet.swap("e0", to="a")
        engine.arm(look)
        with suppress(HotswapError):
            await fleet.swap("e0", to="b")
        num_looks = engine.num_looks
        engine.arm(0)
        await settles(fleet)
        for model in ("a", "b", "a"):
            if fleet.view().instance(E0).model != model:
                with anyio.fail_after(60):
                    await fleet.swap("e0", to=model)
        await read(fleet, "a", (1,), SOME)
        idle(fleet)
    return num_looks


async def swapped_by_plan(look: int) -> int:
    """The same with a scheduler that asks for the swap."""
    engine = Silent(engine_of("e0"))
    async with sim_fleet("a", "b", engines=[engine], interval_s=0.5) as fleet:
        await read(fleet, "a", (1,), SOME)
        await anyio.sleep(0.1)
        engine.arm(look)
        with anyio.fail_after(120):
            await read(fleet, "b", (1,), SOME)
        num_looks = engine.num_looks
        engine.arm(0)
        with anyio.fail_after(120):
            await read(fleet, "a", (3,), SOME)
        idle(fleet)
    return num_looks


async def unloaded_by_hand(look: int) -> int:
    engine = Silent(engine_of("e0"))
    async with sim_fleet("a", engines=[engine], scheduler=Idle()) as fleet:
        await fleet.swap("e0", to="a")
        engine.arm(look)
        with suppress(HotswapError):
            await fleet.unload("e0")
        num_looks = engine.num_looks
        engine.arm(0)
        await settles(fleet)
        if fleet.view().instance(E0).model is None:
            await fleet.swap("e0", to="a")
        await read(fleet, "a", (1,), SOME)
    return num_looks


async def restarted(look: int) -> int:
    inner = engine_of("e0")
    engine = Silent(inner)
    async with sim_fleet("a", engines=[engine], models=models("a", min_replicas=1)) as fleet:
        await fleet.ready()
        engine.arm(look)
        inner.lose()
        await anyio.sleep(0.5)
        num_looks = engine.num_looks
        engine.arm(0)
        with anyio.fail_after(120):
            await read(fleet, "a", (1,), SOME)
    return num_looks


@pytest.mark.parametrize("swap", [swapped_by_hand, swapped_by_plan, unloaded_by_hand, restarted])
def test_an_engine_whose_status_raises_at_any_look_leaves_its_instance_usable(
    swap: Callable[[int], Awaitable[int]],
) -> None:
    look = 1
    while look <= run(swap, look):
        look += 1
        assert look < 200
    assert look > 1, "its status was never asked for"


class Mute(WrapperEngine):
    """Tells no status any more once `mute` is set: it raises, or gives something else if `babbles` is set."""

    mute = babbles = False

    def __init__(self, engine: SimEngine) -> None:
        super().__init__(engine)
        self.inner = engine

    def status(self) -> EngineStatus:
        if self.mute and self.babbles:
            return cast("EngineStatus", None)
        if self.mute:
            raise OSError("the driver does not answer")
        return super().status()

    async def load_adapter(self, adapter: Adapter) -> None:
        raise AssertionError("no adapter is asked for")

    async def drop_adapter(self, adapter: AdapterId) -> None:
        raise AssertionError("none is held")


@asynccontextmanager
async def beside_a_mute() -> AsyncGenerator[tuple[Fleet, Mute]]:
    """An instance that cannot tell its status any more, and two that serve requests beside it."""
    mute = Mute(engine_of("e0"))
    engines = [mute, engine_of("e1"), engine_of("e2")]
    async with sim_fleet("a", "b", engines=engines, scheduler=Idle()) as fleet:
        for engine in engines:
            await fleet.swap(engine.id, to="a")
        mute.mute = True
        async with anyio.create_task_group() as clients:
            for number in range(6):
                clients.start_soon(read, fleet, "a", (1, number), LONG)
            yield fleet, mute
        idle(fleet)


VERBS: dict[str, Callable[[Fleet], Awaitable[object]]] = {
    "swap": lambda fleet: fleet.swap("e0", to="b"),
    "unload": lambda fleet: fleet.unload("e0"),
    "roll": lambda fleet: fleet.roll("a", to="b", streams="moved"),
    "models.remove": lambda fleet: fleet.models.remove("a", deadline_s=60),
}


@pytest.mark.parametrize("verb", VERBS)
@virtual_time
async def test_a_verb_names_the_instance_that_cannot_tell_its_status(verb: str) -> None:
    async with beside_a_mute() as (fleet, mute):
        with anyio.fail_after(120), pytest.raises(InstanceError, match="'e0'") as raised:
            await VERBS[verb](fleet)
        causes = [raised.value, raised.value.__cause__]
        assert any(isinstance(error, OSError) for error in causes[1:])
        assert not any(instance.swapping for instance in fleet.view().instances)
        mute.mute = False
        if fleet.view().instance(E0).model != "b":  # it can be used again as soon as it tells
            await fleet.swap("e0", to="b")
        await read(fleet, "b", (1,), SOME)


@virtual_time
async def test_instances_beside_one_that_cannot_tell_its_status_are_served_on() -> None:
    async with beside_a_mute() as (fleet, _):
        assert fleet.view().instance(E0).model == "a"  # as it was seen last
        await read(fleet, "a", (7,), SOME)
        await fleet.drain("e1")
        await fleet.swap("e1", to="b")
        await read(fleet, "b", (8,), SOME)
        fleet.adapters.add(Adapter("x", "b", "/x"))
        await fleet.adapters.remove("b", "x")
        await fleet.swap("e1", to="a")
        await fleet.models.remove("b")
        await fleet.drain("e0")
        assert fleet.view().instance(E0).num_requests == 0


@virtual_time
async def test_a_status_of_another_type_is_told_by_the_instance_that_gave_it() -> None:
    async with beside_a_mute() as (fleet, mute):
        mute.babbles = True
        with pytest.raises(InstanceError, match=r"'e0' cannot tell its status .*None is no EngineStatus"):
            await fleet.swap("e0", to="b")
        await read(fleet, "a", (7,), SOME)


@pytest.mark.parametrize("babbles", [False, True])
@pytest.mark.parametrize("operation", ["remove", "replace"])
@virtual_time
async def test_an_instance_that_cannot_tell_its_status_can_be_removed_and_replaced(
    operation: str, babbles: bool
) -> None:
    async with beside_a_mute() as (fleet, mute):
        mute.babbles = babbles
        with anyio.fail_after(60):
            await (fleet.remove("e0") if operation == "remove" else fleet.replace("e0", by=engine_of("new")))
        assert ids(fleet) == ({"e1", "e2"} if operation == "remove" else {"e1", "e2", "new"})
        assert {instance.model for instance in fleet.view().instances} == {"a"}


@virtual_time
async def test_a_lost_instance_is_restarted_beside_one_that_cannot_tell_its_status() -> None:
    async with beside_a_mute() as (fleet, mute):
        await until(lambda: fleet.view().instance(E0).num_requests > 0)
        mute.inner.lose("its device failed")  # which it tells its requests alone
        await until(lambda: fleet.view().instance(E0).state is InstanceState.LOST)
        lost = engine_of("e3")
        await fleet.add(lost)
        await fleet.swap("e3", to="a")
        lost.lose("its device failed")
        await until(lambda: fleet.view().instance(InstanceId("e3")).state is InstanceState.EMPTY, within_s=60)
