"""The simulated engine beside its contract: exact times, batching, memory, and no block that is lost."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from typing import Any

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotswap import InstanceState, Model, ModelId, Request, RequestId, Sampling, TierView, Token
from hotswap.abc import Manifest, ModelCard, Shard, WrapperStore
from hotswap.backends.sim import DeviceProfile, SimEngine, SimStore, expected_tokens, sim_manifest
from hotswap.errors import (
    InstanceError,
    InstanceLost,
    OutOfMemory,
    PromptTooLong,
    RequestEvicted,
    ShardCorrupt,
)
from hotswap.offline.virtual_time import run, virtual_time

PROFILE = DeviceProfile(
    memory_bytes=1000, floor_s=1.0, base_s=0.5, token_s=0.1, request_s=0.0, context_token_s=0.0
)
A, B = ModelId("a"), ModelId("b")


def store(**facts: Any) -> SimStore:
    return SimStore([sim_manifest("a", 400, **facts), sim_manifest("b", 500)])


def ask(prompt: int | tuple[int, ...], max_tokens: int, number: int = 0, model: ModelId = A) -> Request:
    tokens = prompt if isinstance(prompt, tuple) else tuple(range(number, number + prompt))
    sampling = Sampling(max_tokens=max_tokens, ignore_eos=True)
    return Request(id=RequestId(f"r{number}"), model=model, prompt=tokens, sampling=sampling)


async def card(of: SimStore, model: ModelId = A) -> ModelCard:
    return ModelCard.of(Model(model), await of.manifest(model))


class Reading:
    """One stream's tokens with the times at which they came."""

    def __init__(self) -> None:
        self.tokens: list[Token] = []
        self.times_s: list[float] = []
        self.error: Exception | None = None

    async def read(self, engine: SimEngine, request: Request, at_s: float = 0.0) -> None:
        await anyio.sleep(at_s)
        try:
            async with engine.stream(request) as tokens:
                async for token in tokens:
                    self.tokens.append(token)
                    self.times_s.append(anyio.current_time())
        except (RequestEvicted, InstanceLost, PromptTooLong) as error:
            self.error = error

    @property
    def ids(self) -> list[int]:
        return [token.id for token in self.tokens]


@virtual_time
async def test_a_step_lasts_what_the_profile_says() -> None:
    weights = store()
    async with SimEngine("e0", PROFILE, token_budget=8) as engine:
        await engine.load(await card(weights), weights)
        began_s, reading = anyio.current_time(), Reading()
        await reading.read(engine, ask(20, 3))
    # Twenty tokens of prefill in chunks of 8, 8 and 4, then steps of one token at the floor.
    prefill_s = 2 * (0.5 + 8 * 0.1) + max(1.0, 0.5 + 4 * 0.1)
    assert [at_s - began_s for at_s in reading.times_s] == pytest.approx(
        [prefill_s, prefill_s + 1, prefill_s + 2]
    )


@virtual_time
async def test_a_load_lasts_as_long_as_reading_and_copying() -> None:
    weights = SimStore({"a": 400}, home=TierView(name="disk", bytes_per_s=100), cache=None, chunk_bytes=150)
    async with SimEngine("e0", replace(PROFILE, load_bytes_per_s=200.0, unload_s=0.5)) as engine:
        await engine.load(await card(weights), weights)
        assert anyio.current_time() == pytest.approx(400 / 100 + 400 / 200)
        await engine.unload()
        assert anyio.current_time() == pytest.approx(6.5)


@virtual_time
async def test_a_long_prefill_does_not_hold_up_decodes() -> None:
    weights = store()
    async with SimEngine("e0", PROFILE, token_budget=4) as engine:
        await engine.load(await card(weights), weights)
        decoding, prefilling = Reading(), Reading()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(decoding.read, engine, ask(2, 30))
            tasks.start_soon(prefilling.read, engine, ask(60, 2, 1), 3.0)
    gaps = [two - one for one, two in pairwise(decoding.times_s)]
    assert max(gaps) <= 1.0 + 1e-9, "each step gives it a token, also while the other prefills"
    assert prefilling.times_s[0] > decoding.times_s[15]


