"""Tokens per second of the engine, with weights in bf16 and in fp8; needs transformers."""

from __future__ import annotations

import time
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import anyio
import torch
import transformers

from benchmarks.gpu.session import Session
from benchmarks.table import show
from hotswap import Model, ModelCard, ModelId, Request, RequestId, Sampling
from hotswap.backends.stores import NvmeStore
from hotswap.backends.stores.convert import convert
from hotswap.backends.torch import TorchEngine

__all__ = ["run"]

# Of a Llama of about a billion weights.
HIDDEN, LAYERS = 2048, 16
BATCHES = (1, 8, 32)
PROMPT, OUTPUT = 128, 64
SCHEMES = {"bf16": None, "fp8": "fp8-e4m3"}


def run(session: Session) -> None:
    """Make a random model, convert it both ways, and serve batches of each."""
    found: list[dict[str, Any]] = []
    with TemporaryDirectory() as folder:
        model: Any = transformers.AutoModelForCausalLM.from_config(_config(session.is_dry))
        model.to(torch.bfloat16).save_pretrained(Path(folder) / "checkpoint")
        for name, scheme in SCHEMES.items():
            root = Path(folder) / name
            convert(Path(folder) / "checkpoint", root, model_id="m", quantize=scheme)
            found += anyio.run(_serve, session, root, name)
    session.report["tokens"] = found
    lines = [[f"{each['weights']}, {each['batch']} at once", f"{each['tokens_per_s']:.1f}"] for each in found]
    show("the engine", ("", "tokens/s"), lines)


async def _serve(session: Session, root: Path, name: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    output = 3 if session.is_dry else OUTPUT
    async with NvmeStore(root) as store:
        card = ModelCard.of(Model("m"), await store.manifest(ModelId("m")))
        device = str(session.device)
        async with TorchEngine("e0", device=device, kv_tokens=32 * 256, prefix_reuse=False) as engine:
            await engine.load(card, store)
            for batch in (1, 2) if session.is_dry else BATCHES:
                if session.left_s < 30 and not session.is_dry:
                    session.report.setdefault("left_out", []).append(f"tokens of {name}, {batch} at once")
                    continue
                await _generate(engine, batch, output=2)  # kernels are built
                began_s = time.perf_counter()
                await _generate(engine, batch, output)
                took_s = time.perf_counter() - began_s
                found.append({"weights": name, "batch": batch, "tokens_per_s": batch * output / took_s})
            weight_bytes = engine.status().weight_bytes
    return [{**each, "weight_bytes": weight_bytes} for each in found]


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
