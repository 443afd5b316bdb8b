"""Serve models on every node of a Ray cluster; engines and their stores come and go with the nodes.

    python -m examples.ray_cluster [ADDRESS]

ADDRESS is that of a cluster whose nodes share the directory of models; else one is started on this machine.
The models are three small ones of random weights. Instead of `per_node`, `per_gpu(..., share=0.5)` makes two
engines for each GPU.
"""

import sys
import tempfile
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import anyio
import ray
import torch
import transformers

from hotswap import Fleet, Model, Sampling
from hotswap.backends.ray import RayEngines
from hotswap.backends.stores import NvmeStore, PinnedStore, TieredStore
from hotswap.backends.torch import TorchEngine

NAMES = ("ada", "bea", "cleo")


async def convert_models(root: Path) -> None:
    """Make three models, and convert each to the layout that engines load."""
    config = transformers.LlamaConfig(
        vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=512, eos_token_id=None, dtype="float32",
    )  # fmt: skip
    async with NvmeStore(root / "store") as store:
        for seed, name in enumerate(NAMES):
            torch.manual_seed(seed)
            transformers.AutoModelForCausalLM.from_config(config).save_pretrained(root / name)
            await store.import_model(Model(name, root / name))


def make_store(root: Path) -> TieredStore:
    """Called on each node: its memory before its disk."""
    return TieredStore(PinnedStore("256 MiB"), NvmeStore(root / "store"))


@asynccontextmanager
async def cluster_fleet(root: Path) -> AsyncGenerator[Fleet]:
    make_engine = partial(TorchEngine, device="cpu", threads=1, kv_tokens=1024, memory_bytes="256 MiB")
    engines = RayEngines.per_node(make_engine, partial(make_store, root))
    async with (
        engines,
        Fleet(engines=engines.engines, store=engines.stores(), models=map(Model, NAMES)) as fleet,
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(engines.follow, fleet)  # nodes that come and go
        yield fleet
        tasks.cancel_scope.cancel()


async def main(root: Path) -> dict[str, set[tuple[int, ...]]]:
    """Ask every model the same eight times; return the different answers, one for each model."""
    answers: dict[str, set[tuple[int, ...]]] = {name: set() for name in NAMES}

    async def ask(model: str) -> None:
        answer = await fleet.generate(model, (5, 6, 7), Sampling(max_tokens=24, temperature=0.8, seed=1))
        answers[model].add(tuple(token.id for token in answer.tokens))

    await convert_models(root)
    async with cluster_fleet(root) as fleet:
        async with anyio.create_task_group() as clients:
            for _ in range(8):
                for name in NAMES:
                    clients.start_soon(ask, name)
        for instance in fleet.view().instances:
            print(f"{instance.id} on {instance.node} serves {instance.model or 'nothing'}")
    return answers


if __name__ == "__main__":
    ray.init(address=sys.argv[1] if len(sys.argv) > 1 else None)
    with tempfile.TemporaryDirectory() as made:
        anyio.run(main, Path(made))
