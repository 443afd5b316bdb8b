"""What a fleet takes to choose an engine for a request, to assign the request and to release it again.

As many requests are under way as there are engines, for four models in turns, routed to the engine with the
least load. Each request enters its engine and leaves it, so that between two choices the load that engines
report has changed. The same requests enter and leave the same kind of engines without a fleet; the difference
is the fleet's: its choice, its counts, and what it does when an engine reports a change.
"""

from __future__ import annotations

import gc
import itertools
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any, TypeAlias

import anyio

from benchmarks.by_hand import ByHand
from benchmarks.measure import Summary, ratios, rounds
from benchmarks.table import show
from hotswap import Fleet, InstanceId, Model, ModelId, Request, RequestId, Sampling
from hotswap.abc import Engine, ModelCard, WrapperEngine
from hotswap.backends.sim import SimEngine, SimStore, sim_manifest
from hotswap.hardware import DeviceProfile
from hotswap.policies import LeastLoadedRouter

__all__ = ["LIMIT_GROWTH", "LIMIT_US", "RouteSettings", "measure_routes", "missed", "show_routes"]

LIMIT_US, LIMIT_GROWTH = 40.0, 1.5

_MODELS = tuple(ModelId(f"m{number}") for number in range(4))
_PROMPT, _SAMPLING = tuple(range(100)), Sampling(max_tokens=100)
# Nothing is computed, and weights are loaded at once.
_PROFILE = DeviceProfile(load_bytes_per_s=1e15, unload_s=0.0)
_KINDS: Mapping[str, Callable[[Engine], Engine]] = {"push": lambda engine: engine, "wrapped": WrapperEngine}

