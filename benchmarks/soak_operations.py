"""Random operations on a fleet during a soak: moves, drains, swaps, replaced engines."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from math import inf
from random import Random
from typing import TypeAlias

import anyio

from benchmarks.soak_engines import Chaotic
from hotswap import DrainRecord, Fleet, InstanceId, MigrationMethod
from hotswap.abc import SupportsResize
from hotswap.errors import (
    ConfigError,
    InstanceError,
    InvalidRequest,
    MigrationAborted,
    SwapFailed,
    SwapRefused,
)

__all__ = ["Engines", "OperationRates", "RandomOperations"]

_METHODS: tuple[MigrationMethod | None, ...] = (None, "kv", "tokens")
_Verb: TypeAlias = Callable[[Random], Awaitable[None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationRates:
    """How often each operation is started; times are means of exponential distributions.

    Attributes:
        move_every_s: Between two moves of requests.
        drain_every_s: Between two drains.
        swap_every_s: Between two swaps.
        replace_every_s: Between two replacements of an instance.
        resize_every_s: Between two resizes of a KV pool; infinite for engines without a device budget.
        cancelled: Share of the operations that are cancelled before they end.
        verb_s: How long a cancelled operation runs, and how long a drained instance stays closed.
    """

    move_every_s: float = 0.2
    drain_every_s: float = 5.0
    swap_every_s: float = 5.0
    replace_every_s: float = 10.0
    resize_every_s: float = inf
    cancelled: float = 0.2
    verb_s: float = 0.3


class Engines:
    """The engines that a fleet has now, and the number of faults injected into all that it had.

    Args:
        make: Makes an engine with a new id.
        count: Number of engines at first.
    """

    def __init__(self, make: Callable[[], Chaotic], count: int) -> None:
        self._make = make
        self._gone: Counter[str] = Counter()
        self.present = [make() for _ in range(count)]

    @property
    def injected(self) -> Counter[str]:
        """Number of injected faults, by kind."""
        return sum((engine.injected for engine in self.present), self._gone)

    def add(self) -> Chaotic:
        """Make an engine."""
        self.present.append(self._make())
        return self.present[-1]

    def forget(self, instance: InstanceId) -> None:
        """Remove an engine, and keep its count of injected faults."""
        for engine in [engine for engine in self.present if engine.id == instance]:
            self.present.remove(engine)
            self._gone += engine.injected

    def arm(self, armed: bool) -> None:
        """Switch the injection of faults on or off."""
        for engine in self.present:
            engine.injector.armed = armed


class RandomOperations:
    """Starts random operations on one fleet.

    Attributes:
        drains: Number of drains, replacements and removals, and of requests that left an instance by them.
        num_resizes: Number of resizes of KV pools.
    """

    def __init__(self, fleet: Fleet, engines: Engines, rates: OperationRates, random: Random) -> None:
        self.drains: Counter[str] = Counter()
        self.num_resizes = 0
        self._fleet, self._engines, self._rates, self._random = fleet, engines, rates, random
        self._models = [model.id for model in fleet.view().models]
        self._num_engines = len(engines.present)

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[None]:
        """Start operations while the block runs; afterwards every instance is open."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._repeat, self._rates.move_every_s, self._move)
            tasks.start_soon(self._repeat, self._rates.drain_every_s, self._drain)
            tasks.start_soon(self._repeat, self._rates.swap_every_s, self._swap)
            tasks.start_soon(self._repeat, self._rates.replace_every_s, self._replace)
            if self._rates.resize_every_s < inf:
                tasks.start_soon(self._repeat, self._rates.resize_every_s, self._resize)
            yield
            tasks.cancel_scope.cancel()
        for instance in self._fleet.view().instances:
            self._fleet.reopen(instance.id)

    async def _repeat(self, every_s: float, verb: _Verb) -> None:
        random = Random(self._random.getrandbits(64))
        async with anyio.create_task_group() as tasks:
            while True:
                await anyio.sleep(random.expovariate(1 / every_s))
                tasks.start_soon(self._run_one, verb, Random(random.getrandbits(64)))

    async def _run_one(self, verb: _Verb, random: Random) -> None:
        cancelled = random.random() < self._rates.cancelled
        with anyio.move_on_after(self._random_time_s(random) if cancelled else None):
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
                await self._fleet.migrate(
                    request.id, to=random.choice(others), method=random.choice(_METHODS)
                )

    async def _drain(self, random: Random) -> None:
        instance = self._random_instance(random)
        with suppress(SwapRefused):
            self._count(
                "drains", await self._fleet.drain(instance, deadline_s=self._random_deadline_s(random))
            )
            try:
                await anyio.sleep(self._random_time_s(random))
            finally:
                with suppress(ConfigError):  # it may have been replaced
                    self._fleet.reopen(instance)

    async def _swap(self, random: Random) -> None:
        instance, model = self._random_instance(random), random.choice(self._models)
        with suppress(ConfigError, SwapRefused, SwapFailed):
            await self._fleet.swap(instance, to=model, deadline_s=random.choice((0, 0, self._rates.verb_s)))

    async def _replace(self, random: Random) -> None:
        """Replace an instance by a new engine, or remove it if a failed replacement left one too many."""
        instance, deadline_s = self._random_instance(random), self._random_deadline_s(random)
        involved = [instance]
        try:
            if len(self._fleet.view().instances) > self._num_engines:
                self._count("removals", await self._fleet.remove(instance, deadline_s=deadline_s))
                return
            spare = self._engines.add()
            involved.append(spare.id)
            self._count("replacements", await self._fleet.replace(instance, spare, deadline_s=deadline_s))
        except (ConfigError, SwapRefused, SwapFailed):
            self.drains["refused or failed"] += 1
        finally:
            present = {instance.id for instance in self._fleet.view().instances}
            for gone in set(involved) - present:
                self._engines.forget(gone)

    async def _resize(self, random: Random) -> None:
        """Resize the KV pool of an engine to a size between its least and its most."""
        engine = random.choice(self._engines.present)
        status = engine.status()
        if isinstance(engine, SupportsResize) and status.most_kv_blocks:
            with suppress(InstanceError):
                await engine.resize_kv(random.randint(status.least_kv_blocks, status.most_kv_blocks))
                self.num_resizes += 1

    def _random_instance(self, random: Random) -> InstanceId:
        return random.choice(self._fleet.view().instances).id

    def _random_time_s(self, random: Random) -> float:
        return random.expovariate(1 / self._rates.verb_s)

    def _random_deadline_s(self, random: Random) -> float:
        return self._rates.verb_s * random.choice((0.5, 3, 30))

    def _count(self, what: str, record: DrainRecord) -> None:
        left = {"moved": record.num_moved, "evicted": record.num_evicted, "finished": record.num_finished}
        self.drains.update({what: 1, **left})
