"""Helpers: models sharded for ranks, and engines with several ranks."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

from hotswap import Model, ModelId, Request, RequestId, Sampling
from hotswap.abc import Manifest, ModelCard, WeightStore
from hotswap.backends.stores.convert import convert
from hotswap.backends.torch import TorchEngine
from hotswap.backends.torch.parallel.loader import RankedLoader
from tests.backends.torch.zoo import VOCABULARY
from tests.patience import PATIENCE_S


def add(root: Path, name: str, model: Any, *, tp: int = 1, **options: Any) -> Manifest:
    """Add a model to the store at `root`, sharded for `tp` ranks."""
    source = root.parent / f"{name}-source"
    model.save_pretrained(source)
    return convert(source, root, model_id=name, world_size=tp, **options)


def make_engine(name: str = "e0", **options: Any) -> TorchEngine:
    given: dict[str, Any] = {
        "threads": 1,
        "kv_tokens": 1024,
        "kv_block_tokens": 16,
        "token_budget": 48,
        "max_requests": 8,
        "memory_bytes": "256 MiB",
        "rank_timeout_s": PATIENCE_S,
    }
    return TorchEngine(name, **(given | options))


def loader_of(engine: TorchEngine) -> RankedLoader:
    assert isinstance(engine._loader, RankedLoader)
    return engine._loader


async def card_of(store: WeightStore, name: str) -> ModelCard:
    return ModelCard.of(Model(name), await store.manifest(ModelId(name)))


def make_prompts(seed: int, *lengths: int) -> list[list[int]]:
    random = Random(seed)
    return [[random.randrange(2, VOCABULARY) for _ in range(length)] for length in lengths]


def ask(model: str, prompt: list[int], max_tokens: int) -> Request:
    sampling = Sampling(max_tokens=max_tokens)
    return Request(id=RequestId("r"), model=ModelId(model), prompt=tuple(prompt), sampling=sampling)


async def tokens_of(engine: TorchEngine, request: Request) -> list[int]:
    async with engine.stream(request) as tokens:
        return [token.id async for token in tokens]