@virtual_time
async def test_under_pressure_the_first_come_finish_first_and_all_finish() -> None:
    weights = store()
    async with SimEngine("e0", PROFILE, kv_blocks=10, kv_block_tokens=4) as engine:
        await engine.load(await card(weights), weights)
        readings = [Reading() for _ in range(5)]
        async with anyio.create_task_group() as tasks:
            for number, reading in enumerate(readings):
                tasks.start_soon(reading.read, engine, ask(4, 20, number))
        model = await card(weights)
    assert [reading.ids for reading in readings] == [
        expected_tokens(ask(4, 20, number), model) for number in range(5)
    ]
    ends_s = [reading.times_s[-1] for reading in readings]
    assert ends_s == sorted(ends_s)
    assert ends_s[-1] > ends_s[0] + 1, "they did not fit side by side"


@virtual_time
async def test_a_request_that_outgrows_the_pool_ends_by_an_error_after_its_tokens() -> None:
    weights = store()
    async with SimEngine("e0", PROFILE, kv_blocks=3, kv_block_tokens=4) as engine:
        await engine.load(await card(weights), weights)
        reading = Reading()
        await reading.read(engine, ask(8, 50))
        assert isinstance(reading.error, PromptTooLong)
        # The last token is generated from the twelfth and needs no place of its own.
        assert reading.ids == expected_tokens(ask(8, 5), await card(weights))
        assert engine.status().num_free_kv_blocks == 3


@virtual_time
async def test_weights_staged_weights_and_kv_pool_share_the_memory() -> None:
    weights = store()
    async with SimEngine("e0", PROFILE, kv_blocks=10, kv_block_tokens=5) as engine:
        a, b = await card(weights), await card(weights, B)
        with pytest.raises(OutOfMemory, match="'a' needs 1050 bytes"):
            await engine.load(replace(a, kv_bytes_per_token=13), weights)
        assert engine.status().state is InstanceState.EMPTY
        await engine.load(replace(a, kv_bytes_per_token=2), weights)
        assert engine.can_preload(b)
        await engine.preload(b, weights)
        assert engine.status().weight_bytes == 900
        await engine.unload()
        assert engine.status().weight_bytes == 500
        await engine.load(a, weights)
        assert engine.status().weight_bytes == 400, "loading another drops what was staged"
        await engine.unload()
        await engine.load(replace(a, kv_bytes_per_token=3), weights)
        assert not engine.can_preload(b)
        with pytest.raises(OutOfMemory, match="'b'"):
            await engine.preload(b, weights)
        assert engine.status().preloaded is None


@virtual_time
async def test_an_engine_lost_for_good_stays_lost() -> None:
    weights = store()
    async with SimEngine("e0", PROFILE) as engine:
        await engine.load(await card(weights), weights)
        engine.lose("its host burnt down", for_good=True)
        with pytest.raises(InstanceLost, match="its host burnt down"):
            await engine.unload()
        assert engine.status().state is InstanceState.LOST


@virtual_time
async def test_an_engine_that_was_not_started_says_so() -> None:
    weights = store()
    with pytest.raises(InstanceError, match="before `async with` has started it"):
        await SimEngine("e0", PROFILE).load(await card(weights), weights)


class Foreign(WrapperStore):
    """Lends the bytes of another model."""

    async def manifest(self, model: ModelId) -> Manifest:
        other = await self.wrapped.manifest(B)
        shards = tuple(replace(shard, model=model) for shard in other.shards)
        return replace(other, model=model, shards=shards)

    def open(self, shard: Shard) -> Any:
        return self.wrapped.open(replace(shard, model=B))


