"""Whatever is lost at whatever point of a move, its client reads on, and everything is given back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import anyio
import pytest
from anyio.abc import TaskGroup

from hotswap import Fleet, InstanceId, MigrationOutcome, MigrationRecord, Request, RequestId, Sampling, Token
from hotswap.abc import KVSink, KVSource
from hotswap.backends.sim import SimEngine
from hotswap.offline.virtual_time import run
from hotswap.testing.chaos.moves import ChaosSink, ChaosSource
from tests.runtime.support import PROFILE, expected, idle, sim_fleet, until

_T = TypeVar("_T")

LONG = Sampling(max_tokens=200, ignore_eos=True)
PROMPT = tuple(range(1, 400))
HAND_OVER = ("before release", "after release")
# What befalls a move, and what may be recorded of it: up to the hand-over, and in it or later.
OUTCOMES: dict[str, tuple[set[MigrationOutcome], set[MigrationOutcome]]] = {
    "lose_source": ({"aborted"}, {"aborted", "done"}),
    "lose_destination": ({"aborted"}, {"aborted"}),
    "swap_source": ({"aborted"}, {"aborted", "done"}),
    "swap_destination": ({"aborted"}, {"aborted", "done"}),
    "drain_source": ({"aborted"}, {"aborted", "done"}),
    "drain_destination": ({"aborted"}, {"done"}),
    "hang": ({"aborted", "finished"}, {"aborted", "finished"}),
    "leave": ({"finished"}, {"finished"}),
    "cancel": ({"cancelled"}, {"cancelled"}),
    "cancel_by_asyncio": ({"cancelled"}, {"cancelled"}),
}


@dataclass(eq=False)
class Blow:
    """Strikes once, at the `at`-th point of a move; counts all points.

    Attributes:
        points: The verbs that a move has asked for, each twice: before it and after.
        struck: The one at which it struck.
    """

    at: int
    strike: Callable[[], Awaitable[None]] | None = None
    points: list[str] = field(default_factory=list)
    struck: str = ""

    async def disturb(self, stage: str, work: Callable[[], Awaitable[_T]]) -> _T:
        await self._pass(f"before {stage}")
        result = await work()
        await self._pass(f"after {stage}")
        return result

    async def _pass(self, point: str) -> None:
        self.points.append(point)
        if len(self.points) == self.at + 1 and self.strike is not None:
            self.struck = point
            await self.strike()


class Watched(SimEngine):
    """An engine whose moves are struck."""

    blow: Blow

    @asynccontextmanager
    async def export_kv(self, request: RequestId) -> AsyncGenerator[KVSource]:
        async with super().export_kv(request) as source:
            yield ChaosSource(source, self.blow.disturb)

    @asynccontextmanager
    async def import_kv(self, request: Request) -> AsyncGenerator[KVSink]:
        async with super().import_kv(request) as sink:
            yield ChaosSink(sink, self.blow.disturb)


@dataclass(eq=False)
class Scene:
    """A request that moves from one instance to another."""

    fleet: Fleet
    tasks: TaskGroup
    source: Watched
    destination: Watched
    client: anyio.CancelScope = field(default_factory=anyio.CancelScope)
    mover: asyncio.Task[None] | None = None
    moving: anyio.CancelScope = field(default_factory=anyio.CancelScope)

    async def lose_source(self) -> None:
        self.source.lose()

    async def lose_destination(self) -> None:
        self.destination.lose()

    async def swap_source(self) -> None:
        await self._swap(self.source.id)

    async def swap_destination(self) -> None:
        await self._swap(self.destination.id)

    async def _swap(self, instance: InstanceId) -> None:
        self.tasks.start_soon(lambda: self.fleet.swap(instance, to="b"))
        await anyio.sleep(1)  # of simulated time: until long after it

    async def drain_source(self) -> None:
        self.tasks.start_soon(lambda: self.fleet.drain(self.source.id, deadline_s=0.0))
        await anyio.sleep(1)

    async def drain_destination(self) -> None:
        self.tasks.start_soon(lambda: self.fleet.drain(self.destination.id, deadline_s=0.0))
        await anyio.sleep(1)

    async def hang(self) -> None:
        await anyio.sleep(100)

    async def leave(self) -> None:
        self.client.cancel()
        await anyio.sleep(1)

    async def cancel(self) -> None:
        self.moving.cancel()
        await anyio.lowlevel.checkpoint()

    async def cancel_by_asyncio(self) -> None:
        assert self.mover is not None
        self.mover.cancel()
        await anyio.lowlevel.checkpoint()

    async def read(self) -> None:
        read: list[Token] = []
        with self.client:
            async with self.fleet.stream("a", PROMPT, LONG) as stream:
                async for token in stream:
                    read.append(token)
                    if len(read) == 8:
                        self.tasks.start_soon(self.move, stream.request.id)
        whole = expected(stream.request)
        assert [token.id for token in read] == whole[: len(read) if self.client.cancelled_caught else None]

    async def move(self, request: RequestId) -> None:
        async def migrate() -> None:
            with self.moving:
                await self.fleet.migrate(request, to=self.destination.id, method="kv")

        self.mover = asyncio.get_running_loop().create_task(migrate())
        with suppress(asyncio.CancelledError):
            await self.mover


async def play(at: int, what: str = "") -> tuple[Blow, MigrationRecord]:
    """Let something happen at one point of a move; return where that was, and how the move is recorded."""
    blow = Blow(at)
    engines = [Watched(name, PROFILE, kv_blocks=512, max_requests=8) for name in ("e0", "e1")]
    async with sim_fleet("a", "b", engines=engines) as fleet:
        for engine in engines:
            engine.blow = blow
            await fleet.swap(engine.id, to="a")
        with anyio.fail_after(600):
            async with anyio.create_task_group() as tasks:
                scene = Scene(fleet, tasks, engines[0], engines[1])
                if what:
                    blow.strike = getattr(scene, what)
                tasks.start_soon(scene.read)
            await until(lambda: not any(instance.num_requests for instance in fleet.view().instances))
        idle(fleet)
        (record,) = fleet.migrations
    return blow, record


def test_a_move_that_nothing_befalls_comes_by_every_verb() -> None:
    blow, record = run(lambda: play(-1))
    assert record.outcome == "done"
    assert {point.split()[1] for point in blow.points} == {"reserve", "copy", "stop", "commit", "release"}


@pytest.mark.parametrize("what", OUTCOMES)
def test_at_every_point_of_a_move(what: str) -> None:
    quiet, _ = run(lambda: play(-1))
    before, later = OUTCOMES[what]
    outcomes: dict[bool, set[MigrationOutcome]] = {False: set(), True: set()}
    for at, point in enumerate(quiet.points):
        blow, record = run(partial(play, at, what))
        assert blow.struck == point
        outcomes[point in HAND_OVER].add(record.outcome)
    assert outcomes == {False: before, True: later}
