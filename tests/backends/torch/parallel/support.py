"""Helpers: models sharded for ranks, and engines with several ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any

from hotswap import Fleet, Model, ModelId, Request, RequestId, Sampling
from hotswap.abc import Engine, Manifest, ModelCard, WeightStore
from hotswap.backends.stores.convert import convert
from hotswap.backends.torch import TorchEngine
from hotswap.backends.torch.parallel.loader import RankedLoader
from hotswap.policies import LeastLoadedRouter, RestoreMinReplicas
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


class Clients:
    """Streams of the model "m" from a fleet, beside each other.

    Attributes:
        received: The tokens of each so far.
        hops: On how many instances each was.
    """

    def __init__(self, engines: Sequence[Engine], store: WeightStore, prompts: list[list[int]]) -> None:
        self.received: list[list[int]] = [[] for _ in prompts]
        self.hops = [0] * len(prompts)
        self.fleet = Fleet(
            engines=engines,
            store=store,
            models=[Model("m", min_replicas=len(engines))],
            router=LeastLoadedRouter(),
            scheduler=RestoreMinReplicas(),
            interval_s=0.05,
        )
        self._prompts = prompts

    @property
    def num_received(self) -> int:
        return sum(map(len, self.received))

    async def read(self, at: int, num_tokens: int, came: Callable[[], None] = lambda: None) -> None:
        """Read one of them; `came` is called after each token."""
        prompt = tuple(self._prompts[at])
        async with self.fleet.stream("m", prompt, Sampling(max_tokens=num_tokens)) as tokens:
            async for token in tokens:
                self.received[at].append(token.id)
                came()
            self.hops[at] = tokens.num_hops


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
