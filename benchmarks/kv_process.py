"""KV blocks of engines in processes of their own: kept in those processes, or in the fleet's.

    python -m benchmarks kv_process                    contexts of 1,024 tokens
    python -m benchmarks kv_process --full             and of 4,096, three rounds

Two engines serve two models in a process each. A stream decodes on the first engine. Its model is swapped out
and back, and the stream goes on there (`same`); then it is unloaded, and the stream goes on at the other
engine, which serves the model too (`other`). Blocks are kept by a `HostKVStore` ("fleet"), or by a
`NodeKVStore` ("node"), in turns. Figures are seconds until the next token after the stream stopped, of the
clock and of the processor, the latter of the fleet's process and of both engines'.
"""

from __future__ import annotations

import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import anyio
import psutil

from benchmarks.by_hand import ByHand
from benchmarks.command import parser_of, save
from benchmarks.measure import WORK, Summary, machine, rounds, versions, workspace
from benchmarks.models import write_llama
from benchmarks.table import show
from hotswap import Fleet, FleetStream, Model, Sampling
from hotswap.abc import KVStore
from hotswap.backends.kv_stores import HostKVStore, NodeKVStore
from hotswap.backends.process import ProcessEngine
from hotswap.backends.stores import NvmeStore
from hotswap.backends.torch import TorchEngine
from hotswap.policies import LeastLoadedRouter

__all__ = ["Settings", "main", "measure"]

_VOCABULARY = 2048
_STORES = {"fleet": HostKVStore, "node": NodeKVStore}
_FIGURES = {"wall_s": "clock", "fleet_cpu_s": "fleet's processor", "engines_cpu_s": "engines' processor"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What to measure.

    Attributes:
        contexts: Tokens of the stream.
        turns: Swaps and moves of each context in a round; the first of a fleet does not count.
        hidden: Width of the models.
        layers: Depth of the models.
        repeats: Rounds.
    """

    contexts: tuple[int, ...] = (1024,)
    turns: int = 3
    hidden: int = 512
    layers: int = 8
    repeats: int = 1


FULL = Settings(contexts=(1024, 4096), repeats=3)


def _engine(name: str, kv_tokens: int) -> TorchEngine:
    return TorchEngine(name, threads=1, kv_tokens=kv_tokens, memory_bytes="4 GiB", max_requests=8)


class _Turns:
    """One stream that is taken away and comes back, and what that costs."""

    def __init__(self, fleet: Fleet, engines: Sequence[ProcessEngine]) -> None:
        self._fleet, self._engines = fleet, engines
        self._num_tokens, self._came = 0, anyio.Event()
        self.found: defaultdict[str, list[dict[str, float]]] = defaultdict(list)

    async def run(self, context: int, turns: int) -> None:
        """Measure a context; the stream ends with it."""
        random = Random(context)
        prompt = [random.randrange(_VOCABULARY) for _ in range(context)]
        for view in self._fleet.view().instances:
            if view.model != "a":
                await self._fleet.swap(view.id, to="a")
        async with (
            self._fleet.stream("a", prompt, Sampling(max_tokens=4096, ignore_eos=True)) as stream,
            anyio.create_task_group() as tasks,
        ):
            tasks.start_soon(self._read, stream)
            await self._has_more()
            for turn in range(turns + 1):
                for kind in ("same", "other"):
                    cost = await self._turn(stream, kind)
                    if turn:
                        self.found[kind].append(cost)
            tasks.cancel_scope.cancel()

    async def _turn(self, stream: FleetStream, kind: str) -> dict[str, float]:
        here = stream.hops[-1].instance
        there = "e1" if here == "e0" else "e0"
        if kind == "same":
            await self._fleet.unload(there)
            await self._fleet.swap(here, to="b")
        before, began_s = self._cpu_s(), time.perf_counter()
        if kind == "same":
            await self._fleet.swap(here, to="a")
        else:
            await self._fleet.unload(here)
        await self._has_more()
        wall_s, after = time.perf_counter() - began_s, self._cpu_s()
        restored = stream.hops[-1].restored_tokens
        if restored < len(stream.request.prompt) - 64:
            raise RuntimeError(f"Only {restored} tokens were restored: {stream.hops[-1]}")
        await self._fleet.swap(there if kind == "same" else here, to="a")
        return {"wall_s": wall_s, "fleet_cpu_s": after[0] - before[0], "engines_cpu_s": after[1] - before[1]}

    async def _read(self, stream: FleetStream) -> None:
        async for _ in stream:
            self._num_tokens += 1
            self._came.set()
            self._came = anyio.Event()

    async def _has_more(self) -> None:
        await self._came.wait()

    def _cpu_s(self) -> tuple[float, float]:
        engines_s = 0.0
        for engine in self._engines:
            with suppress(psutil.NoSuchProcess):
                times = psutil.Process(engine.pid).cpu_times()
                engines_s += times.user + times.system
        return time.process_time(), engines_s


async def _measure(root: Path, settings: Settings, kind: str) -> dict[str, dict[str, list[dict[str, float]]]]:
    kv_tokens = 2 * max(settings.contexts) + 8192
    engines = [ProcessEngine(name, partial(_engine, name, kv_tokens)) for name in ("e0", "e1")]
    kv_store: KVStore = _STORES[kind]("2 GiB")
    found: dict[str, dict[str, list[dict[str, float]]]] = {}
    async with Fleet(
        engines=engines,
        store=NvmeStore(root / "store"),
        models=[Model("a"), Model("b")],
        router=LeastLoadedRouter(),
        scheduler=ByHand(),
        kv_store=kv_store,
    ) as fleet:
        for context in settings.contexts:
            turns = _Turns(fleet, engines)
            await turns.run(context, settings.turns)
            found[str(context)] = dict(turns.found)
    return found


def measure(settings: Settings, directory: Path = WORK) -> dict[str, Any]:
    """Carry the benchmark out and return its report."""
    report: dict[str, Any] = {"settings": asdict(settings), "versions": versions("torch", "transformers")}
    by_context: dict[str, Any] = {
        str(context): {
            way: {kind: {figure: [] for figure in _FIGURES} for kind in _STORES} for way in ("same", "other")
        }
        for context in settings.contexts
    }
    with workspace("kv_process", directory) as root:
        report["machine"] = machine(root)
        for seed, name in enumerate(("a", "b")):
            write_llama(
                root,
                hidden=settings.hidden,
                layers=settings.layers + seed,  # of one depth, blocks would stay on the device
                name=name,
                seed=seed,
                max_tokens=16_384,
                vocabulary=_VOCABULARY,
            )
        for kind in rounds(list(_STORES), settings.repeats):
            for context, ways in anyio.run(_measure, root, settings, kind).items():
                for way, costs in ways.items():
                    for figure in _FIGURES:
                        by_context[context][way][kind][figure] += [cost[figure] for cost in costs]
    return {**report, "by_context": by_context}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print a table, write the report."""
    options = parser_of("kv_process", __doc__, full="4,096 tokens too, three rounds").parse_args(arguments)
    report = measure(FULL if options.full else Settings())
    for context, ways in report["by_context"].items():
        for way, kinds in ways.items():
            show(
                f"{context} tokens, on to the {way} engine: ms until the next token",
                ["blocks kept by", *_FIGURES.values()],
                [
                    [kind, *(Summary.of([1e3 * s for s in of[figure]]).format(1) for figure in _FIGURES)]
                    for kind, of in kinds.items()
                ],
            )
    save(report, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
