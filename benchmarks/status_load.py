"""A part of `benchmarks remote`: what the status of many engines costs their controller.

A process has the engines, whose load changes more often than it is told, every 0.1 s. This one has a
`RemoteEngine` for each, over TCP, and spends its time on what they tell.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import anyio

from benchmarks.measure import Summary
from benchmarks.process import Process
from hotswap import InstanceState
from hotswap.abc import EngineStatus, StatusListener
from hotswap.backends.remote import EngineHost, RemoteEngine
from hotswap.backends.sim import SimEngine, SimStore
from hotswap.backends.transports import LinkSecret, connect_tcp, serve_tcp

__all__ = ["MOST_OF_A_CORE", "Settings", "main", "measure", "rows"]

MOST_OF_A_CORE = 0.3

_SECRET = LinkSecret(b"of a benchmark on one machine")
_CHANGE_S = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How much is measured: so many `engines`, `repeats` times for `seconds`."""

    engines: int = 100
    repeats: int = 5
    seconds: float = 4.0


class RestlessEngine(SimEngine):
    """Its load is another one every 0.02 s."""

    def __init__(self, id: str) -> None:
        super().__init__(id)
        self._listener: StatusListener | None = None
        self._num_changes = 0

    @asynccontextmanager
    async def __asynccontextmanager__(self) -> AsyncGenerator[Self]:
        async with super().__asynccontextmanager__(), anyio.create_task_group() as tasks:
            tasks.start_soon(self._change)
            yield self
            tasks.cancel_scope.cancel()

    def status(self) -> EngineStatus:
        return super().status().updated(num_waiting=self._num_changes)

    def watch(self, listener: StatusListener) -> bool:
        self._listener = listener
        return super().watch(listener)

    async def _change(self) -> None:
        while True:
            await anyio.sleep(_CHANGE_S)
            self._num_changes += 1
            if self._listener is not None:
                self._listener.load_changed()


def measure(settings: Settings) -> dict[str, Any]:
    """Return the share of a core that the controller spends, and the statuses that came, a second."""
    command = [sys.executable, "-m", "benchmarks.status_load", str(settings.engines)]
    with Process(command, environment={}, timeout_s=120.0) as host:
        return anyio.run(_measure, settings, host.first()["ports"])


def rows(report: Mapping[str, Any]) -> list[list[str]]:
    """The lines of the table."""
    found = report["status"]
    return [
        [
            f"of a core, status of {found['engines']} engines",
            Summary.of(found["of_a_core"]).format(2),
            f"{MOST_OF_A_CORE:g}",
        ],
        ["statuses a second and engine", Summary.of(found["per_s"]).format(1), ""],
    ]


async def _measure(settings: Settings, ports: list[int]) -> dict[str, Any]:
    found: dict[str, Any] = {"engines": settings.engines, "of_a_core": [], "per_s": []}
    counter = _Counter()
    async with AsyncExitStack() as entered:
        for number, port in enumerate(ports):
            connect = partial(connect_tcp, "127.0.0.1", port, secret=_SECRET)
            engine = await entered.enter_async_context(RemoteEngine(f"e{number}", connect))
            assert engine.status().state is InstanceState.EMPTY
            engine.watch(counter)
        for _ in range(settings.repeats):
            began_s, spent_s, began = time.perf_counter(), time.process_time(), counter.count
            await anyio.sleep(settings.seconds)
            seconds = time.perf_counter() - began_s
            found["of_a_core"].append((time.process_time() - spent_s) / seconds)
            found["per_s"].append((counter.count - began) / seconds / settings.engines)
    return {"status": found}


class _Counter(StatusListener):
    """Counts what engines tell."""

    def __init__(self) -> None:
        self.count = 0

    def load_changed(self) -> None:
        self.count += 1

    def state_changed(self) -> None:
        self.count += 1


def main(engines: int) -> None:
    """Serve engines until the process is ended."""
    anyio.run(_serve, engines)


async def _serve(engines: int) -> None:
    async with SimStore({"m": 4096}) as store, AsyncExitStack() as entered:
        tasks = await entered.enter_async_context(anyio.create_task_group())
        ports: list[int] = []
        for number in range(engines):
            engine = await entered.enter_async_context(RestlessEngine(f"e{number}"))
            host = EngineHost(engine, store)
            ports.append(await tasks.start(partial(serve_tcp, secret=_SECRET), host.serve, "127.0.0.1"))
        sys.stdout.write(json.dumps({"ports": ports}) + "\n")
        sys.stdout.flush()
        await anyio.sleep_forever()


if __name__ == "__main__":
    main(int(sys.argv[1]))
