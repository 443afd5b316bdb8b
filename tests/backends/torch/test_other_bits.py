"""Engines whose products have other bits exchange no KV blocks: a request that moves keeps its tokens.

As on a CPU with AVX-512 and without bf16 instructions, where the limit of packed weights decides whether bf16
layers are computed in fp32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from hotswap import Fleet, Model, ModelId, Sampling
from hotswap.abc import KVPrefix
from hotswap.backends.torch import SkeletonCache, TorchEngine, linear
from hotswap.policies import LeastLoadedRouter
from tests.backends.torch.dict_store import DictStore
from tests.backends.torch.test_engine import ask, collect
from tests.backends.torch.zoo import make_model
from tests.runtime.support import Idle

LLAMA = ModelId("llama")


@pytest.fixture(autouse=True)
def without_bf16_instructions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "_widens", lambda: True)


@pytest.fixture(scope="module")
def store() -> DictStore:
    store = DictStore()
    store.add(LLAMA, make_model("llama", dtype=torch.bfloat16))
    return store


@pytest.fixture(scope="module")
def skeletons() -> SkeletonCache:
    return SkeletonCache()


def make_engine(name: str, packed_bytes: str, skeletons: SkeletonCache) -> TorchEngine:
    return TorchEngine(
        name,
        kv_tokens=2048,
        memory_bytes="64 MiB",
        threads=1,
        packed_bytes=packed_bytes,
        skeletons=skeletons,
    )


PROMPTS = [[(97 * at + 31 * number) % 498 + 2 for at in range(70 + number)] for number in range(6)]
LONG: dict[str, Any] = {"max_tokens": 40, "ignore_eos": True}


async def undisturbed(store: DictStore, skeletons: SkeletonCache, limit: str) -> list[list[int]]:
    async with make_engine("oracle", limit, skeletons) as engine:
        await engine.load(store.card(LLAMA), store)
        tokens = [await collect(engine, ask(prompt, model=LLAMA, **LONG)) for prompt in PROMPTS]
    return [[token.id for token in some] for some in tokens]


@pytest.mark.parametrize(
    ("limits", "outcome"), [(("16 MiB", "16 MiB"), "done"), (("16 MiB", "0"), "aborted")], ids=str
)
async def test_a_request_that_moves_with_its_blocks_keeps_its_tokens(
    store: DictStore, skeletons: SkeletonCache, limits: Sequence[str], outcome: str
) -> None:
    expected = {f"e{at}": await undisturbed(store, skeletons, limit) for at, limit in enumerate(limits)}
    engines = [make_engine(name, limit, skeletons) for name, limit in zip(expected, limits, strict=True)]
    outcomes: list[str] = []
    async with Fleet(
        engines=engines, store=store, models=[Model(LLAMA)], router=LeastLoadedRouter(), scheduler=Idle()
    ) as fleet:
        for name in expected:
            await fleet.swap(name, to=LLAMA)
        for number, prompt in enumerate(PROMPTS):
            read: list[int] = []
            async with fleet.stream(LLAMA, prompt, Sampling(**LONG)) as stream:
                async for token in stream:
                    read.append(token.id)
                    if len(read) == 5:
                        source = str(stream.hops[-1].instance)
                        (other,) = expected.keys() - {source}
                        record = await fleet.migrate(stream.request.id, to=other, method="kv")
                        outcomes.append(record.outcome)
            assert read == expected[source][number]
    assert set(outcomes) <= {outcome, "finished"}
    assert outcome in outcomes


async def test_a_kv_store_keeps_the_blocks_of_such_engines_apart(
    store: DictStore, skeletons: SkeletonCache
) -> None:
    request = ask(list(range(2, 90)), model=LLAMA, **LONG)
    keys: list[bytes] = []
    for limit in ("16 MiB", "0", "16 MiB"):
        async with make_engine("e", limit, skeletons) as engine:
            await engine.load(store.card(LLAMA), store)
            async with engine.import_kv(request) as sink:
                keys.append(KVPrefix(sink.layout, request.tokens).key(0))
    assert keys[0] == keys[2] != keys[1]
