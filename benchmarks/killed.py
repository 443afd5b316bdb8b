"""How long clients wait when a process of an engine is killed in the middle of their streams.

    python -m benchmarks killed --json killed.json

Two engines serve one model, one of them on two processes, or as a part of `benchmarks remote` in a process of
its own. A process is killed with -9 while each engine has half of the streams, and its streams go on
elsewhere. The wait of their clients is compared with a prefill of the same tokens, all of them at once, on
the remaining engine.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import anyio
import psutil

from benchmarks.by_hand import ByHand
from benchmarks.command import parser_of, save
from benchmarks.measure import WORK, Summary, brief, machine, versions, workspace
from benchmarks.models import write_llama
from benchmarks.table import show
from hotswap import Fleet, Model, Sampling
from hotswap.backends.process import ProcessEngine
from hotswap.backends.stores import NvmeStore, PinnedStore, TieredStore
from hotswap.backends.torch import TorchEngine
from hotswap.policies import LeastLoadedRouter

__all__ = ["Settings", "main", "measure"]

_MODEL = "m"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What to measure.

    Attributes:
        streams: Number of streams on both engines together.
        prompt: Tokens of each prompt.
        repeats: How often a process is killed.
        hidden: Width of the model.
        layers: Depth of the model.
        interval_s: The fleet's control period.
        victim: The engine whose process is killed: on `"ranks"`, or in a `"process"` of its own.
        allowed_s: What a client may wait beside that prefill.
    """

    streams: int = 100
    prompt: int = 64
    repeats: int = 3
    hidden: int = 256
    layers: int = 4
    interval_s: float = 0.25
    victim: Literal["ranks", "process"] = "ranks"
    allowed_s: float = 0.5


def measure(settings: Settings, directory: Path = WORK) -> dict[str, Any]:
    """Carry the benchmark out and return its report, in seconds."""
    with workspace("killed", directory) as work:
        write_llama(work, hidden=settings.hidden, layers=settings.layers)
        report: dict[str, Any] = {
            "machine": machine(work),
            "versions": versions("torch", "transformers"),
            "settings": asdict(settings),
            "gap_s": [],
            "prefill_s": [],
        }
        for _ in range(settings.repeats):
            gap_s, prefill_s = anyio.run(_measure, work, settings)
            report["gap_s"].append(gap_s)
            report["prefill_s"].append(prefill_s)
    report["longest_over_bound"] = [
        max(gaps) / (max(prefills) + settings.allowed_s)
        for gaps, prefills in zip(report["gap_s"], report["prefill_s"], strict=True)
    ]
    return report


async def _measure(root: Path, settings: Settings) -> tuple[list[float], list[float]]:
    """Kill once; return the wait of each stream that moved, and prefills of the same tokens elsewhere."""
    common: dict[str, Any] = {"threads": 1, "kv_tokens": 65_536, "max_requests": settings.streams}
    victim: TorchEngine | ProcessEngine
    if settings.victim == "process":
        victim = ProcessEngine("victim", partial(TorchEngine, "victim", **common))
    else:
        victim = TorchEngine("victim", pp=2, **common)
    single = TorchEngine("single", **common)
    prompts = [
        tuple((7 * stream + 3 * place) % 2000 for place in range(settings.prompt))
        for stream in range(settings.streams)
    ]
    times: list[list[float]] = [[] for _ in prompts]
    tokens: list[list[int]] = [[] for _ in prompts]
    resumed: dict[int, int] = {}
    killed: list[int] = []

    async def read(fleet: Fleet, stream: int) -> None:
        sampling = Sampling(max_tokens=48, ignore_eos=True)
        async with fleet.stream(_MODEL, prompts[stream], sampling) as arriving:
            async for token in arriving:
                times[stream].append(time.perf_counter())
                tokens[stream].append(token.id)
                if not killed and all(len(seen) >= 8 for seen in tokens):
                    killed.append(_kill_one(victim))
            if arriving.num_hops > 1:
                resumed[stream] = arriving.hops[-1].first_index

    async with Fleet(
        engines=[victim, single],
        store=TieredStore(PinnedStore("256 MiB"), NvmeStore(root / "store")),
        models=[Model(_MODEL)],
        router=LeastLoadedRouter(),
        scheduler=ByHand(),
        interval_s=settings.interval_s,
    ) as fleet:
        for engine in (victim, single):
            await fleet.swap(engine.id, to=_MODEL)
        async with anyio.create_task_group() as tasks:
            for stream in range(settings.streams):
                tasks.start_soon(read, fleet, stream)
        gaps = [times[stream][at] - times[stream][at - 1] for stream, at in resumed.items()]
        moved = [(*prompts[stream], *tokens[stream][:at]) for stream, at in resumed.items()]
        others = [prompts[stream] for stream in range(settings.streams) if stream not in resumed]
        return gaps, await _prefills(fleet, moved, others)


def _kill_one(victim: TorchEngine | ProcessEngine) -> int:
    """Kill a process of the engine that has some, and return its number."""
    if isinstance(victim, ProcessEngine):
        process = psutil.Process(victim.pid)
    else:
        ranks = [child for child in psutil.Process().children() if "rank" in " ".join(child.cmdline())]
        process = ranks[-1]
    process.kill()
    return int(process.pid)


async def _prefills(
    fleet: Fleet, prompts: Sequence[tuple[int, ...]], others: Sequence[tuple[int, ...]]
) -> list[float]:
    """Seconds to the first token of each, all asked for at once, beside others that decode.

    The first token differs, so that no prefix is known.
    """
    seconds: list[float] = []
    decoding, all_decode = 0, anyio.Event()

    async def decode(prompt: tuple[int, ...]) -> None:
        nonlocal decoding
        async with fleet.stream(_MODEL, prompt, Sampling(max_tokens=1024, ignore_eos=True)) as tokens:
            await anext(tokens)
            decoding += 1
            if decoding == len(others):
                all_decode.set()
            async for _ in tokens:
                pass

    async def first(prompt: tuple[int, ...]) -> None:
        sampling = Sampling(max_tokens=40, ignore_eos=True)
        async with fleet.stream(_MODEL, (1999, *prompt[1:]), sampling) as tokens:
            await anext(tokens)
            seconds.append(time.perf_counter() - began_s)
            await tokens.collect()  # as those that moved decode on beside the others' prefills

    async with anyio.create_task_group() as background:
        for prompt in others:
            background.start_soon(decode, (1998, *prompt[1:]))
        await all_decode.wait()
        began_s = time.perf_counter()
        async with anyio.create_task_group() as tasks:
            for prompt in prompts:
                tasks.start_soon(first, prompt)
        background.cancel_scope.cancel()
    return seconds


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, write the report; the exit status is 1 if a client waited longer than it may."""
    parser = parser_of("killed", __doc__)
    options = parser.parse_args(arguments)
    report = measure(Settings())
    rows: list[list[str]] = []
    for gaps, prefills, ratio in zip(
        report["gap_s"], report["prefill_s"], report["longest_over_bound"], strict=True
    ):
        waited = Summary.of([1e3 * s for s in gaps]).format(0)
        rows.append([str(len(gaps)), waited, f"{1e3 * max(prefills):.0f}", f"{ratio:.2f}"])
    show(
        "a process killed under running streams, in ms",
        ("streams moved", "what they waited", "last prefill of the same", "longest over its bound"),
        rows,
    )
    print(f"median of the longest: {statistics.median(max(gaps) for gaps in report['gap_s']):.3f} s")
    save(brief(report), options.json)
    return int(max(report["longest_over_bound"]) > 1)


if __name__ == "__main__":
    sys.exit(main())
