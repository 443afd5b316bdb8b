"""What a token costs from an actor of Ray: over hotswap's link, and by a Ray generator for the whole engine.

It runs where Ray is installed, in a process of its own, and prints its figures. One engine of 20 ms steps
serves the same streams both ways, in turns: over the link of a `RayEngine`, and by an actor whose one
generator yields the tokens of a step as one list of rows, the least that Ray's calls can do. (A
generator for each request carries about a thousand tokens a second.) A token's id is the time of its birth.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import AsyncGenerator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from statistics import quantiles
from typing import Any

import anyio

from benchmarks.measure import Summary, ratios, rounds
from hotswap import InstanceState, Model, ModelId, Request, RequestId, Sampling, Token
from hotswap.abc import Engine, EngineStatus, ModelCard, TokenQueue, TokenStream, WeightStore
from hotswap.backends.sim import SimStore
from hotswap.request import new_token
from hotswap.view import InstanceId

__all__ = ["Settings", "is_kept", "measure", "measure_connected", "rows"]

MOST_OF_RAY, MOST_P99_S = 0.5, 0.01

_PYTHON = Path(".cache/ray-env/bin/python")
_RAY = {"RAY_worker_niceness": "0", "RAY_USAGE_STATS_ENABLED": "0"}
_STEP_S = 0.02
_BITS = (1 << 31) - 1  # of an id of a token


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How much is measured: `repeats` times each, `tokens` tokens of each of so many `streams`."""

    streams: tuple[int, ...] = (32, 256)
    tokens: int = 200
    repeats: int = 5


class ClockEngine(Engine):
    """Gives every request a token each 20 ms, whose id is the time."""

    def __init__(self, id: str) -> None:
        self.id = InstanceId(id)
        self._model: ModelId | None = None
        self._queues: dict[RequestId, tuple[Request, TokenQueue]] = {}

    @asynccontextmanager
    async def __asynccontextmanager__(self) -> AsyncGenerator[ClockEngine]:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._run)
            yield self
            tasks.cancel_scope.cancel()

    async def load(self, model: ModelCard, store: WeightStore) -> None:
        self._model = model.id

    async def unload(self) -> None:
        self._model = None

    async def evict(self, *, deadline_s: float) -> int:
        return 0

    def status(self) -> EngineStatus:
        state = InstanceState.EMPTY if self._model is None else InstanceState.SERVING
        return EngineStatus(id=self.id, state=state, model=self._model, num_running=len(self._queues))

    @asynccontextmanager
    async def stream(self, request: Request) -> AsyncGenerator[TokenStream]:
        queue = TokenQueue()
        self._queues[request.id] = request, queue
        try:
            yield queue
        finally:
            self._queues.pop(request.id, None)

    async def _run(self) -> None:
        next_s, index = anyio.current_time(), dict[RequestId, int]()
        while True:
            next_s += _STEP_S
            await anyio.sleep_until(next_s)
            born = _now_us()
            for id, (request, queue) in list(self._queues.items()):
                place = index[id] = index.get(id, -1) + 1
                ended = place + 1 == request.sampling.max_tokens
                queue.put(new_token(born, place, "length" if ended else None))
                if ended:
                    queue.close()
                    del self._queues[id], index[id]


class RowsActor:
    """Has the engine, and yields all tokens of a step as one list, by one generator for all streams."""

    async def rows(self, streams: int, tokens: int) -> AsyncGenerator[list[tuple[int, int, int]]]:
        """Yield rows: the number of a stream, the index of its token, and its id."""
        async with ClockEngine("e0") as engine, AsyncExitStack() as open_streams:
            step = _Step()
            for number in range(streams):
                queue = await open_streams.enter_async_context(engine.stream(_request(number, tokens)))
                assert isinstance(queue, TokenQueue)
                queue.forward(_Receiver(number, step))
            for _ in range(tokens):
                yield await step.rows()

    def pid(self) -> int:
        """Return the id of its process."""
        return os.getpid()


class _Step:
    """The tokens of one turn of the event loop."""

    def __init__(self) -> None:
        self._rows: list[tuple[int, int, int]] = []
        self._came = anyio.Event()

    def add(self, number: int, token: Token) -> None:
        self._rows.append((number, token.index, token.id))
        self._came.set()

    async def rows(self) -> list[tuple[int, int, int]]:
        await self._came.wait()
        self._came, rows, self._rows = anyio.Event(), self._rows, []
        return rows


class _Receiver:
    """Takes the tokens of one stream."""

    def __init__(self, number: int, step: _Step) -> None:
        self._number, self._step = number, step

    def put(self, token: Token) -> None:
        self._step.add(self._number, token)


def measure(settings: Settings) -> dict[str, Any]:
    """Have the figures measured where Ray is; none where it is not installed (`make ray-env`)."""
    if not _PYTHON.exists():
        return {}
    counts = ",".join(map(str, settings.streams))
    code = (
        f"from benchmarks.ray_tokens import child; child([{counts}], {settings.tokens}, {settings.repeats})"
    )
    env = {
        **os.environ,
        "PYTHONPATH": os.getcwd(),
        "RAY_worker_niceness": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    command = [str(_PYTHON.absolute()), "-c", code]
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, check=True)
    report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return report


