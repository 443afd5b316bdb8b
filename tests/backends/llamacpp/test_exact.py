"""Requests that move between llama.cpp engines have the tokens of an undisturbed run."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import anyio
import pytest

from hotswap import Request, Token
from hotswap.backends.llamacpp import LlamaCppEngine
from tests.backends.evictions import rounds
from tests.backends.llamacpp.asking import answer, ask
from tests.backends.llamacpp.gguf_files import GgufStore, write_gguf

NUM_TOKENS, NUM_TOGETHER, NUM_EVICTIONS = 40, 5, 200


def make_engine(name: str) -> LlamaCppEngine:
    return LlamaCppEngine(name, kv_tokens=256 * NUM_TOGETHER, max_requests=NUM_TOGETHER, threads=1)


def requests(random: Random) -> list[Request]:
    """Greedy ones and seeded ones, with penalties, all of different lengths."""
    rules: tuple[dict[str, Any], ...] = (
        {},
        {"temperature": 1.0},
        {"frequency_penalty": 1.0},
        {"temperature": 0.7, "top_p": 0.9},
        {},
    )
    return [
        ask(
            [random.randrange(128) for _ in range(3 + 20 * at)],
            id=f"r{at}",
            max_tokens=NUM_TOKENS,
            seed=at if "temperature" in rules[at] else None,
            **rules[at],
        )
        for at in range(NUM_TOGETHER)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["Q4_K", "F16"])
async def test_two_hundred_evictions_at_random_tokens_change_nothing(tmp_path: Path, kind: str) -> None:
    store = GgufStore({"a": write_gguf(tmp_path / "a.gguf", seed=1, kind=kind)})
    card, asked = await store.card("a"), requests(Random(1))
    num_evictions = NUM_EVICTIONS if kind == "Q4_K" else NUM_EVICTIONS // 4
    async with make_engine("e0") as one, make_engine("e1") as other:
        await one.load(card, store)
        expected = {request.id: await answer(one, request) for request in asked}
        await one.unload()
        async for clients in rounds(
            [one, other], card, store, asked, num_evictions=num_evictions, random=Random(3)
        ):
            for client in clients:
                assert client.tokens == expected[client.request.id], client.request
    assert store.num_lent == 0


async def test_tokens_are_the_same_beside_any_others(tmp_path: Path) -> None:
    store = GgufStore({"a": write_gguf(tmp_path / "a.gguf", seed=1, kind="F32")})
    card = await store.card("a")
    several = [
        ask([7 + at, *(3 + n % 100 for n in range(30 * at))], id=f"r{at}", max_tokens=12 + at, logprobs=3)
        for at in range(NUM_TOGETHER + 2)
    ]
    async with make_engine("e0") as engine:
        await engine.load(card, store)
        alone = [await answer(engine, request) for request in several]
        together: dict[int, list[Token]] = {}

        async def read(at: int) -> None:
            together[at] = await answer(engine, several[at])

        async with anyio.create_task_group() as tasks:
            for at in range(len(several)):
                tasks.start_soon(read, at)
    # To the last bit of their log-probabilities.
    assert [together[at] for at in range(len(several))] == alone
