"""Requests that move while they run give their clients what an undisturbed run gives, every token once."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from hotswap import Fleet, InstanceState, Model, Request, RequestId, Sampling
from hotswap.action import MigrationWay
from hotswap.backends.torch import SkeletonCache, TorchEngine
from hotswap.policies import LeastLoadedRouter
from tests.backends.torch.dict_store import DictStore
from tests.backends.torch.zoo import make_model
from tests.runtime.support import Idle, until

KINDS = ("llama", "gemma2")
GREEDY = Sampling(max_tokens=60, ignore_eos=True)
SAMPLED = Sampling(
    max_tokens=60, ignore_eos=True, temperature=0.9, top_k=40, top_p=0.9, repetition_penalty=1.2
)


@pytest.fixture(scope="module")
def store() -> DictStore:
    store = DictStore()
    for kind in KINDS:
        store.add(kind, make_model(kind))
    return store


@pytest.fixture(scope="module")
def skeletons() -> SkeletonCache:
    return SkeletonCache()


def make_engine(name: str, skeletons: SkeletonCache, **options: Any) -> TorchEngine:
    given = {"kv_tokens": 2048, "memory_bytes": "64 MiB", "threads": 1, "max_requests": 8, **options}
    return TorchEngine(name, skeletons=skeletons, **given)


@asynccontextmanager
async def two_replicas(store: DictStore, skeletons: SkeletonCache, kind: str) -> AsyncGenerator[Fleet]:
    engines = [make_engine(name, skeletons) for name in ("e0", "e1")]
    fleet = Fleet(
        engines=engines,
        store=store,
        models=[Model(kind)],
        router=LeastLoadedRouter(),
        scheduler=Idle(),
    )
    async with fleet:
        for engine in engines:
            await fleet.swap(engine.id, to=kind)
        yield fleet


async def undisturbed(
    store: DictStore, skeletons: SkeletonCache, kind: str, prompt: tuple[int, ...], sampling: Sampling
) -> list[int]:
    async with make_engine("oracle", skeletons) as engine:
        await engine.load(store.card(kind), store)
        request = Request(id=RequestId("r"), model=store.card(kind).id, prompt=prompt, sampling=sampling)
        async with engine.stream(request) as tokens:
            return [token.id for token in await tokens.collect()]


@pytest.mark.parametrize("way", ["kv", "tokens"])
@pytest.mark.parametrize("kind", KINDS)
async def test_a_moved_stream_is_that_of_an_undisturbed_run(
    store: DictStore, skeletons: SkeletonCache, kind: str, way: MigrationWay
) -> None:
    random = Random(f"{kind}{way}")
    async with two_replicas(store, skeletons, kind) as fleet:
        for number in range(6):
            prompt = tuple(random.randrange(2, 500) for _ in range(random.choice([3, 31, 32, 100])))
            sampling = replace(random.choice([GREEDY, SAMPLED]), seed=number)
            moments = sorted(random.sample(range(1, 50), 3))
            read: list[int] = []
            async with fleet.stream(kind, prompt, sampling) as stream:
                async for token in stream:
                    read.append(token.id)
                    if moments and len(read) == moments[0]:
                        moments.pop(0)
                        at = stream.hops[-1].instance
                        record = await fleet.migrate(
                            stream.request.id, to="e1" if at == "e0" else "e0", way=way
                        )
                        assert record.outcome in ("done", "finished"), record
                        assert record.way == way
            assert read == await undisturbed(store, skeletons, kind, prompt, sampling)
        assert sum(record.outcome == "done" for record in fleet.migrations) >= 6
        for instance in fleet.view().instances:
            assert instance.num_requests == 0
            assert instance.state is InstanceState.SERVING
        await until(lambda: all(i.num_free_kv_blocks == i.num_kv_blocks for i in fleet.view().instances))