def rows(report: dict[str, Any]) -> list[list[str]]:
    """Return the lines of a table."""
    lines = list[list[str]]()
    cost, late = report["cpu_us_per_token"], report["p99_s"]
    for streams in cost["remote"]:
        shares = ratios(cost["remote"][streams], cost["ray_generator"][streams])
        lines += [
            [f"us a token, link, {streams} streams", Summary.of(cost["remote"][streams]).format(1), ""],
            [f"us a token, Ray, {streams} streams", Summary.of(cost["ray_generator"][streams]).format(1), ""],
            ["the link's over Ray's", Summary.of(shares).format(2), f"{MOST_OF_RAY:g}"],
            [
                f"p99 in ms, link, {streams} streams",
                Summary.of([1e3 * each for each in late[streams]]).format(1),
                f"{1e3 * MOST_P99_S:g}" if streams == "32" else "",
            ],
        ]
    return lines


def is_kept(report: dict[str, Any]) -> bool:
    """Whether the figures are within their limits: half of Ray's cost, and 10 ms at 32 streams."""
    cost, late = report["cpu_us_per_token"], report["p99_s"]
    shares = [Summary.of(ratios(cost["remote"][n], cost["ray_generator"][n])).median for n in cost["remote"]]
    return max(shares) <= MOST_OF_RAY and ("32" not in late or Summary.of(late["32"]).median <= MOST_P99_S)


def child(streams: list[int], tokens: int, repeats: int) -> None:
    """Measure in this process, and print the figures."""
    ray: Any = import_module("ray")
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, configure_logging=False)
    report = anyio.run(measure_connected, Settings(streams=tuple(streams), tokens=tokens, repeats=repeats))
    ray.shutdown()
    sys.stdout.write(json.dumps(report) + "\n")


async def measure_connected(settings: Settings) -> dict[str, Any]:
    """Measure in a process that is connected to a cluster."""
    from hotswap.backends.ray import RayEngine

    ray: Any = import_module("ray")
    names = ("remote", "ray_generator")
    cost: dict[str, dict[str, list[float]]] = {name: {} for name in names}
    late: dict[str, dict[str, list[float]]] = {name: {} for name in names}
    async with _loaded(RayEngine("e0", partial(ClockEngine, "e0"), _store)) as engine:
        assert isinstance(engine, RayEngine)
        actor = ray.remote(RowsActor).remote()
        others = {"remote": engine.pid, "ray_generator": await actor.pid.remote()}
        for streams in settings.streams:
            for name in rounds(names, settings.repeats):
                ages = list[float]()
                began = _cpu_s(others[name])
                if name == "remote":
                    await _by_link(engine, streams, settings.tokens, ages)
                else:
                    await _by_generator(actor, streams, settings.tokens, ages)
                spent = _cpu_s(others[name]) - began
                cost[name].setdefault(str(streams), []).append(1e6 * spent / (streams * settings.tokens))
                late[name].setdefault(str(streams), []).append(quantiles(ages, n=100)[98])
    return {"cpu_us_per_token": cost, "p99_s": late["remote"], "ray_generator_p99_s": late["ray_generator"]}


async def _by_link(engine: Engine, streams: int, tokens: int, ages: list[float]) -> None:
    async with anyio.create_task_group() as readers:
        for number in range(streams):
            readers.start_soon(_read, engine.stream(_request(number, tokens)), ages)


async def _by_generator(actor: Any, streams: int, tokens: int, ages: list[float]) -> None:
    queues = [TokenQueue() for _ in range(streams)]
    async with anyio.create_task_group() as readers:
        for queue in queues:
            readers.start_soon(_read, nullcontext(queue), ages)
        method = actor.rows.options(num_returns="streaming")
        async for step in method.remote(streams, tokens):
            for number, index, born in await step:
                queues[number].put(new_token(born, index))
        for queue in queues:
            queue.close()


async def _read(stream: AbstractAsyncContextManager[TokenStream], ages: list[float]) -> None:
    async with stream as tokens:
        ages += [1e-6 * (_now_us() - token.id) async for token in tokens]


@asynccontextmanager
async def _loaded(engine: Engine) -> AsyncGenerator[Engine]:
    async with _store() as weights, engine:
        await engine.load(ModelCard.of(Model("m"), await weights.manifest(ModelId("m"))), weights)
        yield engine


def _request(number: int, tokens: int) -> Request:
    return Request(
        id=RequestId(f"r{number}"),
        model=ModelId("m"),
        prompt=(1, 2, number),
        sampling=Sampling(max_tokens=tokens, ignore_eos=True),
    )


def _store() -> SimStore:
    return SimStore({"m": 4096})


def _now_us() -> int:
    """The time of the machine, the same in all of its processes, within half an hour."""
    return time.monotonic_ns() // 1000 & _BITS


def _cpu_s(pid: int) -> float:
    """Processor time of this process, and of another one."""
    user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return time.process_time() + (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")
