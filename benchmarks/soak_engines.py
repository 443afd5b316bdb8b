"""The engines of a soak: chaotic ones in its process, or ones in processes that are killed at random."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from math import inf
from random import Random
from typing import Any, Self, TypeAlias

import anyio

from hotswap import DeviceBudget
from hotswap.abc import Engine
from hotswap.backends.process import ProcessEngine
from hotswap.backends.torch import SkeletonCache, TorchEngine
from hotswap.testing.chaos import ChaosEngine, EngineFaults, Injector, chaotic_engine

__all__ = ["Chaotic", "KilledEngine", "make_chaotic_engine", "make_engine"]

# Of an engine under a budget: one of the models, and KV blocks for the longest request.
_FLOOR = "2 MiB"
_FAULTS = EngineFaults(
    loss_every_s=15.0,
    stuck=0.2,
    delay=0.02,
    delay_s=0.05,
    stall=0.001,
    stall_s=0.2,
    no_memory=0.1,
    abort=0.02,
)
# Processes start and end slowly while many of them share a machine.
_SILENCE_S, _START_S = 30.0, 300.0


def make_engine(name: str, skeletons: SkeletonCache, budget: DeviceBudget | None = None) -> TorchEngine:
    """Make an engine of one thread."""
    options: dict[str, Any] = {"memory_bytes": "64 MiB"}
    if budget is not None:
        options = {"device_budget": budget, "floor_bytes": _FLOOR}
    return TorchEngine(name, kv_tokens=1024, threads=1, max_requests=8, skeletons=skeletons, **options)


def make_chaotic_engine(
    name: str, random: Random, skeletons: SkeletonCache, budget: DeviceBudget | None
) -> ChaosEngine:
    """Make one that has all kinds of faults."""
    return chaotic_engine(make_engine(name, skeletons, budget), Random(random.getrandbits(64)), _FAULTS)


def _make_in_child(name: str, seed: int) -> Engine:
    """Make one that has all but losses, which a killed process is; in the child it is always armed."""
    faults = replace(_FAULTS, loss_every_s=inf, stuck=0.0)
    return chaotic_engine(make_engine(name, SkeletonCache()), Random(seed), faults)


class KilledEngine(ProcessEngine):
    """An engine in a process that is killed with -9 at random moments while it is armed.

    Args:
        name: Its name.
        random: The source of all chance.
    """

    def __init__(self, name: str, random: Random) -> None:
        maker = partial(_make_in_child, name, random.getrandbits(64))
        super().__init__(name, maker, silence_s=_SILENCE_S, start_s=_START_S)
        self._kills = Random(random.getrandbits(64))
        self.injector = Injector(self._kills)

    @property
    def injected(self) -> Counter[str]:
        """How often it was killed; faults that the child injects are not counted."""
        return self.injector.injected

    @asynccontextmanager
    async def __asynccontextmanager__(self) -> AsyncGenerator[Self]:
        async with super().__asynccontextmanager__(), anyio.create_task_group() as tasks:
            tasks.start_soon(self._kill_at_random, name=f"kills of {self.id}")
            yield self
            tasks.cancel_scope.cancel()

    async def _kill_at_random(self) -> None:
        while True:
            await anyio.sleep(self._kills.expovariate(1 / (4 * _FAULTS.loss_every_s)))
            if self.pid is not None and self.injector.hits("kill -9", 1.0):
                with suppress(ProcessLookupError):
                    os.kill(self.pid, signal.SIGKILL)


Chaotic: TypeAlias = ChaosEngine | KilledEngine
