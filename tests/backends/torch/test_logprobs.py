"""Log-probabilities equal transformers' own for every architecture, of what is generated and of prompts."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from random import Random

import anyio
import anyio.lowlevel
import pytest

from hotswap import (
    Fleet,
    FleetStream,
    MigrationMethod,
    Model,
    ModelId,
    PromptLogprobs,
    Request,
    RequestId,
    Sampling,
    Token,
)
from hotswap.backends.torch import SkeletonCache, TorchEngine, attention
from hotswap.backends.torch.forward import MAX_SCORED_ROWS
from hotswap.backends.torch.kv import KVCache
from hotswap.policies import LeastLoadedRouter
from tests.backends.torch.clients import MAX_RUNS
from tests.backends.torch.dict_store import DictStore
from tests.backends.torch.logprobs import LOGPROBS, check, check_engine
from tests.backends.torch.zoo import CONFIGS, VOCABULARY, make_model
from tests.runtime.support import Idle

LENGTHS = [1, 2, 17, 40, 2 * MAX_SCORED_ROWS + 2]
COUNT = 40
ASKED = replace(LOGPROBS, max_tokens=COUNT)


def make_prompts(random: Random) -> list[list[int]]:
    return [[random.randrange(2, VOCABULARY) for _ in range(length)] for length in LENGTHS]


async def compare(architecture: str) -> None:
    random, model, store = Random(2), make_model(architecture), DictStore()
    card, prompts = store.add(architecture, model), make_prompts(Random(3))
    # Few blocks, so that requests are preempted; the same prompts twice, whose blocks are cached then.
    async with TorchEngine(
        "e0", kv_tokens=208, kv_block_tokens=16, token_budget=48, max_requests=8, threads=1
    ) as engine:
        await engine.load(card, store)

        async def ask(number: int) -> None:
            prompt = prompts[number % len(prompts)]
            await check_engine(engine, model, architecture, prompt, ASKED)

        numbers = list(range(2 * len(prompts)))
        random.shuffle(numbers)
        # Which requests run at the same time depends on the machine.
        for _ in range(MAX_RUNS):
            async with anyio.create_task_group() as tasks:
                for number in numbers:
                    tasks.start_soon(ask, number)
            if engine.num_preempted:
                break
        assert engine.num_preempted > 0, "too many blocks: the test must preempt"


@pytest.mark.parametrize("architecture", CONFIGS)
async def test_logprobs_equal_those_of_transformers(architecture: str) -> None:
    await compare(architecture)


# As in test_exact: with a window, a cap, sinks, and values of another width than keys.
@pytest.mark.parametrize("architecture", ["llama", "mistral", "gemma2", "gpt_oss", "deepseek_v3"])
async def test_logprobs_equal_those_of_transformers_on_devices_that_gather_blocks(
    architecture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(KVCache, "in_place", False)
    monkeypatch.setattr(attention, "attend", None)
    await compare(architecture)


# ---------------------------------------------------------------------- several engines

Told = tuple[Sequence[PromptLogprobs], tuple[Token, ...]]

LONG = [2 + 11 * at % 500 for at in range(6 * MAX_SCORED_ROWS)]


def fleet_of(store: DictStore) -> tuple[Fleet, list[TorchEngine]]:
    skeletons = SkeletonCache()
    engines = [TorchEngine(f"e{n}", kv_tokens=2048, threads=1, skeletons=skeletons) for n in range(2)]
    fleet = Fleet(
        engines=engines,
        store=store,
        models=[Model("a")],
        router=LeastLoadedRouter(),
        scheduler=Idle(),
    )
    return fleet, engines


def told_of(tokens: Sequence[Token]) -> list[tuple[object, ...]]:
    return [(token.id, token.logprob, token.top_logprobs) for token in tokens]


async def ask_fleet(fleet: Fleet) -> Told:
    done = await fleet.generate("a", LONG, ASKED)
    return done.prompt_logprobs, done.tokens


async def has_begun(stream: FleetStream) -> None:
    while not stream.num_hops:
        await anyio.lowlevel.checkpoint()


@pytest.fixture(scope="module")
def store() -> DictStore:
    made = DictStore()
    made.add("a", make_model("llama"))
    return made


@pytest.fixture(scope="module")
def undisturbed(store: DictStore) -> Told:
    """What a request is told that nothing disturbs, which is right."""

    async def ask() -> Told:
        fleet, _ = fleet_of(store)
        async with fleet:
            await fleet.swap("e0", to="a")
            return await ask_fleet(fleet)

    told = anyio.run(ask)
    check(make_model("llama"), LONG, *told)
    return told


@asynccontextmanager
async def two_replicas(store: DictStore) -> AsyncGenerator[tuple[Fleet, list[TorchEngine]]]:
    fleet, engines = fleet_of(store)
    async with fleet:
        await fleet.swap("e0", to="a")
        await fleet.swap("e1", to="a")
        yield fleet, engines


async def test_logprobs_are_the_same_on_both_engines_after_a_swap_in_the_middle(
    store: DictStore, undisturbed: Told
) -> None:
    async with two_replicas(store) as (fleet, _), fleet.stream("a", LONG, ASKED) as stream:
        tokens = [await anext(stream)]
        prompt_logprobs = stream.prompt_logprobs
        await fleet.unload(stream.hops[0].instance)
        tokens += await stream.collect()
        assert stream.num_hops == 2, "it must meet a request that runs"
        assert stream.prompt_logprobs is prompt_logprobs, "they are told once"
        assert prompt_logprobs == undisturbed[0]
        assert told_of(tokens) == told_of(undisturbed[1])


@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize("method", ["kv", "tokens"])
async def test_a_move_changes_nothing_that_is_told(
    store: DictStore, undisturbed: Told, method: MigrationMethod, begun: bool
) -> None:
    """Also in the middle of the prompt, whose blocks are there then, but not their logits."""
    async with two_replicas(store) as (fleet, _):
        async with fleet.stream("a", LONG, ASKED) as stream:
            await has_begun(stream)
            tokens = [await anext(stream)] if begun else []
            to = "e1" if stream.hops[0].instance == "e0" else "e0"
            record = await fleet.migrate(stream.request.id, to=to, method=method)
            tokens += await stream.collect()
        assert record.outcome == "done" or not begun
        assert stream.prompt_logprobs == undisturbed[0]
        assert told_of(tokens) == told_of(undisturbed[1])


async def test_a_request_that_loses_its_engine_in_its_prompt_is_told_by_the_next(
    store: DictStore, undisturbed: Told
) -> None:
    async with two_replicas(store) as (fleet, engines), fleet.stream("a", LONG, ASKED) as stream:
        await has_begun(stream)
        next(engine for engine in engines if engine.id == stream.hops[0].instance).lose()
        done = await stream.complete()
        assert len(done.hops) == 2
        assert done.hops[1].first_index == 0
        assert done.prompt_logprobs == undisturbed[0]
        assert told_of(done.tokens) == told_of(undisturbed[1])


async def test_a_prompt_that_is_cached_is_told_as_if_it_were_not() -> None:
    store = DictStore()
    card = store.add("a", make_model("llama"))
    async with TorchEngine("e0", kv_tokens=2048, threads=1) as engine:
        await engine.load(card, store)
        told: list[Sequence[PromptLogprobs]] = []
        reused: list[int] = []
        for asked in (ASKED, ASKED, Sampling(max_tokens=1)):
            request = Request(id=RequestId("r"), model=ModelId("a"), prompt=tuple(LONG), sampling=asked)
            async with engine.stream(request) as stream:
                await stream.collect()
            told.append(stream.prompt_logprobs)
            reused.append(stream.num_reused_tokens)
        assert told[0] == told[1] != told[2] == ()
        assert reused == [0, 0, len(LONG) - 1]
