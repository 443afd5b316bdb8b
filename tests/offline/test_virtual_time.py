"""The simulated clock: fast, in order, the same every time, and clear about a deadlock."""

from __future__ import annotations

import asyncio
from pathlib import Path
from random import Random

import anyio
import pytest
from anyio.lowlevel import checkpoint
from hypothesis import given
from hypothesis import strategies as st

from hotswap.offline.virtual_time import VirtualTimeDeadlock, VirtualTimeLoop, run, virtual_time


async def _sleepers(delays_s: list[float]) -> list[tuple[int, float]]:
    woken: list[tuple[int, float]] = []

    async def sleep(number: int, delay_s: float) -> None:
        await anyio.sleep(delay_s)
        woken.append((number, anyio.current_time()))

    async with anyio.create_task_group() as tasks:
        for number, delay_s in enumerate(delays_s):
            tasks.start_soon(sleep, number, delay_s)
    return woken


def test_an_hour_takes_no_time() -> None:
    async def hour() -> float:
        for _ in range(3600):
            await anyio.sleep(1)
        return anyio.current_time()

    assert run(hour) == 3600  # in real time this would take longer than a test may


@given(st.lists(st.sampled_from([0.1, 0.5, 0.5, 1.0, 7.25]), max_size=30))
def test_sleepers_wake_in_time_and_equals_in_order(delays_s: list[float]) -> None:
    woken = run(_sleepers, delays_s)
    assert woken == sorted(enumerate(delays_s), key=lambda sleeper: sleeper[1])


def test_the_same_program_takes_the_same_steps() -> None:
    async def program() -> list[tuple[int, float]]:
        random = Random(3)
        return await _sleepers([random.choice([0.5, random.random()]) for _ in range(200)])

    assert run(program) == run(program)


def test_a_sleep_that_is_cancelled_takes_no_time() -> None:
    async def cancelled() -> float:
        with anyio.move_on_after(2):
            await anyio.sleep(1000)
        return anyio.current_time()

    assert run(cancelled) == 2


def test_a_timer_cancelled_when_due_does_not_fire() -> None:
    async def due() -> list[str]:
        fired: list[str] = []
        loop = asyncio.get_running_loop()
        timers: list[asyncio.TimerHandle] = []
        loop.call_later(1, lambda: timers[0].cancel())
        timers.append(loop.call_later(1, fired.append, "second"))
        await anyio.sleep(2)
        return fired

    assert run(due) == []


def test_time_does_not_pass_while_something_can_run() -> None:
    seen_s: list[float] = []

    async def busy() -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(anyio.sleep, 5)
            for _ in range(1000):
                await checkpoint()
            seen_s.append(anyio.current_time())

    run(busy)
    assert seen_s == [0]


def test_a_deadlock_names_the_waiting_tasks_and_where() -> None:
    async def wait_in_vain() -> None:
        await anyio.Event().wait()

    async def dead() -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(wait_in_vain, name="the one that waits")

    with pytest.raises(VirtualTimeDeadlock, match=r"'the one that waits' in .*wait_in_vain, .*\.py:\d+"):
        run(dead)


def test_tasks_that_only_spin_are_a_deadlock_too() -> None:
    async def spin() -> None:
        while True:
            await checkpoint()

    with pytest.raises(VirtualTimeDeadlock, match="without ever sleeping"):
        run(spin)


def test_an_executor_is_refused() -> None:
    async def in_thread() -> None:
        await asyncio.get_running_loop().run_in_executor(None, print)

    with pytest.raises(RuntimeError, match="sent to a thread under virtual time"):
        run(in_thread)


def test_the_result_and_the_error_come_through() -> None:
    async def result(number: int) -> int:
        if number < 0:
            raise ValueError("negative")
        return number

    assert run(result, 7) == 7
    with pytest.raises(ValueError, match="negative"):
        run(result, -1)


@virtual_time
async def test_a_decorated_test_runs_in_virtual_time() -> None:
    assert isinstance(asyncio.get_running_loop(), VirtualTimeLoop)


@pytest.mark.parametrize("number", [1, 2])
@virtual_time
async def test_a_decorated_test_takes_fixtures_and_parameters(tmp_path: Path, number: int) -> None:
    assert tmp_path.name.startswith("test_a_decorated_test_takes")
    assert number in (1, 2)


@given(st.integers())
@virtual_time
async def test_a_decorated_test_takes_examples(number: int) -> None:
    await anyio.sleep(1)
    assert anyio.current_time() == 1
    assert isinstance(number, int)
