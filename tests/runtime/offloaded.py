"""Clients of a real model whose requests are disturbed, and what they are to get."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from random import Random

import anyio

from hotswap import (
    Adapter,
    AdapterId,
    Fleet,
    FleetStream,
    InstanceState,
    Model,
    ModelId,
    Request,
    RequestId,
    Sampling,
)
from hotswap.abc import Engine, KVStore
from hotswap.backends.torch import SkeletonCache, TorchEngine
from hotswap.errors import SwapFailed, SwapRefused
from hotswap.policies import LeastLoadedRouter
from tests.backends.torch.dict_store import DictStore
from tests.backends.torch.zoo import make_model
from tests.runtime.support import Idle

__all__ = [
    "BLOCK_BYTES",
    "PROMPTS",
    "Client",
    "all_released",
    "disturb",
    "ensure",
    "make_engine",
    "make_fleet",
    "make_store",
    "prompt",
    "settle",
    "undisturbed",
]

BLOCK_BYTES = 32 * 3 * 2 * 2 * 16 * 4
GREEDY = Sampling(max_tokens=240, ignore_eos=True)
SAMPLED = Sampling(max_tokens=240, ignore_eos=True, temperature=1.0, seed=3)
SKELETONS = SkeletonCache()
UNDISTURBED: list[list[int]] = []
"""The tokens of all prompts without adapters, once a test has asked for them."""


def make_store() -> DictStore:
    store = DictStore()
    for seed, (name, kind) in enumerate({"a": "llama", "b": "qwen3"}.items()):
        store.add(name, make_model(kind, seed=seed))
    return store


def prompt(seed: int, count: int) -> tuple[int, ...]:
    random = Random(seed)
    return tuple(random.randrange(2, 500) for _ in range(count))


SHARED = prompt(99, 70)
PROMPTS = [prompt(number, 40 + 50 * number) for number in range(4)] + [
    SHARED + prompt(50 + n, 9) for n in (0, 1)
]


def make_engine(name: str, kv_tokens: int = 4096) -> TorchEngine:
    return TorchEngine(
        name,
        kv_tokens=kv_tokens,
        memory_bytes="64 MiB",
        threads=1,
        max_requests=8,
        token_budget=64,
        packed_bytes=0,
        skeletons=SKELETONS,
    )


def make_fleet(
    store: DictStore,
    kv_store: KVStore | None,
    engines: Sequence[Engine] = (),
    adapters: Sequence[Adapter] = (),
    *,
    kv_write_through_s: float | None = None,
) -> Fleet:
    return Fleet(
        engines=engines or [make_engine("e0")],
        store=store,
        models=[Model("a"), Model("b")],
        adapters=adapters,
        router=LeastLoadedRouter(),
        scheduler=Idle(),
        kv_store=kv_store,
        kv_write_through_s=kv_write_through_s,
    )


class Client:
    def __init__(self, number: int, adapter: str | None = None, *, seed: int | None = None) -> None:
        self.prompt, self.sampling = PROMPTS[number], SAMPLED if number % 2 else GREEDY
        if seed is not None:
            self.sampling = replace(SAMPLED, seed=seed)
        self.adapter, self.tokens = adapter, list[int]()
        self.stream: FleetStream | None = None

    async def run(self, fleet: Fleet) -> None:
        async with fleet.stream("a", self.prompt, self.sampling, adapter=self.adapter) as self.stream:
            async for token in self.stream:
                self.tokens.append(token.id)

    async def has(self, count: int) -> None:
        while len(self.tokens) < count:  # noqa: ASYNC110 - clients must not depend on the test
            await anyio.sleep(0.001)

    @property
    def num_restored(self) -> int:
        assert self.stream is not None
        return sum(hop.restored_tokens for hop in self.stream.hops)


async def undisturbed(store: DictStore, adapters: Sequence[Adapter] = ()) -> list[list[int]]:
    if adapters:
        return await computed(store, adapters)
    UNDISTURBED[:] = UNDISTURBED or await computed(store)
    return UNDISTURBED


async def computed(store: DictStore, adapters: Sequence[Adapter] = ()) -> list[list[int]]:
    async with make_engine("oracle") as engine:
        await engine.load(store.card("a"), store)
        for adapter in adapters:
            await engine.load_adapter(adapter)
        whole: list[list[int]] = []
        for number in range(len(PROMPTS)):
            client = Client(number)
            versions: list[AdapterId | None] = [adapter.version for adapter in adapters]
            for version in versions or [None]:
                request = Request(
                    id=RequestId(f"{number} {version}"),
                    model=ModelId("a"),
                    prompt=client.prompt,
                    sampling=client.sampling,
                    adapter=version,
                )
                async with engine.stream(request) as tokens:
                    whole.append([token.id async for token in tokens])
        return whole


def all_released(fleet: Fleet, engines: Sequence[TorchEngine]) -> None:
    view = fleet.view().kv_store
    assert view is not None
    assert view.num_leases == 0
    for engine in engines:
        status = engine.status()
        assert status.num_running == status.num_waiting == 0
        assert status.num_free_kv_blocks == status.num_kv_blocks


async def settle(engines: Sequence[TorchEngine]) -> None:
    """Let blocks that restores held be released."""
    with anyio.fail_after(30):
        while any(e.status().num_free_kv_blocks < e.status().num_kv_blocks for e in engines):  # noqa: ASYNC110
            await anyio.sleep(0.001)


async def disturb(
    fleet: Fleet, engine: TorchEngine, random: Random, clients: Sequence[Client], seen: Counter[str]
) -> None:
    """Swap an engine again and again, sometimes cancelled, and lose it now and then."""
    for _ in range(24):
        goal = sum(len(client.tokens) for client in clients) + random.randrange(5, 40)
        with anyio.move_on_after(0.3):
            while sum(len(client.tokens) for client in clients) < goal:  # noqa: ASYNC110
                await anyio.sleep(0.001)
        if random.random() < 0.1 and engine.status().state is not InstanceState.LOST:
            engine.lose("chaos")
            continue
        with anyio.move_on_after(random.choice([0.01, 0.05, 30, 30])):
            try:
                target = "b" if engine.status().model == "a" else "a"
                await fleet.swap(engine.id, to=target, deadline_s=random.choice([0, 0.02]))
                seen["swaps"] += 1
            except (SwapRefused, SwapFailed):
                continue


async def ensure(fleet: Fleet, engine: TorchEngine) -> None:
    """Have an engine serve the model of all clients."""
    while engine.status().model != "a" or engine.status().state is not InstanceState.SERVING:
        try:
            await fleet.swap(engine.id, to="a")
        except (SwapRefused, SwapFailed):
            await anyio.sleep(0.05)
