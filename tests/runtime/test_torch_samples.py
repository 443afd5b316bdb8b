"""Samples on real models: one prefill, the tokens of separate requests, and no change by an eviction."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hotswap import Fleet, Model, Sampling
from hotswap.backends.torch import SkeletonCache, TorchEngine
from hotswap.policies import LeastLoadedRouter
from tests.backends.torch.dict_store import DictStore
from tests.backends.torch.zoo import make_model
from tests.runtime.support import Idle

BLOCK = 16
PROMPT = [2 + 7 * n % 500 for n in range(200)]
EIGHT = Sampling(n=8, temperature=0.9, max_tokens=24, ignore_eos=True, seed=11)


@pytest.fixture(scope="module")
def store() -> DictStore:
    store = DictStore()
    for seed, (name, kind) in enumerate({"a": "llama"}.items()):
        store.add(name, make_model(kind, seed=seed))
    return store


def fleet_of(store: DictStore, count: int) -> Fleet:
    skeletons = SkeletonCache()
    return Fleet(
        engines=[
            TorchEngine(f"e{n}", kv_tokens=2048, kv_block_tokens=BLOCK, threads=1, skeletons=skeletons)
            for n in range(count)
        ],
        store=store,
        models=[Model("a")],
        router=LeastLoadedRouter(),
        scheduler=Idle(),
    )


async def alone(fleet: Fleet, seed: int, max_tokens: int = EIGHT.max_tokens) -> list[int]:
    done = await fleet.generate("a", PROMPT, replace(EIGHT, n=1, seed=seed, max_tokens=max_tokens))
    return [token.id for token in done.tokens]


async def test_the_prompt_is_computed_once_and_tokens_are_those_of_separate_requests(
    store: DictStore,
) -> None:
    async with fleet_of(store, 2) as fleet:
        await fleet.swap("e0", to="a")
        await fleet.swap("e1", to="a")
        done = await fleet.generate("a", PROMPT, EIGHT)
        computed = [sample.usage.prompt_tokens - sample.usage.reused_tokens for sample in done.samples]
        assert max(computed) == len(PROMPT)
        assert sorted(computed)[-2] <= BLOCK
        texts = [[token.id for token in sample.tokens] for sample in done.samples]
        assert len(set(map(tuple, texts))) == 8
        assert texts == [await alone(fleet, 11 + number) for number in range(8)]


async def test_an_eviction_in_the_middle_changes_no_sample(store: DictStore) -> None:
    async with fleet_of(store, 2) as fleet:
        await fleet.swap("e0", to="a")
        await fleet.swap("e1", to="a")
        async with fleet.samples("a", PROMPT, replace(EIGHT, max_tokens=120)) as streams:
            first = [await anext(stream) for stream in streams]
            await fleet.unload(streams[0].hops[0].instance)
            rest = [await stream.collect() for stream in streams]
            hops = [stream.num_hops for stream in streams]
        texts = [[token.id for token in (begin, *more)] for begin, more in zip(first, rest, strict=True)]
        assert texts == [await alone(fleet, 11 + number, 120) for number in range(8)]
        assert max(hops) == 2, "it must meet samples that run"
