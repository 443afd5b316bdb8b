"""Requests that move between llama.cpp engines have the tokens of an undisturbed run."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import anyio
import pytest

from hotswap import Request, Token
from hotswap.backends.llamacpp import LlamaCppEngine
from hotswap.errors import RequestEvicted
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


class Client:
    """Reads one request, wherever it goes on."""

    def __init__(self, request: Request) -> None:
        self.request, self.tokens, self.num_evictions = request, list[Token](), 0
        self.more = anyio.Event()

    @property
    def is_done(self) -> bool:
        return bool(self.tokens) and self.tokens[-1].finish_reason is not None

    async def read(self, engine: LlamaCppEngine) -> None:
        """Read to the end or to an eviction."""
        try:
            async with engine.stream(self.request.continued([t.id for t in self.tokens])) as tokens:
                async for token in tokens:
                    self.tokens.append(token)
                    self.more.set()
        except RequestEvicted:
            self.num_evictions += 1
        self.more.set()

    async def has(self, num_tokens: int) -> None:
        """Wait for so many tokens, or for the end."""
        while len(self.tokens) < num_tokens and not self.is_done:
            self.more = anyio.Event()
            await self.more.wait()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["Q4_K", "F16"])
async def test_two_hundred_evictions_at_random_tokens_change_nothing(tmp_path: Path, kind: str) -> None:
    store = GgufStore({"a": write_gguf(tmp_path / "a.gguf", seed=1, kind=kind)})
    card, random, num_evictions = await store.card("a"), Random(3), 0
    wanted = NUM_EVICTIONS if kind == "Q4_K" else NUM_EVICTIONS // 4
    async with make_engine("e0") as one, make_engine("e1") as other:
        await one.load(card, store)
        expected = {request.id: await answer(one, request) for request in requests(Random(1))}
        while num_evictions < wanted:
            clients = [Client(request) for request in requests(Random(1))]
            while not all(client.is_done for client in clients):
                await other.load(card, store)
                left = [client for client in clients if not client.is_done]
                first, goal = random.choice(left), random.randrange(1, 4)
                async with anyio.create_task_group() as tasks:
                    for client in left:
                        tasks.start_soon(client.read, one)
                    await first.has(len(first.tokens) + goal)
                    await one.evict(deadline_s=0)
                await one.unload()
                one, other = other, one
            for client in clients:
                assert client.tokens == expected[client.request.id], client.request
            num_evictions += sum(client.num_evictions for client in clients)
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