Route: TypeAlias = Callable[[Request], InstanceId]
Release: TypeAlias = Callable[[Request, InstanceId], None]
Microseconds: TypeAlias = dict[str, dict[str, list[float]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteSettings:
    """What to measure: `repeats` times `requests` requests for each number of engines."""

    engines: tuple[int, ...] = (8, 64, 512)
    requests: int = 1000
    repeats: int = 7


def routing(fleet: Fleet) -> tuple[Route, Release]:
    """How the fleet admits a request to an engine and releases it: the one place that knows its parts."""
    admission, state = fleet._core.admission, fleet._core.state

    def route(request: Request) -> InstanceId:
        state.refresh()
        instance = admission.choose(request)
        assert instance is not None
        state.assign(request, instance)
        return instance.id

    return route, lambda request, instance: state.release(request, state.instances[instance])


@dataclass(frozen=True, slots=True)
class _Contestant:
    """Engines and the router under test."""

    engines: Mapping[InstanceId, Engine]
    route: Route
    release: Release
    under_way: deque[tuple[Request, InstanceId, AbstractAsyncContextManager[Any]]]

    @classmethod
    @asynccontextmanager
    async def in_fleet(cls, engines: Sequence[Engine]) -> AsyncGenerator[_Contestant]:
        async with Fleet(
            engines=engines,
            store=_store(),
            models=map(Model, _MODELS),
            router=LeastLoadedRouter(),
            scheduler=ByHand(),
        ) as fleet:
            async with anyio.create_task_group() as swaps:
                for engine, model in _pairs(engines):
                    swaps.start_soon(lambda e=engine.id, m=model: fleet.swap(e, to=m))  # type: ignore[misc]
            yield cls({engine.id: engine for engine in engines}, *routing(fleet), deque())

    @classmethod
    @asynccontextmanager
    async def alone(cls, engines: Sequence[Engine]) -> AsyncGenerator[_Contestant]:
        async with AsyncExitStack() as stack:
            store = await stack.enter_async_context(_store())
            turns: dict[ModelId, list[InstanceId]] = {model: [] for model in _MODELS}
            for engine, model in _pairs(engines):
                await stack.enter_async_context(engine)
                await engine.load(ModelCard.of(Model(model), await store.manifest(model)), store)
                turns[model].append(engine.id)
            next_of = {model: itertools.cycle(ids).__next__ for model, ids in turns.items()}
            yield cls(
                {engine.id: engine for engine in engines},
                lambda request: next_of[request.model](),
                lambda request, instance: None,
                deque(),
            )

    async def serve(self, number: int) -> None:
        """Let one more request enter an engine, and the oldest leave when there are as many as engines."""
        request = Request(
            id=RequestId(f"r{number}"),
            model=_MODELS[number % len(_MODELS)],
            prompt=_PROMPT,
            sampling=_SAMPLING,
        )
        instance = self.route(request)
        stream = self.engines[instance].stream(request)
        await stream.__aenter__()
        self.under_way.append((request, instance, stream))
        if len(self.under_way) > len(self.engines):
            await self.leave()

    async def leave(self) -> None:
        """Let the oldest request leave."""
        request, instance, stream = self.under_way.popleft()
        await stream.__aexit__(None, None, None)
        self.release(request, instance)

    async def cpu_us(self, requests: int) -> float:
        """Return the processor time of a request."""
        gc.collect()
        began = time.process_time()
        for number in range(requests):
            await self.serve(number)
        return 1e6 * (time.process_time() - began) / requests


async def measure_routes(settings: RouteSettings) -> Microseconds:
    """Return microseconds of processor time a request, by kind of engine and number of engines."""
    cases = [(kind, count) for kind in _KINDS for count in settings.engines]
    series: Microseconds = {kind: {str(count): [] for count in settings.engines} for kind in _KINDS}
    async with AsyncExitStack() as stack:
        pairs: dict[tuple[str, int], tuple[_Contestant, _Contestant]] = {}
        for case in cases:
            fleet = await stack.enter_async_context(_Contestant.in_fleet(_engines(*case)))
            alone = await stack.enter_async_context(_Contestant.alone(_engines(*case)))
            pairs[case] = fleet, alone
        for case, contestants in pairs.items():
            for contestant in contestants:
                for number in range(case[1]):
                    await contestant.serve(number)
        for case in rounds(cases, settings.repeats):
            fleet, alone = pairs[case]
            added = await fleet.cpu_us(settings.requests) - await alone.cpu_us(settings.requests)
            series[case[0]][str(case[1])].append(added)
        for contestant in itertools.chain(*pairs.values()):
            while contestant.under_way:
                await contestant.leave()
    return series


def growth(by_engines: Mapping[str, Sequence[float]]) -> Summary:
    """How many times as long a request takes with the most engines as with the fewest, round by round."""
    series = list(by_engines.values())
    return Summary.of(ratios(series[-1], series[0]))


def missed(route_us: Microseconds) -> bool:
    """Whether a limit is missed."""
    return any(
        growth(by_engines).median > LIMIT_GROWTH or max(map(median, by_engines.values())) > LIMIT_US
        for by_engines in route_us.values()
    )


def show_routes(route_us: Microseconds) -> None:
    """Print a table of the medians, with their spread and the limits."""
    counts = list(next(iter(route_us.values())))
    rows = [
        [
            kind,
            *(Summary.of(figures).format(1) for figures in by_engines.values()),
            growth(by_engines).format(2),
        ]
        for kind, by_engines in route_us.items()
    ]
    rows.append(["at most", *(f"{LIMIT_US:.1f}" for _ in counts), f"{LIMIT_GROWTH:.2f}"])
    head = ["engines", *counts, f"{counts[-1]} / {counts[0]}"]
    show("microseconds of processor time to choose, assign and release, by number of engines", head, rows)


def _engines(kind: str, count: int) -> list[Engine]:
    return [_KINDS[kind](SimEngine(f"e{number}", _PROFILE)) for number in range(count)]


def _store() -> SimStore:
    return SimStore([sim_manifest(model, "1 KiB") for model in _MODELS])


def _pairs(engines: Sequence[Engine]) -> list[tuple[Engine, ModelId]]:
    return list(zip(engines, itertools.cycle(_MODELS), strict=False))
