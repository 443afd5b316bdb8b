"""On real models too, every client reads an undisturbed run's tokens through a hundred swaps and losses."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from random import Random

import anyio
import pytest

from hotswap import Fleet, InstanceState, Model, ModelId, Request, RequestId, Sampling
from hotswap.backends.torch import SkeletonCache, TorchEngine
from hotswap.errors import SwapFailed, SwapRefused
from hotswap.policies import LeastLoadedRouter, WeightedLoadSwap
from tests.backends.torch.dict_store import DictStore
from tests.backends.torch.zoo import make_model

MODELS = {"a": "llama", "b": "qwen3", "c": "mistral"}
GREEDY = Sampling(max_tokens=40, ignore_eos=True)
SAMPLED = Sampling(
    max_tokens=40, ignore_eos=True, temperature=0.9, top_k=40, top_p=0.9, repetition_penalty=1.2
)


@pytest.fixture(scope="module")
def store() -> DictStore:
    store = DictStore()
    for seed, (name, kind) in enumerate(MODELS.items()):
        store.add(name, make_model(kind, seed=seed))
    return store


def make_engine(name: str, skeletons: SkeletonCache) -> TorchEngine:
    return TorchEngine(
        name, kv_tokens=1024, memory_bytes="64 MiB", threads=1, max_requests=8, skeletons=skeletons
    )


class Client:
    """Reads one stream, whatever happens, to its end or until it leaves; counts in `seen` what it reads."""

    def __init__(self, random: Random, number: int, seen: Counter[str]) -> None:
        self.model = random.choice(tuple(MODELS))
        self.prompt = tuple(random.randrange(2, 500) for _ in range(random.choice([1, 7, 40, 130])))
        self.sampling = replace(random.choice([GREEDY, SAMPLED]), seed=number)
        self.leaves_after = random.randrange(1, 20) if random.random() < 0.1 else None
        self.tokens: list[int] = []
        self.num_hops = 0
        self._seen = seen

    async def run(self, fleet: Fleet, turns: anyio.CapacityLimiter) -> None:
        async with turns, fleet.stream(self.model, self.prompt, self.sampling) as stream:
            async for token in stream:
                self.tokens.append(token.id)
                self._seen["tokens"] += 1
                self.num_hops = stream.num_hops
                if len(self.tokens) == self.leaves_after:
                    return


async def undisturbed(clients: list[Client], store: DictStore, skeletons: SkeletonCache) -> list[list[int]]:
    """What each client would read if it ran alone on one engine without swaps."""
    read: dict[int, list[int]] = {}
    async with make_engine("oracle", skeletons) as engine:
        for model in MODELS:
            await engine.load(store.card(model), store)
            for number, client in enumerate(clients):
                if client.model == model:
                    request = Request(
                        id=RequestId(f"{number}"),
                        model=ModelId(model),
                        prompt=client.prompt,
                        sampling=client.sampling,
                    )
                    async with engine.stream(request) as tokens:
                        read[number] = [token.id async for token in tokens]
            await engine.unload()
    return [read[number] for number in range(len(clients))]


async def disturb(
    fleet: Fleet, engines: list[TorchEngine], random: Random, seen: Counter[str], times: int
) -> None:
    """Swap, cancel swaps half way and lose instances, each after some tokens were read."""
    for _ in range(times):
        goal = seen["tokens"] + random.randrange(5, 60)
        with anyio.move_on_after(0.5):  # nothing may be running just now
            while seen["tokens"] < goal:  # noqa: ASYNC110 - clients must not depend on the test
                await anyio.sleep(0.001)
        engine = random.choice(engines)
        if random.random() < 0.2:
            if engine.status().state is not InstanceState.LOST:
                engine.lose("chaos")
            continue
        with anyio.move_on_after(random.choice([0.005, 0.02, 30])):
            try:
                model, deadline_s = random.choice(tuple(MODELS)), random.choice([0, 0.05])
                await fleet.swap(engine.id, to=model, deadline_s=deadline_s)
            except (SwapRefused, SwapFailed):
                continue


async def test_a_hundred_random_swaps_cancellations_and_losses(store: DictStore) -> None:
    random = Random(7)
    skeletons = SkeletonCache()
    seen: Counter[str] = Counter()
    engines = [make_engine(f"e{n}", skeletons) for n in range(3)]
    clients = [Client(random, number, seen) for number in range(120)]
    fleet = Fleet(
        engines=engines,
        store=store,
        models=[Model(name) for name in MODELS],
        router=LeastLoadedRouter(),
        scheduler=WeightedLoadSwap(t1=2, t2=50, b=1.5, patience_s=0.2, sigmas=0),
        interval_s=0.05,
    )
    async with fleet:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(disturb, fleet, engines, random, seen, 100)
            turns = anyio.CapacityLimiter(16)
            for client in clients:
                tasks.start_soon(client.run, fleet, turns)
        for engine in engines:
            view = engine.status()
            assert view.num_running == view.num_waiting == 0
            assert view.num_free_kv_blocks == view.num_kv_blocks
        assert all(instance.num_requests == 0 for instance in fleet.view().instances)
    assert store.num_lent == 0
    for client, whole in zip(clients, await undisturbed(clients, store, skeletons), strict=True):
        assert client.tokens == whole[: client.leaves_after]
    assert sum(client.num_hops > 1 for client in clients) > 40
    assert sum(record.num_evicted for record in fleet.swaps) > 100
