"""What a fleet adds to each token and to each request, in processor time, over using the engines alone.

    python -m benchmarks.overhead                      32 requests at once; routes at 8, 64 and 512 engines
    python -m benchmarks.overhead --json report.json

The engine here computes nothing: in every step it gives each of its requests a token. The same requests are
read once from the engine and once through a fleet, in turns; the difference is the fleet's. What it takes to
route a request is measured by `route_overhead`.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import anyio

from benchmarks.by_hand import ByHand
from benchmarks.measure import Summary, machine, rounds, write_json
from benchmarks.route_overhead import (
    LIMIT_GROWTH,
    LIMIT_US,
    RouteSettings,
    measure_routes,
    missed,
    show_routes,
)
from benchmarks.step_engine import StepEngine
from benchmarks.table import show
from hotswap import Fleet, Model, ModelId, Request, RequestId, Sampling
from hotswap.abc import TokenStream
from hotswap.backends.sim import SimStore, sim_manifest
from hotswap.policies import LeastLoadedRouter

__all__ = ["Settings", "main", "measure"]

LIMIT_S = 25e-6
_MODEL = ModelId("m")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What to measure: `batch` requests of `tokens` tokens, `repeats` times per method, and routes."""

    batch: int = 32
    tokens: int = 512
    repeats: int = 9
    routes: RouteSettings = field(default_factory=RouteSettings)


def measure(settings: Settings) -> dict[str, Any]:
    """Carry the benchmark out and return its report."""
    return {
        "machine": machine(Path()),
        "settings": asdict(settings),
        "limit_s": LIMIT_S,
        **anyio.run(_measure, settings),
        "route_limits": {"us": LIMIT_US, "growth": LIMIT_GROWTH},
        "route_us": anyio.run(measure_routes, settings.routes),
    }


async def _measure(settings: Settings) -> dict[str, list[float]]:
    engine, sampling = StepEngine(), Sampling(max_tokens=settings.tokens, ignore_eos=True)
    store = SimStore([sim_manifest(_MODEL, "1 MiB")])
    async with Fleet(
        engines=[engine],
        store=store,
        models=[Model(_MODEL)],
        router=LeastLoadedRouter(),
        scheduler=ByHand(),
    ) as fleet:
        await fleet.swap("e0", to=_MODEL)

        async def from_engine() -> None:
            request = Request(id=RequestId("r"), model=_MODEL, prompt=(1,), sampling=sampling)
            async with engine.stream(request) as tokens:
                await _read(tokens, settings.tokens)

        async def through_fleet() -> None:
            async with fleet.stream(_MODEL, [1], sampling) as tokens:
                await _read(tokens, settings.tokens)

        cases = {"engine": from_engine, "fleet": through_fleet}
        series: dict[str, list[float]] = {case: [] for case in cases}
        for case in cases.values():
            await _cpu_s(case, settings)
        for name in rounds(tuple(cases), settings.repeats):
            series[name].append(await _cpu_s(cases[name], settings) / settings.batch / settings.tokens)
    added = [fleet - engine for fleet, engine in zip(series["fleet"], series["engine"], strict=True)]
    return {"engine_s": series["engine"], "fleet_s": series["fleet"], "added_s": added}


async def _read(tokens: TokenStream, expected: int) -> None:
    num_tokens = 0
    async for _ in tokens:
        num_tokens += 1
    assert num_tokens == expected


async def _cpu_s(case: Callable[[], Coroutine[Any, Any, None]], settings: Settings) -> float:
    gc.collect()
    began = time.process_time()
    async with anyio.create_task_group() as tasks:
        for _ in range(settings.batch):
            tasks.start_soon(case)
    return time.process_time() - began


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print a table, write the report; 1 if the fleet adds more than a limit."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks overhead", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--batch", type=int, default=Settings().batch, help="requests at once")
    parser.add_argument("--tokens", type=int, default=Settings().tokens, help="tokens of each")
    parser.add_argument("--repeats", type=int, default=Settings().repeats, help="rounds")
    parser.add_argument(
        "--routes", type=int, default=RouteSettings().requests, help="requests that are routed in a round"
    )
    parser.add_argument("--full", action="store_true", help="the default; said to all benchmarks at once")
    parser.add_argument("--json", type=Path, help="where the whole report goes")
    options = parser.parse_args(arguments)
    routes = RouteSettings(requests=options.routes)
    report = measure(
        Settings(batch=options.batch, tokens=options.tokens, repeats=options.repeats, routes=routes)
    )
    rows = [
        [name, Summary.of([1e6 * seconds for seconds in report[f"{name}_s"]]).format(1)]
        for name in ("engine", "fleet", "added")
    ]
    show(f"microseconds of processor time a token, batch {options.batch}", ["read from", "us"], rows)
    show_routes(report["route_us"])
    if options.json:
        write_json(options.json, report)
        print(f"The whole report is in {options.json}.")
    return int(Summary.of(report["added_s"]).median > LIMIT_S or missed(report["route_us"]))


if __name__ == "__main__":
    sys.exit(main())
