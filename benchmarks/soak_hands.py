"""What is done to a fleet by hand while it soaks: moves, drains, swaps and new engines, at random."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from random import Random
from typing import TypeAlias

import anyio

from hotswap import (
    ConfigError,
    DrainRecord,
    Fleet,
    InstanceId,
    InvalidRequest,
    MigrationAborted,
    SwapFailed,
    SwapRefused,
)
from hotswap.action import MigrationWay
from hotswap.testing.chaos import ChaosEngine

__all__ = ["Engines", "Hands", "Pace"]

_WAYS: tuple[MigrationWay | None, ...] = (None, "kv", "tokens")
_Verb: TypeAlias = Callable[[Random], Awaitable[None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How often hands do something; times are means of exponential ones.

    Attributes:
        move_every_s: Between two requests that are told to move.
        drain_every_s: Between two drains.
        swap_every_s: Between two swaps.
        replace_every_s: Between two instances that are replaced by new ones.
        cancelled: Share of all these that are cancelled half way.
        verb_s: How long one that is cancelled goes on, and how long a drained instance stays closed.
    """

    move_every_s: float = 0.2
    drain_every_s: float = 5.0
    swap_every_s: float = 5.0
    replace_every_s: float = 10.0
    cancelled: float = 0.2
    verb_s: float = 0.3


class Engines:
    """The engines of a fleet, which come and go, and the faults that were injected into any of them.

    Args:
        make: Makes another, under a name that none had before.
        count: How many there are at first.
    """

    def __init__(self, make: Callable[[], ChaosEngine], count: int) -> None:
        self._make = make
        self._gone: Counter[str] = Counter()
        self.present = [make() for _ in range(count)]

    @property
    def injected(self) -> Counter[str]:
        """How many faults came, by kind."""
        return sum((engine.injected for engine in self.present), self._gone)

    def add(self) -> ChaosEngine:
        """Make another."""
        self.present.append(self._make())
        return self.present[-1]

    def forget(self, instance: InstanceId) -> None:
        """Keep no more of an engine than what was injected into it."""
        for engine in [engine for engine in self.present if engine.id == instance]:
            self.present.remove(engine)
            self._gone += engine.injected

    def arm(self, armed: bool) -> None:
        """Let faults come, or not."""
        for engine in self.present:
            engine.injector.armed = armed


class Hands:
    """Disturbs one fleet.

    Attributes:
        drains: Drains, replacements and removals, and requests that left an instance by them, by how.
    """

    def __init__(self, fleet: Fleet, engines: Engines, pace: Pace, random: Random) -> None:
        self.drains: Counter[str] = Counter()
        self._fleet, self._engines, self._pace, self._random = fleet, engines, pace, random
        self._models = [model.id for model in fleet.view().models]
        self._num_engines = len(engines.present)

    @asynccontextmanager
    async def busy(self) -> AsyncGenerator[None]:
        """Disturb while the block runs; afterwards every instance is open."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._now_and_then, self._pace.move_every_s, self._move)
            tasks.start_soon(self._now_and_then, self._pace.drain_every_s, self._drain)
            tasks.start_soon(self._now_and_then, self._pace.swap_every_s, self._swap)
            tasks.start_soon(self._now_and_then, self._pace.replace_every_s, self._replace)
            yield
            tasks.cancel_scope.cancel()
        for instance in self._fleet.view().instances:
            self._fleet.reopen(instance.id)

    async def _now_and_then(self, every_s: float, verb: _Verb) -> None:
        random = Random(self._random.getrandbits(64))
        async with anyio.create_task_group() as tasks:
            while True:
                await anyio.sleep(random.expovariate(1 / every_s))
                tasks.start_soon(self._perhaps_cancelled, verb, Random(random.getrandbits(64)))

    async def _perhaps_cancelled(self, verb: _Verb, random: Random) -> None:
        cancelled = random.random() < self._pace.cancelled
        with anyio.move_on_after(self._some_time_s(random) if cancelled else None):
            await verb(random)

    # ------------------------------------------------------------------ verbs

    async def _move(self, random: Random) -> None:
        view = self._fleet.view()
        if not view.running:
            return
        request = random.choice(view.running)
        others = [i.id for i in view.serving(request.model) if i.id != request.instance]
        if others:
            with suppress(ConfigError, InvalidRequest, MigrationAborted):
                await self._fleet.migrate(request.id, to=random.choice(others), way=random.choice(_WAYS))

    async def _drain(self, random: Random) -> None:
        instance = self._some_instance(random)
        with suppress(SwapRefused):
            self._count("drains", await self._fleet.drain(instance, deadline_s=self._some_deadline_s(random)))
            try:
                await anyio.sleep(self._some_time_s(random))
            finally:
                with suppress(ConfigError):  # it may have been replaced
                    self._fleet.reopen(instance)

    async def _swap(self, random: Random) -> None:
        instance, model = self._some_instance(random), random.choice(self._models)
        with suppress(ConfigError, SwapRefused, SwapFailed):
            await self._fleet.swap(instance, to=model, deadline_s=random.choice((0, 0, self._pace.verb_s)))

    async def _replace(self, random: Random) -> None:
        """Put a new engine in an instance's place, or let one go that a failure has left over."""
        instance, deadline_s = self._some_instance(random), self._some_deadline_s(random)
        concerned = [instance]
        try:
            if len(self._fleet.view().instances) > self._num_engines:
                self._count("removals", await self._fleet.remove(instance, deadline_s=deadline_s))
                return
            spare = self._engines.add()
            concerned.append(spare.id)
            self._count("replacements", await self._fleet.replace(instance, spare, deadline_s=deadline_s))
        except (ConfigError, SwapRefused, SwapFailed):
            self.drains["refused or failed"] += 1
        finally:
            present = {instance.id for instance in self._fleet.view().instances}
            for gone in set(concerned) - present:
                self._engines.forget(gone)

    def _some_instance(self, random: Random) -> InstanceId:
        return random.choice(self._fleet.view().instances).id

    def _some_time_s(self, random: Random) -> float:
        return random.expovariate(1 / self._pace.verb_s)

    def _some_deadline_s(self, random: Random) -> float:
        return self._pace.verb_s * random.choice((0.5, 3, 30))

    def _count(self, what: str, record: DrainRecord) -> None:
        left = {"moved": record.num_moved, "evicted": record.num_evicted, "finished": record.num_finished}
        self.drains.update({what: 1, **left})
