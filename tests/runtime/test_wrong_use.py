"""What cannot be meant is refused by name, before it reaches a timer, a queue or an instance."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import anyio
import pytest

from hotswap import Fleet, InstanceId, MigrationLimits, Sampling, SwapLimits
from hotswap.errors import ConfigError, DeadlineExceeded, InvalidRequest
from hotswap.offline.virtual_time import virtual_time
from tests.runtime.support import Idle, engine_of, idle, read, sim_fleet

SOME = Sampling(max_tokens=5, ignore_eos=True)
LONG = Sampling(max_tokens=300, ignore_eos=True)
E0 = InstanceId("e0")

# Values that are no number of seconds, zero and infinity apart.
NO_SECONDS: list[Any] = [math.nan, -1, -1e-9, -math.inf, "1", "soon", True, False, [1.0], 1j, 10**400]
NO_PRIORITY: list[Any] = ["high", "1", math.nan, math.inf, 0.5, 1.0, None, [1], 1j, True, 10**400, -(10**400)]


def brief(value: object) -> str:
    return repr(value)[:9]


async def timers_go_on(fleet: Fleet) -> None:
    """Assert that sleeps end in their order and at their time, and that the fleet serves."""
    now_s, woken = anyio.current_time(), list[float]()

    async def sleeper(seconds: float) -> None:
        await anyio.sleep(seconds)
        woken.append(anyio.current_time() - now_s)

    with anyio.fail_after(60):
        async with anyio.create_task_group() as sleepers:
            for seconds in (3.0, 1.0, 2.0):
                sleepers.start_soon(sleeper, seconds)
        await read(fleet, "a", (1,), SOME)
    assert woken == pytest.approx([1.0, 2.0, 3.0])


# ---------------------------------------------------------------- requests


@pytest.mark.parametrize("deadline_s", NO_SECONDS, ids=brief)
@virtual_time
async def test_a_deadline_that_is_no_number_of_seconds_is_refused_by_name(deadline_s: Any) -> None:
    async with sim_fleet("a", scheduler=Idle()) as fleet:
        await fleet.swap("e0", to="a")
        with pytest.raises(InvalidRequest, match="deadline_s"):
            await fleet.generate("a", (1,), SOME, deadline_s=deadline_s)
        with pytest.raises(InvalidRequest, match="deadline_s"):
            async with fleet.stream("a", (1,), SOME, deadline_s=deadline_s):
                raise AssertionError("the stream was opened")
        idle(fleet)
        await timers_go_on(fleet)


@virtual_time
async def test_a_deadline_that_is_no_number_leaves_requests_under_way_alone() -> None:
    async with sim_fleet("a", scheduler=Idle()) as fleet, anyio.create_task_group() as clients:
        await fleet.swap("e0", to="a")
        for number in range(4):
            clients.start_soon(read, fleet, "a", (1, number), LONG)
        await anyio.sleep(0.5)
        with pytest.raises(InvalidRequest, match="deadline_s"):
            await fleet.generate("a", (1,), SOME, deadline_s=math.nan)
        await timers_go_on(fleet)


@pytest.mark.parametrize("deadline_s", [0, 0.0])
@pytest.mark.parametrize("serving", [True, False])
@virtual_time
async def test_a_deadline_of_zero_has_passed_at_once(deadline_s: float, serving: bool) -> None:
    async with sim_fleet("a", scheduler=Idle()) as fleet:
        if serving:
            await fleet.swap("e0", to="a")
        now_s = anyio.current_time()
        with pytest.raises(DeadlineExceeded):
            await fleet.generate("a", (1,), LONG, deadline_s=deadline_s)
        assert anyio.current_time() == now_s
        idle(fleet)


@pytest.mark.parametrize("deadline_s", [None, math.inf, 10, 1e9])
@virtual_time
async def test_a_deadline_far_away_does_not_come(deadline_s: float | None) -> None:
    async with sim_fleet("a") as fleet:
        done = await fleet.generate("a", (1,), SOME, deadline_s=deadline_s)
        assert len(done.tokens) == 5


@pytest.mark.parametrize("priority", NO_PRIORITY, ids=brief)
@virtual_time
async def test_a_priority_that_is_no_level_is_refused_by_name(priority: Any) -> None:
    async with sim_fleet("a", scheduler=Idle()) as fleet, anyio.create_task_group() as clients:
        for level in (0, 1):  # others wait, with which it would be compared
            clients.start_soon(partial(fleet.generate, "a", (1,), SOME, priority=level))
        await anyio.sleep(1)
        with anyio.move_on_after(1), pytest.raises(InvalidRequest, match="priority"):
            await fleet.generate("a", (1,), SOME, priority=priority)
        assert anyio.current_time() == 1, "it waited"
        await fleet.swap("e0", to="a")
        await timers_go_on(fleet)


# ---------------------------------------------------------------- operations

Operation = Callable[[Fleet, Any], Awaitable[object]]

OPERATIONS: dict[str, Operation] = {
    "swap": lambda fleet, value: fleet.swap("e0", to="b", deadline_s=value),
    "unload": lambda fleet, value: fleet.unload("e0", deadline_s=value),
    "drain": lambda fleet, value: fleet.drain("e0", deadline_s=value),
    "remove": lambda fleet, value: fleet.remove("e0", deadline_s=value),
    "replace": lambda fleet, value: fleet.replace("e0", by=engine_of("new"), deadline_s=value),
}


@pytest.mark.parametrize("operation", OPERATIONS)
@virtual_time
async def test_an_operation_refuses_a_deadline_that_is_no_number_of_seconds_by_name(operation: str) -> None:
    async with sim_fleet("a", "b", engines=1, scheduler=Idle()) as fleet:
        await fleet.swap("e0", to="a")
        async with anyio.create_task_group() as clients:
            clients.start_soon(read, fleet, "a", (1,), LONG)
            await anyio.sleep(0.5)
            now_s = anyio.current_time()
            for deadline_s in NO_SECONDS:
                with anyio.fail_after(60), pytest.raises(ConfigError, match="deadline_s"):
                    await OPERATIONS[operation](fleet, deadline_s)
                assert anyio.current_time() == now_s, f"it was begun with {deadline_s!r}"
            assert [(i.id, i.open, i.swapping) for i in fleet.view().instances] == [("e0", True, False)]
            assert fleet.view().instance(E0).num_running == 1
        await timers_go_on(fleet)


# ---------------------------------------------------------------- settings


def of_fleet(name: str) -> Callable[[Any], object]:
    return lambda value: sim_fleet("a", **{name: value})


def of_swaps(name: str) -> Callable[[Any], object]:
    return lambda value: SwapLimits(**{name: value})


def of_moves(name: str) -> Callable[[Any], object]:
    return lambda value: MigrationLimits(**{name: value})


SECONDS_OF: dict[str, Callable[[Any], object]] = {
    "interval_s": of_fleet("interval_s"),
    **{name: of_swaps(name) for name in ("preflight_s", "preload_s", "evict_s", "unload_s", "load_s")},
    **{name: of_moves(name) for name in ("stage_s", "round_s")},
}
COUNTS_OF: dict[str, Callable[[Any], object]] = {
    **{name: of_fleet(name) for name in ("max_waiting", "max_load_attempts")},
    **{name: of_moves(name) for name in ("per_instance", "max_stages", "chunk_bytes")},
    **{name: of_moves(name) for name in ("last_stage_blocks", "last_round_tokens")},
}


@pytest.mark.parametrize("name", SECONDS_OF)
def test_a_setting_that_is_no_number_of_seconds_is_refused_by_name(name: str) -> None:
    for value in (*NO_SECONDS, 0, None):
        with pytest.raises(ConfigError, match=name):
            SECONDS_OF[name](value)


@pytest.mark.parametrize("name", COUNTS_OF)
def test_a_setting_that_is_no_whole_number_is_refused_by_name(name: str) -> None:
    for value in (math.nan, -1, 1.5, "3", [3]):
        with pytest.raises(ConfigError, match=name):
            COUNTS_OF[name](value)


def test_settings_that_can_be_meant_are_taken() -> None:
    for name in SECONDS_OF:
        for value in (1, 0.5, 1e9):
            SECONDS_OF[name](value)
    for name in COUNTS_OF:
        COUNTS_OF[name](3)
    SwapLimits(load_s=math.inf)
    MigrationLimits(stage_s=math.inf, round_s=math.inf)