@virtual_time
async def test_foreign_bytes_are_refused() -> None:
    weights = store()
    async with SimEngine("e0", PROFILE) as engine:
        with pytest.raises(ShardCorrupt, match=r"'0\.bin' of 'a' holds foreign bytes at 0"):
            await engine.load(await card(weights), Foreign(weights))


def test_tokens_depend_on_model_prompt_seed_and_position_alone() -> None:
    a = ModelCard(id=A, weight_bytes=1, max_context_tokens=100)
    plain = expected_tokens(ask(3, 10), a)
    assert expected_tokens(ask(3, 20), a)[:10] == plain
    assert expected_tokens(ask(3, 10).continued(plain[:4]), a) == plain[4:]
    others = [
        expected_tokens(ask(3, 10, model=B), replace(a, id=B)),
        expected_tokens(ask(4, 10), a),
        expected_tokens(replace(ask(3, 10), sampling=Sampling(max_tokens=10, temperature=0.5)), a),
        expected_tokens(replace(ask(3, 10), sampling=Sampling(max_tokens=10, temperature=0.5, seed=1)), a),
    ]
    assert len({tuple(plain), *map(tuple, others)}) == 5
    greedy = replace(ask(3, 10), sampling=Sampling(max_tokens=10, seed=9))
    assert expected_tokens(greedy, a) == plain, "greedy requests ignore the seed"


@given(
    requests=st.lists(
        st.tuples(st.integers(1, 30), st.integers(1, 20), st.floats(0, 20)), min_size=1, max_size=8
    ),
    kv_blocks=st.integers(4, 20),
    token_budget=st.integers(1, 16),
    max_requests=st.integers(1, 4),
    evict_s=st.none() | st.floats(0, 30),
)
def test_every_stream_is_whole_or_a_prefix_and_every_block_is_freed(
    requests: list[tuple[int, int, float]],
    kv_blocks: int,
    token_budget: int,
    max_requests: int,
    evict_s: float | None,
) -> None:
    async def scenario() -> None:
        weights = store()
        engine = SimEngine(
            "e0",
            PROFILE,
            kv_blocks=kv_blocks,
            kv_block_tokens=4,
            token_budget=token_budget,
            max_requests=max_requests,
        )
        readings = [Reading() for _ in requests]
        model = await card(weights)
        async with engine:
            await engine.load(model, weights)
            async with anyio.create_task_group() as tasks:
                for number, (prompt, max_tokens, at_s) in enumerate(requests):
                    tasks.start_soon(readings[number].read, engine, ask(prompt, max_tokens, number), at_s)
                if evict_s is not None:
                    await anyio.sleep(evict_s)
                    await engine.evict(deadline_s=1.0)
            assert engine.status().num_free_kv_blocks == kv_blocks
            assert engine.status().num_running == engine.status().num_waiting == 0
        for number, (prompt, max_tokens, _) in enumerate(requests):
            whole = expected_tokens(ask(prompt, max_tokens, number), model)
            reading = readings[number]
            assert reading.ids == (whole if reading.error is None else whole[: len(reading.ids)])
            if isinstance(reading.error, PromptTooLong):
                assert math.ceil((prompt + max_tokens - 1) / 4) > kv_blocks
            else:
                assert reading.error is None or evict_s is not None

    run(scenario)


@virtual_time
async def test_the_status_has_the_blocks_that_the_first_waiting_request_needs() -> None:
    async with store() as of, SimEngine("e0", PROFILE, kv_blocks=10, kv_block_tokens=4) as engine:
        await engine.load(await card(of), of)
        readings = [Reading() for _ in range(3)]
        async with anyio.create_task_group() as tasks:
            for number, (reading, length) in enumerate(zip(readings, (20, 30, 2), strict=True)):
                tasks.start_soon(reading.read, engine, ask(length, 6, number), 0.01 * number)
            await anyio.sleep(4.0)  # in the first one's prefill, or after it
            view = engine.status()
            assert (view.num_running, view.num_waiting) == (1, 2)
            assert view.num_next_kv_blocks == 8  # 30 tokens in blocks of 4; later requests are not counted
        assert engine.status().num_next_kv_blocks == 0


