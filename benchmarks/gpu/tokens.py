"""Swaps and tokens per second of the engine, with weights in bf16 and in fp8; needs transformers."""

from __future__ import annotations

import time
from collections.abc import Awaitable
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any, get_args

import anyio
import torch
import transformers

from benchmarks.gpu.session import Session
from benchmarks.measure import Summary
from benchmarks.table import show
from hotswap import Model, ModelId, Request, RequestId, Sampling
from hotswap.abc import ModelCard
from hotswap.backends.stores import NvmeStore, PinnedStore, TieredStore
from hotswap.backends.stores.convert import convert
from hotswap.backends.torch import TorchEngine
from hotswap.backends.torch.step_options import GpuSteps

__all__ = ["run"]

# Of a Llama of about a billion weights.
HIDDEN, LAYERS = 2048, 16
BATCHES = (1, 8, 32)
PROMPT, OUTPUT = 128, 64
SWAPS = 7
SCHEMES = {"bf16": None, "fp8": "fp8-e4m3"}


def run(session: Session) -> None:
    """Make a random model, convert it both ways, and swap and serve each."""
    found: list[dict[str, Any]] = []
    with TemporaryDirectory() as folder:
        model: Any = transformers.AutoModelForCausalLM.from_config(_config(session.is_dry))
        model.to(torch.bfloat16).save_pretrained(Path(folder) / "checkpoint")
        for name, scheme in SCHEMES.items():
            root = Path(folder) / name
            convert(Path(folder) / "checkpoint", root, model_id="m", quantize=scheme)
            found += [
                {"weights": name, "gpu_steps": kind, **anyio.run(_serve, session, root, kind)}
                for kind in get_args(GpuSteps)
            ]
    session.report["tokens"] = found
    lines = [
        [
            f"{each['weights']}, {each['weight_bytes'] / 1e9:.2f} GB, {each['gpu_steps']}",
            Summary.of(each["unload_s"]).format(),
            Summary.of(each["load_s"]).format(),
            Summary.of(each["first_token_s"]).format(),
            ", ".join(f"{batch}: {rate:.0f}" for batch, rate in each["tokens_per_s"].items()),
        ]
        for each in found
    ]
    show("the engine", ("", "unload, s", "load, s", "to the first token, s", "tokens/s of requests"), lines)


async def _serve(session: Session, root: Path, gpu_steps: GpuSteps) -> dict[str, Any]:
    """Swap a model out and in from pinned memory, then serve batches of requests."""
    output = 3 if session.is_dry else OUTPUT
    found: dict[str, Any] = {"unload_s": [], "load_s": [], "first_token_s": [], "tokens_per_s": {}}
    async with TieredStore(PinnedStore("16 GiB"), NvmeStore(root)) as store:
        card = ModelCard.of(Model("m"), await store.manifest(ModelId("m")))
        await store.prefetch(card.id)
        engine = TorchEngine(
            "e0",
            device=str(session.device),
            kv_tokens=32 * 256,
            prefix_reuse=False,
            gpu_steps=gpu_steps,
        )
        async with engine:
            found["first_load_s"] = await _timed(session, engine.load(card, store))
            await _generate(engine, 1, output=2)
            for _ in range(2 if session.is_dry else SWAPS):
                found["unload_s"].append(await _timed(session, engine.unload()))
                found["load_s"].append(await _timed(session, engine.load(card, store)))
                found["first_token_s"].append(await _timed(session, _generate(engine, 1, output=1)))
            for batch in (1, 2) if session.is_dry else BATCHES:
                if session.remaining_s < 30 and not session.is_dry:
                    session.report.setdefault("left_out", []).append(
                        f"tokens of {root.name}, {batch} at once"
                    )
                    continue
                await _generate(engine, batch, output=6)  # kernels are built, and graphs captured
                took_s = await _timed(session, _generate(engine, batch, output))
                found["tokens_per_s"][str(batch)] = batch * output / took_s
            found["weight_bytes"] = engine.status().weight_bytes
    return found


async def _timed(session: Session, verb: Awaitable[object]) -> float:
    began_s = time.perf_counter()
    await verb
    session.wait()
    return time.perf_counter() - began_s


async def _generate(engine: TorchEngine, batch: int, output: int) -> None:
    random = Random(batch)

    async def one(index: int) -> None:
        prompt = tuple(random.randrange(3, 500) for _ in range(PROMPT))
        sampling = Sampling(max_tokens=output, ignore_eos=True)
        request = Request(id=RequestId(f"r{index}"), model=ModelId("m"), prompt=prompt, sampling=sampling)
        async with engine.stream(request) as tokens:
            await tokens.collect()

    async with anyio.create_task_group() as tasks:
        for index in range(batch):
            tasks.start_soon(one, index)


def _config(is_dry: bool) -> Any:
    hidden, layers = (64, 2) if is_dry else (HIDDEN, LAYERS)
    return transformers.LlamaConfig(
        vocab_size=512 if is_dry else 32_000,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 32 if is_dry else hidden // 128,
        num_key_value_heads=2 if is_dry else 8,
        max_position_embeddings=1024,
    )
