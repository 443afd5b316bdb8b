"""This engine as a contestant of `engine`: a batch of requests, and a mixed load with long prompts."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anyio
import torch

from benchmarks.prompts import prompts
from hotswap import Model, ModelId, Request, RequestId, Sampling
from hotswap.abc import Engine, ModelCard
from hotswap.backends.stores import NvmeStore, PinnedStore, TieredStore
from hotswap.backends.torch import TorchEngine
from hotswap.backends.torch import settings as settings_module
from hotswap.backends.torch.batcher import Batcher

__all__ = ["generate", "serve"]

MODEL = ModelId("m")
_KV_TOKENS = 64 * 512


class PrefillFirst(Batcher):
    """What SplitFuse is compared with: prompts go first and whole, and decodes wait for them."""

    def _decodes(self) -> Any:
        prefills = any(sequence.num_pending > 1 for sequence in self.running) or bool(self.waiting)
        return [] if prefills else super()._decodes()


@contextmanager
def _batcher(kind: type[Batcher]) -> Any:
    """Let engines that load a model form batches in another way."""
    module: Any = settings_module
    original, module.Batcher = module.Batcher, kind
    try:
        yield
    finally:
        module.Batcher = original


async def serve(settings: dict[str, Any], answer: Callable[..., Awaitable[None]]) -> None:
    """Load the model of the settings and answer runs until there are no more."""
    disk = NvmeStore(Path(settings["store"]))
    size_bytes = (await disk.manifest(MODEL)).buffer_bytes
    dtype = getattr(torch, settings["dtype"])
    stored = torch.bfloat16

    def engine(**options: Any) -> TorchEngine:
        return TorchEngine(
            "e0",
            threads=settings["threads"],
            dtype=None if dtype is stored else dtype,
            kv_tokens=_KV_TOKENS,
            packed_bytes=4 * size_bytes,
            prefix_reuse=False,  # prompts repeat, and vLLM does without it too
            **options,
        )

    async with TieredStore(PinnedStore(2 * size_bytes), disk) as store:
        card = ModelCard.of(Model(MODEL), await store.manifest(MODEL))

        async def mixed(asked: dict[str, Any]) -> dict[str, Any]:
            split = asked["policy"] == "splitfuse"
            budget = asked["budget"] if split else _KV_TOKENS
            async with engine(token_budget=budget) as other:
                with _batcher(Batcher if split else PrefillFirst):
                    await other.load(card, store)
                await _packed(other)
                return await _mixed(other, asked)

        async with engine(token_budget=512) as main:
            await main.load(card, store)
            await _packed(main)
            await answer(lambda batch, num_tokens: generate(main, batch, num_tokens), mixed)


async def generate(engine: Engine, batch: Sequence[Sequence[int]], num_tokens: int) -> list[list[int]]:
    """What the engine generates for the prompts, all asked at once."""
    out: list[list[int]] = [[] for _ in batch]

    async def one(index: int) -> None:
        async with engine.stream(_request(index, batch[index], num_tokens)) as tokens:
            out[index] = [token.id async for token in tokens]

    async with anyio.create_task_group() as tasks:
        for index in range(len(batch)):
            tasks.start_soon(one, index)
    return out


async def _packed(engine: TorchEngine) -> None:
    """Wait until the worker has packed all weights: the steady state is measured."""
    unchanged, before = 0, -1
    while unchanged < 4:
        unchanged = unchanged + 1 if engine.packed_bytes == before else 0
        before = engine.packed_bytes
        await anyio.sleep(0.25)


async def _mixed(engine: Engine, asked: dict[str, Any]) -> dict[str, Any]:
    """Gaps between the tokens of running streams while long prompts arrive, one after the other."""
    gaps: list[tuple[float, float]] = []

    async def stream(index: int, prompt: Sequence[int], began: anyio.Event) -> None:
        async with engine.stream(_request(index, prompt, asked["output"])) as tokens:
            last: tuple[float, float] | None = None
            async for _ in tokens:
                now = time.perf_counter(), time.process_time()
                if last is not None:
                    gaps.append((now[0] - last[0], now[1] - last[1]))
                last = now
                began.set()

    async with anyio.create_task_group() as tasks:
        for index, prompt in enumerate(prompts(asked["streams"], asked["prompt"])):
            began = anyio.Event()
            tasks.start_soon(stream, index, prompt, began)
            await began.wait()
        for index, prompt in enumerate(prompts(asked["long_prompts"], asked["long_prompt"])):
            async with engine.stream(_request(1000 + index, prompt, 2)) as tokens:
                await tokens.collect()
        tasks.cancel_scope.cancel()
    return {"itl_p99_s": _p99([wall for wall, _ in gaps]), "itl_p99_cpu_s": _p99([cpu for _, cpu in gaps])}


def _p99(figures: Sequence[float]) -> float:
    return sorted(figures)[min(len(figures) - 1, int(0.99 * len(figures)))]


def _request(index: int, prompt: Sequence[int], num_tokens: int) -> Request:
    sampling = Sampling(max_tokens=num_tokens, ignore_eos=True)
    return Request(id=RequestId(f"r{index}"), model=MODEL, prompt=tuple(prompt), sampling=sampling)