@virtual_time
async def test_the_status_names_preempted_requests() -> None:
    async with store() as of, SimEngine("e0", PROFILE, kv_blocks=5, kv_block_tokens=4) as engine:
        await engine.load(await card(of), of)
        readings = [Reading() for _ in range(2)]
        seen: set[tuple[RequestId, ...]] = set()
        async with anyio.create_task_group() as tasks:
            for number, reading in enumerate(readings):
                tasks.start_soon(reading.read, engine, ask(6, 12, number), 0.01 * number)
            while any(len(reading.ids) < 12 for reading in readings):
                await anyio.sleep(0.1)
                seen.add(engine.status().preempted)
        assert seen == {(), (RequestId("r1"),)}


@virtual_time
async def test_an_engine_that_reports_by_step_is_seen_one_step_late() -> None:
    """Steps last a second from 0.25 on; a request that comes amid one is seen when the next one has ended."""
    of = store()
    engines = [
        SimEngine("e0", PROFILE, token_budget=5),
        SimEngine("e1", PROFILE, token_budget=5, reporting="by_step"),
    ]
    seen: list[list[tuple[int, ...]]] = [[], []]
    async with engines[0], engines[1], anyio.create_task_group() as tasks:
        for engine, views in zip(engines, seen, strict=True):
            await engine.load(await card(of), of)
            began_s = anyio.current_time()
            for number, at_s in enumerate((0.25, 3.5, 4.5)):
                tasks.start_soon(Reading().read, engine, ask(4, 8, number), at_s)
            for second in range(9):
                await anyio.sleep_until(began_s + second + 0.3)
                view = engine.status()
                views.append((view.num_running, view.num_waiting, view.num_free_kv_blocks))
    live, late = seen
    assert len(set(live)) == 3
    assert late[1:] == live[:-1]
    assert late[0][:2] == (0, 0)
    assert [engine.status().num_running for engine in engines] == [0, 0]


FIELDS: dict[str, Any] = {
    "temperature": 0.8,
    "top_k": 5,
    "top_p": 0.9,
    "min_p": 0.1,
    "repetition_penalty": 1.2,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.5,
    "logit_bias": {5: 1.0},
    "suppress_tokens": [5],
    "begin_suppress_tokens": [5],
    "forced_end_tokens": [5],
    "bad_words": ["a"],
    "bad_words_ids": [[5, 6]],
    "min_tokens": 2,
    "seed": 3,
    "stop": ["a"],
    "stop_token_ids": [5],
    "include_stop": True,
    "skip_special_tokens": False,
    "truncate_prompt_tokens": 2,
    "logprobs": 2,
    "prompt_logprobs": 2,
    "logprobs_of": "sampled",
    "json_schema": {"type": "object"},
    "regex": "a+",
    "grammar": 'start: "a"',
}


@pytest.mark.parametrize("name", FIELDS)
def test_every_field_of_sampling_is_taken(name: str) -> None:
    """Those that change logits or need text have no effect: tokens depend on the prompt and the seed."""

    async def serve() -> None:
        where = store()
        async with SimEngine("e0", profile=PROFILE) as engine:
            await engine.load(await card(where), where)
            request = ask(4, 6)
            asked = replace(request, sampling=Sampling(max_tokens=6, ignore_eos=True, **{name: FIELDS[name]}))
            async with engine.stream(asked) as tokens:
                found = await tokens.collect()
        assert len(found) == 6
        if name != "temperature":
            assert [token.id for token in found] == expected_tokens(request, await card(where))
        assert [len(token.top_logprobs) for token in found] == [2 if name == "logprobs" else 0] * 6
        assert len(tokens.prompt_logprobs) == (4 if name == "prompt_logprobs" else 0)

    run(serve)
