"""What adapters cost: steps with 0 to 20 of them, loading and dropping one, memory in the long run.

python -m benchmarks adapters --json adapters.json      a small model, seconds
python -m benchmarks adapters --full                    also hidden 1024, 12 layers, in float32 and bfloat16

A step decodes one token of each of 20 requests, or decodes for 19 and prefills a part of a prompt for one,
with weights packed, as an engine computes it. With *n* adapters the requests use them in turn; 0 is the same
step without. Seconds are processor time on one thread, contestants take turns, and ratios are within a round.

Adapters are loaded for the first time, into new memory; again, from files that have changed, into existing
memory; and again from host memory.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import anyio
import psutil
import torch
from safetensors.torch import save_file

from benchmarks.command import parser_of, save
from benchmarks.measure import Summary, brief, machine, ratios, rounds, versions
from benchmarks.models import llama_in_engine
from benchmarks.table import show
from hotswap import Adapter, AdapterId, InstanceId, ModelId
from hotswap.backends.notifier import StatusNotifier
from hotswap.backends.torch.adapters.manager import AdapterManager
from hotswap.backends.torch.adapters.slots import AdapterSlot
from hotswap.backends.torch.adapters.targets import targets
from hotswap.backends.torch.forward import LocalForward, Piece, Work
from hotswap.backends.torch.kv import KVCache

# Hidden size, layers and dtype of the models.
QUICK = ((256, 4, "float32"),)
FULL = (*QUICK, (1024, 12, "float32"), (1024, 12, "bfloat16"))
CPU = torch.device("cpu")
NUM_REQUESTS = 20
COUNTS = (0, 1, 4, 20)
RANKS = (4, 8, 16, 32)
TARGETS = {
    "attention": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "all linear layers": ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
}
CONTEXT, BLOCK_TOKENS, BUDGET, NUM_CYCLES = 128, 32, 256, 1000


def main(arguments: Sequence[str]) -> int:
    """Measure, print and perhaps write the report."""
    parser = parser_of("adapters", __doc__, full="also hidden 1024, 12 layers, in float32 and bfloat16")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--steps", nargs="+", choices=("decode", "mixed"), default=["decode", "mixed"])
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    report: dict[str, Any] = {
        "machine": machine(Path(tempfile.gettempdir())),
        "versions": versions("torch", "transformers"),
        "settings": {"requests": NUM_REQUESTS, "context": CONTEXT, "ranks": RANKS, "threads": 1},
        "models": {},
    }
    for hidden, layers, dtype in FULL if options.full else QUICK:
        name = f"{hidden}x{layers} {dtype}"
        model = llama_in_engine(hidden, layers, getattr(torch, dtype))
        report["models"][name] = _measure_model(model, options.steps, options.repeats)
        for what, found in report["models"][name].items():
            _show(f"{what}, {name}", found)
    save(brief(report), options.json)
    return 0


def _measure_model(model: Any, kinds: Sequence[str], repeats: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as root:
        for name, layers in TARGETS.items():
            adapters = [
                _write(Path(root) / f"{name}-{n}", model, layers, RANKS[n % len(RANKS)])
                for n in range(max(COUNTS))
            ]
            found[name] = anyio.run(_measure, model, adapters, kinds, repeats)
    return found


async def _measure(model: Any, adapters: list[Adapter], kinds: Sequence[str], repeats: int) -> dict[str, Any]:
    holder = AdapterManager(
        InstanceId("e0"), CPU, max_adapters=64, size_bytes=1 << 30, notifier=StatusNotifier()
    )
    holder.serve(ModelId("m"), targets(model, frozenset()))
    first_s = [await _timed(lambda a=adapter: holder.load(a)) for adapter in adapters]  # type: ignore[misc]
    drop_s, files_s, again_s = [], [], []
    for adapter in adapters:
        assert adapter.source is not None
        os.utime(Path(adapter.source) / "adapter_model.safetensors")
        drop_s.append(await _timed(lambda a=adapter: holder.drop(AdapterId(a.id))))  # type: ignore[misc]
        files_s.append(await _timed(lambda a=adapter: holder.load(a)))  # type: ignore[misc]
        await holder.drop(AdapterId(adapter.id))
        again_s.append(await _timed(lambda a=adapter: holder.load(a)))  # type: ignore[misc]
    places: list[AdapterSlot] = []
    for adapter in adapters:
        held = holder.use(AdapterId(adapter.id))
        assert held is not None
        places.append(held.place)
        held.num_users -= 1
    budgets = {"decode": 0, "mixed": BUDGET}
    steps = {kind: _steps(model, places, repeats, budgets[kind]) for kind in kinds}
    cycles = await _cycles(holder, adapters)
    await holder.forget()
    return {
        "size_bytes": [_size_bytes(adapter) for adapter in adapters],
        "very_first_load_s": first_s[0],  # which waits for the compiler
        "first_load_s": first_s[1:],
        "load_from_files_s": files_s,
        "load_s": again_s,
        "drop_s": drop_s,
        "step_s": steps,
        "cycles": cycles,
    }


def _steps(model: Any, places: list[AdapterSlot], repeats: int, budget: int) -> dict[str, list[float]]:
    """Seconds of steps by number of adapters."""
    blocks_each = (CONTEXT + BUDGET) // BLOCK_TOKENS + 1
    cache = KVCache(NUM_REQUESTS * blocks_each, BLOCK_TOKENS, CPU)
    forward = LocalForward(model, cache, invariant=True, linear_only=True)
    seconds: dict[str, list[float]] = {str(count): [] for count in COUNTS}
    with torch.inference_mode():
        for turn, count in enumerate(rounds(COUNTS, repeats + 1)):
            work = Work(tuple(_pieces(places[:count], blocks_each, budget)))
            began_s = time.process_time()
            forward.submit(work)
            forward.result()
            if turn >= len(COUNTS):  # the first round warms up
                seconds[str(count)].append(time.process_time() - began_s)
    return seconds


def _pieces(places: list[AdapterSlot], blocks_each: int, budget: int) -> list[Piece]:
    pieces: list[Piece] = []
    for n in range(NUM_REQUESTS):
        place = places[n % len(places)] if places else None
        blocks = range(1 + n * blocks_each, 1 + (n + 1) * blocks_each)
        last = n == NUM_REQUESTS - 1
        length = max(1, budget - n) if last else 1
        pieces.append(Piece([(7 * n + at) % 512 for at in range(length)], CONTEXT - 1, blocks, True, place))
    return pieces


async def _cycles(holder: AdapterManager, adapters: list[Adapter]) -> dict[str, Any]:
    """Resident memory before and after adapters took turns a thousand times."""
    process = psutil.Process()
    sizes: list[int] = []
    for cycle in range(NUM_CYCLES):
        adapter = adapters[cycle % len(adapters)]
        await holder.drop(AdapterId(adapter.id))
        await holder.load(adapter)
        if cycle % (NUM_CYCLES // 10) == 0:
            sizes.append(process.memory_info().rss)
    return {"num": NUM_CYCLES, "resident_bytes": [*sizes, process.memory_info().rss]}


async def _timed(act: Callable[[], Any]) -> float:
    began_s = time.perf_counter()
    await act()
    return time.perf_counter() - began_s


def _write(directory: Path, model: Any, layers: tuple[str, ...], rank: int) -> Adapter:
    tensors: dict[str, torch.Tensor] = {}
    for name, layer in model.named_modules():
        if name.rpartition(".")[2] in layers:
            tensors[f"base_model.model.{name}.lora_A.weight"] = torch.randn(rank, layer.in_features) * 0.02
            tensors[f"base_model.model.{name}.lora_B.weight"] = torch.randn(layer.out_features, rank) * 0.02
    directory.mkdir()
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": list(layers)}
    (directory / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file(tensors, directory / "adapter_model.safetensors")
    return Adapter(directory.name, "m", directory)


def _size_bytes(adapter: Adapter) -> int:
    assert adapter.source is not None
    return (Path(adapter.source) / "adapter_model.safetensors").stat().st_size


def _show(name: str, report: dict[str, Any]) -> None:
    rows = []
    for kind, steps in report["step_s"].items():
        for count, seconds in steps.items():
            ratio, shown = Summary.of(ratios(seconds, steps["0"])), Summary.of([1e3 * s for s in seconds])
            rows += [[f"{kind}, {count} adapters", shown.format(1), ratio.format(2)]]
    for what in ("first_load_s", "load_from_files_s", "load_s", "drop_s"):
        rows.append([what, Summary.of([1e3 * second for second in report[what]]).format(2), ""])
    sizes = report["cycles"]["resident_bytes"]
    grown = (sizes[-1] - sizes[1]) / 1e6
    rows.append([f"resident MB after {NUM_CYCLES} cycles", f"{sizes[-1] / 1e6:.1f}", f"{grown:+.1f} MB"])
    show(f"adapters on {name}", ("", "ms [min-max]", "ratio to none"), rows)
