"""What ends the block of a fleet leaves it as itself, and the process by its usual exit."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import anyio
import pytest
from anyio.abc import TaskGroup

from hotswap import Fleet, InstanceState, Sampling
from hotswap.errors import FleetClosed
from hotswap.offline.virtual_time import run
from tests.runtime.support import Idle, engine_of, sim_fleet, until

ROOT = Path(__file__).resolve().parents[2]
LONG = Sampling(max_tokens=3000, ignore_eos=True)


class Stop(BaseException):
    """Of an application, and no `Exception`."""


ENDS: list[BaseException] = [
    SystemExit(3),
    KeyboardInterrupt(),
    Stop("stop"),
    ZeroDivisionError("of the block"),
    FleetClosed("another fleet closed"),
    ExceptionGroup("of the block", [ValueError("one"), OSError("two")]),
    BaseExceptionGroup("of the block", [Stop("one"), ValueError("two")]),
]

# ---------------------------------------------------------------- inside of one process


async def plainly(fleet: Fleet, end: BaseException, clients: TaskGroup) -> None:
    raise end


async def while_streaming(fleet: Fleet, end: BaseException, clients: TaskGroup) -> None:
    await fleet.swap("e0", to="a")
    async with fleet.stream("a", (1,), LONG) as stream:
        await anext(stream)
        raise end


async def while_others_stream(fleet: Fleet, end: BaseException, clients: TaskGroup) -> None:
    async def client() -> None:
        with pytest.raises(FleetClosed):
            await fleet.generate("a", (1,), LONG)

    await fleet.swap("e0", to="a")
    for _ in range(3):
        clients.start_soon(client)
    await until(lambda: len(fleet.view().running) == 3)
    raise end


async def after_an_engine_came(fleet: Fleet, end: BaseException, clients: TaskGroup) -> None:
    await fleet.add(engine_of("new"))
    await fleet.swap("new", to="a")
    raise end


async def within_another_fleet(fleet: Fleet, end: BaseException, clients: TaskGroup) -> None:
    async with sim_fleet("a", engines=[engine_of("e1")]):
        raise end


PLACES = [plainly, while_streaming, while_others_stream, after_an_engine_came, within_another_fleet]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("end", ENDS, ids=repr)
def test_what_ends_the_block_of_a_fleet_leaves_it_as_itself(
    end: BaseException, place: Callable[[Fleet, BaseException, TaskGroup], Awaitable[None]]
) -> None:
    async def scenario() -> tuple[BaseException | None, InstanceState]:
        engine, left = engine_of("e0"), None
        async with anyio.create_task_group() as clients:
            try:
                async with sim_fleet("a", engines=[engine], scheduler=Idle()) as fleet:
                    await place(fleet, end, clients)
            except BaseException as exc:
                left = exc
        return left, engine.status().state

    left, state = run(scenario)
    assert left is end
    assert state is InstanceState.EMPTY


# ---------------------------------------------------------------- a process of its own

PROGRAM = """
import os, signal, sys
import anyio
from hotswap import Fleet, Model, Sampling
from hotswap.backends.sim import SimEngine, SimStore
from hotswap.policies import LeastLoadedRouter, WeightedLoadSwap

async def end():
    {end}

async def alone():
    await end()

async def in_a_fleet():
    async with Fleet(
        engines=[SimEngine("e0")], store=SimStore({{"a": "1 MB"}}), models=[Model("a")],
        router=LeastLoadedRouter(), scheduler=WeightedLoadSwap(t1=0, t2=4, b=1, sigmas=0),
    ) as fleet:
        async with fleet.stream("a", (1,), Sampling(max_tokens=10_000, ignore_eos=True)) as stream:
            await anext(stream)
            await end()

anyio.run({place})
"""

ENDINGS = {
    "exit by a code": "sys.exit(3)",
    "exit by a message": "sys.exit('that was all')",
    "exit by zero": "sys.exit()",
    "interrupted": "raise KeyboardInterrupt",
    "signalled": "os.kill(os.getpid(), signal.SIGINT); await anyio.sleep(30)",
    "failed": "raise ZeroDivisionError('of the block')",
}


def ended(end: str, place: str) -> tuple[int, str]:
    """The exit code of a program, and the last line that it wrote to its standard error."""
    command = [sys.executable, "-c", PROGRAM.format(end=end, place=place)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    return done.returncode, (done.stderr.strip().splitlines() or [""])[-1]


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_process_with_a_fleet_ends_as_one_without(ending: str) -> None:
    assert ended(ENDINGS[ending], "in_a_fleet") == ended(ENDINGS[ending], "alone")


def test_sys_exit_in_a_fleet_ends_the_process_by_its_code() -> None:
    assert ended("sys.exit(3)", "in_a_fleet") == (3, "")
