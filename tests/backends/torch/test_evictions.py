"""Requests that move between TorchEngines have the tokens of an undisturbed run."""

from __future__ import annotations

from random import Random
from typing import Any

import transformers

from hotswap import ModelId, Request, RequestId, Sampling, Token
from hotswap.abc import Engine
from hotswap.backends.torch import TorchEngine
from tests.backends.evictions import rounds
from tests.backends.torch.dict_store import DictStore
from tests.backends.torch.zoo import COMMON, VOCABULARY, make_model

MODEL, NUM_TOKENS, NUM_EVICTIONS = "m", 40, 200
RULES: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 1.0, "seed": 1},
    {"frequency_penalty": 1.0},
    {"temperature": 0.7, "top_p": 0.9, "seed": 2},
    {"temperature": 1.0, "min_p": 0.05, "repetition_penalty": 1.2, "seed": 3},
)


def requests() -> list[Request]:
    """Greedy ones and seeded ones, with penalties, all of different lengths."""
    random = Random(1)
    return [
        Request(
            id=RequestId(f"r{at}"),
            model=ModelId(MODEL),
            prompt=tuple(random.randrange(2, VOCABULARY) for _ in range(3 + 20 * at)),
            sampling=Sampling(max_tokens=NUM_TOKENS, ignore_eos=True, **rules),
        )
        for at, rules in enumerate(RULES)
    ]


def make_engine(name: str) -> TorchEngine:
    """One that preempts requests and cuts prompts, too."""
    return TorchEngine(
        name, kv_tokens=384, kv_block_tokens=16, token_budget=48, max_requests=len(RULES), threads=1
    )


async def answer(engine: Engine, request: Request) -> list[Token]:
    async with engine.stream(request) as tokens:
        return await tokens.collect()


async def test_two_hundred_evictions_at_random_tokens_change_nothing() -> None:
    store, asked = DictStore(), requests()
    card = store.add(MODEL, make_model(transformers.LlamaConfig(**COMMON), seed=1))
    async with make_engine("e0") as one, make_engine("e1") as other:
        await one.load(card, store)
        expected = {request.id: [token.id for token in await answer(one, request)] for request in asked}
        await one.unload()
        async for clients in rounds(
            [one, other], card, store, asked, num_evictions=NUM_EVICTIONS, random=Random(3)
        ):
            for client in clients:
                assert client.ids == expected[client.request.id], client.request
                assert [token.index for token in client.tokens] == list(range(NUM_TOKENS))
