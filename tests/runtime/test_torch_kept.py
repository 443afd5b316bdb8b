"""Requests go back to the engine that still has their KV blocks, and compute fewer tokens again."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from random import Random

import anyio

from hotswap import Fleet, FleetStream, FleetView, InstanceId, Model, Request, Sampling
from hotswap.abc import Router
from hotswap.backends.torch import SkeletonCache, TorchEngine
from hotswap.policies import LeastTimeRouter
from tests.backends.torch.dict_store import DictStore
from tests.backends.torch.zoo import generate, make_model
from tests.runtime.support import Idle

MODELS = {name: make_model("llama", seed=seed) for seed, name in enumerate("ab", start=1)}
SKELETONS = SkeletonCache()
SAMPLING = Sampling(max_tokens=1500, ignore_eos=True)
# Of prompts; the first two run on one engine, the others on another. Dealt out in turn, two change places.
LENGTHS = (90, 130, 110, 70)


def make_store() -> DictStore:
    store = DictStore()
    for name, model in MODELS.items():
        store.add(name, model)
    return store


def make_engine(name: str) -> TorchEngine:
    return TorchEngine(
        name,
        kv_tokens=8192,
        kv_block_tokens=16,
        memory_bytes="64 MiB",
        threads=1,
        packed_bytes=0,
        skeletons=SKELETONS,
    )


def prompt(number: int) -> tuple[int, ...]:
    random = Random(number)
    return tuple(random.randrange(2, 500) for _ in range(LENGTHS[number]))


@dataclass(frozen=True)
class OnceBothAreOpen(Router):
    """Asks `LeastTimeRouter` once both engines serve the model; it may know what these have kept, or not."""

    knows_kept: bool

    def route(self, request: Request, fleet: FleetView) -> InstanceId | None:
        if len(fleet.serving(request.model)) < 2:
            return None
        if not request.generated:
            return InstanceId("e0" if len(request.prompt) in LENGTHS[:2] else "e1")
        if not self.knows_kept:
            fleet = replace(fleet, instances=tuple(replace(i, kept_since_s=None) for i in fleet.instances))
        return LeastTimeRouter().route(request, fleet)


async def away_and_back(*, knows_kept: bool) -> tuple[list[bool], int]:
    """Swap two engines with requests to another model and back; check tokens that come after that.

    Returns which requests went back to where they were, and how many tokens were computed again.
    """
    streams: dict[int, FleetStream] = {}
    tokens: dict[int, list[int]] = {number: [] for number in range(len(LENGTHS))}
    engines = [make_engine("e0"), make_engine("e1")]
    async with Fleet(
        engines=engines,
        store=make_store(),
        models=[Model("a"), Model("b")],
        router=OnceBothAreOpen(knows_kept),
        scheduler=Idle(),
    ) as fleet:

        async def run(number: int) -> None:
            """Read until two tokens have come after the return."""
            async with fleet.stream("a", prompt(number), SAMPLING) as streams[number]:
                async for token in streams[number]:
                    tokens[number].append(token.id)
                    hops = streams[number].hops
                    if len(hops) > 1 and token.index > hops[1].first_index:
                        return

        async def swap_both(name: str) -> None:
            async with anyio.create_task_group() as swaps:
                for engine in engines:
                    swaps.start_soon(partial(fleet.swap, engine.id, to=name))

        async with anyio.create_task_group() as clients:
            await swap_both("a")
            for number in tokens:
                clients.start_soon(run, number)
            while not all(tokens.values()):  # noqa: ASYNC110 - clients must not depend on the test
                await anyio.sleep(0.001)
            await swap_both("b")
            await swap_both("a")
        hops = [streams[number].hops for number in range(len(LENGTHS))]
        for number, got in tokens.items():
            assert got == generate(MODELS["a"], list(prompt(number)), len(got))
        num_tokens = sum(count + back.first_index for count, (_, back) in zip(LENGTHS, hops, strict=True))
        num_reused = sum(engine.num_reused_tokens for engine in engines)
        return (
            [left.instance == back.instance for left, back in hops],
            num_tokens - num_reused,
        )


async def test_requests_go_back_to_their_blocks_and_compute_fewer_tokens_again() -> None:
    back, num_computed = await away_and_back(knows_kept=True)
    assert all(back)
    assert num_computed == len(LENGTHS), "each computes its last token, for the logits"
    elsewhere, more = await away_and_back(knows_kept=False)
    assert not all(elsewhere)
    assert more > num_computed + 70
