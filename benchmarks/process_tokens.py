"""What a token costs more when its engine is in a process of its own: processor time of both processes.

The same simulated engine serves the same streams here and in a child, in turns. Its steps take 20 ms, in
which it computes nothing, so what is left is the price of tokens: of the engine and the reader alone here,
and of two processes and the link between them there.
"""

from __future__ import annotations

import os
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import anyio

from benchmarks.measure import Summary, rounds
from hotswap import Model, ModelId, Request, RequestId, Sampling
from hotswap.abc import Engine, ModelCard
from hotswap.backends.process import ProcessEngine
from hotswap.backends.sim import SimEngine, SimStore
from hotswap.hardware import DeviceProfile

__all__ = ["MOST_US", "Settings", "measure", "rows"]

MOST_US = 15.0

_PROFILE = DeviceProfile(floor_s=0.02, base_s=0.0, unload_s=0.0, load_bytes_per_s=1e15)
_SIZES = {"m": 4096}


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How much is measured: `repeats` times each, `streams` of `tokens` tokens."""

    streams: int = 32
    tokens: int = 200
    repeats: int = 5


def engine() -> SimEngine:
    """The engine that is measured."""
    return SimEngine("e0", _PROFILE, kv_blocks=8192)


def store() -> SimStore:
    """Its store."""
    return SimStore(_SIZES)


def measure(settings: Settings) -> dict[str, Any]:
    """Return microseconds of processor time a token: here, in a child, and by how much that is more."""
    return {"process_us_per_token": anyio.run(_measure, settings)}


def rows(report: dict[str, Any]) -> list[list[str]]:
    """Return the lines of a table."""
    found = report["process_us_per_token"]
    names = {"here": "us a token, engine here", "child": "us a token, in a child", "added": "us more"}
    return [
        [names[name], Summary.of(found[name]).format(1), f"{MOST_US:g}" if name == "added" else ""]
        for name in names
    ]


async def _measure(settings: Settings) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {"here": [], "child": []}
    async with _loaded(engine()) as here, _loaded(ProcessEngine("e0", engine, store)) as child:
        cases: dict[str, Engine] = {"here": here, "child": child}
        for name in rounds(tuple(cases), settings.repeats):
            found[name].append(await _us_per_token(cases[name], settings))
    found["added"] = [there - near for near, there in zip(found["here"], found["child"], strict=True)]
    return found


@asynccontextmanager
async def _loaded(engine: Engine) -> AsyncGenerator[Engine]:
    async with store() as weights, engine:
        await engine.load(ModelCard.of(Model("m"), await weights.manifest(ModelId("m"))), weights)
        yield engine


async def _us_per_token(engine: Engine, settings: Settings) -> float:
    pid = engine.pid if isinstance(engine, ProcessEngine) else None
    began = _cpu_s(pid)
    async with anyio.create_task_group() as readers:
        for number in range(settings.streams):
            readers.start_soon(partial(_read, engine, number, settings.tokens))
    return 1e6 * (_cpu_s(pid) - began) / (settings.streams * settings.tokens)


async def _read(engine: Engine, number: int, tokens: int) -> None:
    request = Request(
        id=RequestId(f"r{number}"),
        model=ModelId("m"),
        prompt=(1, 2, number),
        sampling=Sampling(max_tokens=tokens, ignore_eos=True),
    )
    async with engine.stream(request) as stream:
        async for _ in stream:
            pass


def _cpu_s(pid: int | None) -> float:
    """Processor time of this process, and of another one."""
    own = time.process_time()
    if pid is None:
        return own
    with open(f"/proc/{pid}/stat") as file:
        user, system = file.read().rpartition(")")[2].split()[11:13]
    return own + (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")
