"""Samples of one request: one computes the prompt, and each is a stream that nothing else can tell apart."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from random import Random

import anyio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hotswap import Completion, Fleet, FleetStream, InstanceId, Sampling, Token
from hotswap.backends.sim import SimEngine
from hotswap.errors import DeadlineExceeded, InstanceError, InvalidRequest, MigrationAborted, QueueFull
from hotswap.offline.virtual_time import run, virtual_time
from hotswap.policies import RoundRobinRouter
from tests.runtime.counting import counted_opcodes
from tests.runtime.support import Idle, engine_of, expected, idle, sim_fleet, until

BLOCK = 16
PROMPT = list(range(1, 321))  # twenty blocks
EIGHT = Sampling(n=8, temperature=0.8, max_tokens=40, ignore_eos=True)


def sharing(name: str, **options: int) -> SimEngine:
    return engine_of(name, prefix_reuse=True, **{"max_requests": 16, "kv_blocks": 1024, **options})


def sharing_fleet(engines: int | Sequence[SimEngine] = 1, **options: object) -> Fleet:
    made = [sharing(f"e{n}") for n in range(engines)] if isinstance(engines, int) else engines
    return sim_fleet("a", "b", engines=made, **{"scheduler": Idle(), **options})  # type: ignore[arg-type]


def num_computed(done: Completion) -> int:
    """How many tokens of the prompt were computed for all samples, before their first tokens."""
    return sum(sample.usage.prompt_tokens - sample.usage.reused_tokens for sample in done.samples)


async def read(stream: FleetStream, into: list[Token]) -> None:
    into.extend([token async for token in stream])


def is_exact(stream: FleetStream, tokens: Sequence[Token]) -> bool:
    return [token.id for token in tokens] == expected(stream.request)


# ---------------------------------------------------------------------- what is given


@virtual_time
async def test_samples_are_those_of_requests_with_their_seeds() -> None:
    async with sharing_fleet() as fleet:
        await fleet.swap("e0", to="a")
        done = await fleet.generate("a", PROMPT, EIGHT)
        texts = [[token.id for token in sample.tokens] for sample in done.samples]
        assert len({tuple(text) for text in texts}) == 8
        for sample, text in zip(done.samples, texts, strict=True):
            alone = await fleet.generate("a", PROMPT, replace(EIGHT, n=1, seed=sample.seed))
            assert [token.id for token in alone.tokens] == text
            assert alone.samples[0].tokens == alone.tokens
        assert (done.tokens, done.seed) == (done.samples[0].tokens, done.samples[0].seed)
        idle(fleet)


@pytest.mark.parametrize("field", ["bad_words_ids", "stop_token_ids", "logit_bias"])
@virtual_time
async def test_long_lists_cost_the_same_for_many_samples_as_for_one(field: str) -> None:
    long = {
        "bad_words_ids": [[token] * 64 for token in range(64)],
        "stop_token_ids": range(1000, 2000),
        "logit_bias": dict.fromkeys(range(1000), 1.0),
    }

    async def cost(n: int, **lists: object) -> int:
        sampling = Sampling(n=n, temperature=1.0, max_tokens=2, ignore_eos=True, seed=1, **lists)  # type: ignore[arg-type]
        counts = list[int]()
        for _ in range(3):  # a collection of garbage, or a turn of the control loop, may come between
            with counted_opcodes() as count:
                await fleet.generate("a", PROMPT, sampling)
            counts.append(count.value)
        return min(counts)

    async with sharing_fleet() as fleet:
        await fleet.swap("e0", to="a")
        await cost(8)  # the first computes the prompt
        one, eight = [await cost(n, **{field: long[field]}) - await cost(n) for n in (1, 8)]
        assert eight - one < 1000  # fewer instructions than the list has entries


@virtual_time
async def test_a_request_for_as_many_tokens_as_fit_is_what_its_fields_give() -> None:
    async with sharing_fleet() as fleet:
        await fleet.swap("e0", to="a")
        for least in (0, 7, 2**31 - 1):
            for ends in ([], [5]):
                asked = Sampling(max_tokens=None, min_tokens=least, temperature=1.0, forced_end_tokens=ends)
                async with fleet.stream("a", PROMPT, asked) as stream:
                    got = stream.request.sampling
                assert got.seed is not None
                assert got == replace(asked, max_tokens=got.max_tokens, seed=got.seed)


@virtual_time
async def test_usage_counts_the_prompt_once_and_the_tokens_of_every_sample() -> None:
    async with sharing_fleet() as fleet:
        await fleet.swap("e0", to="a")
        done = await fleet.generate("a", PROMPT, EIGHT)
        assert (done.usage.prompt_tokens, done.usage.generated_tokens) == (len(PROMPT), 8 * 40)
        assert done.usage.reused_tokens == 0
        again = await fleet.generate("a", PROMPT, EIGHT)
        assert again.usage.reused_tokens == len(PROMPT) - BLOCK


@virtual_time
async def test_log_probabilities_of_the_prompt_come_once() -> None:
    async with sharing_fleet() as fleet:
        await fleet.swap("e0", to="a")
        async with fleet.samples("a", PROMPT, replace(EIGHT, prompt_logprobs=1)) as streams:
            told = [(await stream.complete()).prompt_logprobs for stream in streams]
        assert [len(entries) for entries in told] == [len(PROMPT), *[0] * 7]
        done = await fleet.generate("a", PROMPT, replace(EIGHT, prompt_logprobs=1))
        assert [entry.id for entry in done.prompt_logprobs] == PROMPT


@virtual_time
async def test_a_stream_refuses_several_samples_and_names_what_lends_them() -> None:
    async with sharing_fleet() as fleet:
        await fleet.swap("e0", to="a")
        with pytest.raises(InvalidRequest, match="`samples`"):
            async with fleet.stream("a", PROMPT, EIGHT):
                pass
        async with fleet.samples("a", PROMPT, replace(EIGHT, n=1)) as (only,):
            assert is_exact(only, await only.collect())


# ---------------------------------------------------------------------- one prefill


@virtual_time
async def test_the_prompt_is_computed_once_whatever_the_router_would_do() -> None:
    """Round robin would send the samples to four replicas."""
    async with sharing_fleet(4, router=RoundRobinRouter()) as fleet:
        for number in range(4):
            await fleet.swap(f"e{number}", to="a")
        done = await fleet.generate("a", PROMPT, EIGHT)
        assert num_computed(done) <= len(PROMPT) + 7 * BLOCK
        assert len({hop.instance for sample in done.samples for hop in sample.hops}) == 1


@virtual_time
async def test_where_an_instance_has_no_room_the_others_compute_the_prompt_once_each() -> None:
    engines = [sharing(f"e{number}", max_requests=3) for number in range(3)]
    async with sharing_fleet(engines) as fleet:
        for engine in engines:
            await fleet.swap(engine.id, to="a")
        done = await fleet.generate("a", PROMPT, EIGHT)
        places = [sample.hops[0].instance for sample in done.samples]
        assert sorted(places.count(engine.id) for engine in engines) == [2, 3, 3]
        assert num_computed(done) <= 3 * len(PROMPT) + 5 * BLOCK


@virtual_time
async def test_samples_wait_for_room_on_the_only_instance() -> None:
    async with sharing_fleet([sharing("e0", max_requests=3)]) as fleet:
        await fleet.swap("e0", to="a")
        done = await fleet.generate("a", PROMPT, EIGHT)
        assert num_computed(done) <= len(PROMPT) + 7 * BLOCK
        idle(fleet)


@virtual_time
async def test_after_a_swap_one_sample_computes_what_all_share() -> None:
    engines = [sharing("e0"), sharing("e1")]
    async with sharing_fleet(engines) as fleet:
        await fleet.swap("e0", to="a")
        await fleet.swap("e1", to="b")
        async with fleet.samples("a", PROMPT, replace(EIGHT, max_tokens=200)) as streams:
            for stream in streams:
                await anext(stream)
            await fleet.swap("e1", to="a")
            await fleet.swap("e0", to="b")
            for stream in streams:
                await stream.collect()
            assert {stream.hops[-1].instance for stream in streams} == {InstanceId("e1")}
        assert engines[1].num_reused_tokens >= 7 * (len(PROMPT) - BLOCK)


@virtual_time
async def test_a_leader_that_is_lost_before_its_first_token_holds_up_none() -> None:
    engines = [sharing("e0"), sharing("e1")]
    async with sharing_fleet(engines) as fleet:
        for engine in engines:
            await fleet.swap(engine.id, to="a")
        async with fleet.samples("a", PROMPT, EIGHT) as streams:
            await until(lambda: any(stream.num_hops for stream in streams))
            at = next(stream.hops[0].instance for stream in streams if stream.hops)
            next(engine for engine in engines if engine.id == at).lose()
            for stream in streams:
                assert is_exact(stream, await stream.collect())
            computed = [len(PROMPT) - stream.usage.reused_tokens for stream in streams]
        assert sum(computed) <= 2 * len(PROMPT) + 7 * BLOCK


@virtual_time
async def test_the_others_go_on_when_the_reader_of_one_gives_up() -> None:
    """As a server does whose client has closed one of its streams: nothing waits for it."""
    async with sharing_fleet() as fleet:
        await fleet.swap("e0", to="a")
        async with fleet.samples("a", PROMPT, EIGHT) as streams:
            for stream in streams[1:]:
                assert is_exact(stream, await stream.collect())
        idle(fleet)


# ---------------------------------------------------------------------- streams like any other


@settings(max_examples=40)
@given(seed=st.integers(0, 2**32))
def test_samples_stay_exact_through_swaps_moves_and_losses(seed: int) -> None:
    random = Random(seed)
    engines = [sharing(f"e{number}", max_requests=random.choice([2, 8, 16])) for number in range(3)]

    async def disturb(fleet: Fleet, streams: Sequence[FleetStream]) -> None:
        await anyio.sleep(random.random() * 0.3)
        match random.choice(["swap", "move", "loss"]):
            case "swap":
                await fleet.swap("e1", to="a")
                await fleet.swap("e0", to="b")
            case "move":
                await fleet.swap("e2", to="a")
                for stream in random.sample(streams, 3):
                    if stream.finish_reason is None and stream.num_hops:
                        with suppress(MigrationAborted):  # it ended meanwhile, or e2 has no room
                            await fleet.migrate(stream.request.id, to="e2")
            case _:
                await fleet.swap("e1", to="a")
                engines[0].lose()

    async def scenario() -> None:
        async with sharing_fleet(engines) as fleet:
            await fleet.swap("e0", to="a")
            async with fleet.samples("a", PROMPT, replace(EIGHT, seed=seed)) as streams:
                received: list[list[Token]] = [[] for _ in streams]
                async with anyio.create_task_group() as tasks:
                    for stream, into in zip(streams, received, strict=True):
                        tasks.start_soon(read, stream, into)
                    await disturb(fleet, streams)
                assert all(map(is_exact, streams, received))
                assert len({tuple(token.id for token in tokens) for tokens in received}) == 8
            idle(fleet)

    run(scenario)


@settings(max_examples=30)
@given(after_s=st.floats(0, 0.5))
def test_leaving_the_block_at_any_moment_ends_every_sample(after_s: float) -> None:
    async def scenario() -> None:
        async with sharing_fleet([sharing("e0", max_requests=3)]) as fleet:
            await fleet.swap("e0", to="a")
            async with fleet.samples("a", PROMPT, EIGHT):
                await anyio.sleep(after_s)
            idle(fleet)
            done = await fleet.generate("a", [1, 2, 3], replace(EIGHT, n=2))
            assert len(done.samples) == 2

    run(scenario)


@virtual_time
async def test_all_have_the_deadline_and_the_priority_of_their_request() -> None:
    async with sharing_fleet([sharing("e0", max_requests=2)]) as fleet:
        await fleet.swap("e0", to="a")
        async with fleet.samples("a", PROMPT, EIGHT, priority=3, deadline_s=0.2) as streams:
            assert {stream.request.priority for stream in streams} == {3}
            for stream in streams:
                with pytest.raises(DeadlineExceeded):
                    await stream.collect()
        idle(fleet)


# ---------------------------------------------------------------------- all or none


@virtual_time
async def test_either_all_samples_are_queued_or_none() -> None:
    async with sharing_fleet([sharing("e0", max_requests=1)], max_waiting=8) as fleet:
        await fleet.swap("e0", to="a")
        async with fleet.stream("a", [1], replace(EIGHT, n=1, max_tokens=400)) as running:
            await anext(running)
            async with fleet.samples("a", PROMPT, EIGHT) as streams:
                assert len(fleet.view().waiting) == 8
                with pytest.raises(QueueFull, match="2 samples"):
                    async with fleet.samples("a", PROMPT, replace(EIGHT, n=2)):
                        pass
                assert len(fleet.view().waiting) == 8
                for stream in streams:
                    assert is_exact(stream, await stream.collect())
        idle(fleet)


@virtual_time
async def test_samples_that_wait_for_their_first_one_are_not_refused() -> None:
    """No queue at all: the first runs at once, and the others begin where it has computed the prompt."""
    async with sharing_fleet(max_waiting=0) as fleet:
        await fleet.swap("e0", to="a")
        assert len((await fleet.generate("a", PROMPT, EIGHT)).samples) == 8


@virtual_time
async def test_others_are_served_while_samples_wait_for_their_first_one() -> None:
    async with sharing_fleet() as fleet:
        await fleet.swap("e0", to="a")
        async with fleet.samples("a", PROMPT, EIGHT):
            other = await fleet.generate("a", [7, 8], replace(EIGHT, n=1, max_tokens=1))
            assert other.hops
        idle(fleet)


@virtual_time
async def test_an_error_of_one_sample_ends_all_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    complete = FleetStream.complete

    async def fails_for_one(self: FleetStream) -> Completion:
        if self.request.id.endswith("-3"):
            await anext(self)
            raise InstanceError("the third sample failed")
        return await complete(self)

    monkeypatch.setattr(FleetStream, "complete", fails_for_one)
    async with sharing_fleet() as fleet:
        await fleet.swap("e0", to="a")
        many = replace(EIGHT, max_tokens=3000)
        with anyio.fail_after(5), pytest.raises(InstanceError, match="third sample"):
            await fleet.generate("a", PROMPT, many)
        idle(fleet)
