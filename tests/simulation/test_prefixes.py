"""Simulated prefix reuse: shared blocks are computed once, freed once, and evicted in order; TTFT falls."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from hotswap import AdapterId, ModelId, Request, RequestId, Sampling
from hotswap.backends.sim.batcher import Batcher
from hotswap.backends.sim.prefix import block_names
from hotswap.offline.workloads import poisson_gaps
from hotswap.policies import (
    Chain,
    Freeness,
    FreenessRouter,
    LeastLoadedRouter,
    PrefixRouter,
    RestoreMinReplicas,
    RoundRobinRouter,
    VirtualUsageRescheduler,
    WeightedLoadSwap,
)
from hotswap.simulation import Cluster, Outcome, Trace, TraceRequest, simulate
from hotswap.simulation.events.engine import Counted
from tests.simulation.test_drivers import Silent, assert_same

FLOORS = RestoreMinReplicas()


def counted(*prompt: int, output_tokens: int = 4, adapter: str | None = None) -> Counted:
    request = Request(
        id=RequestId("r"),
        model=ModelId("m"),
        prompt=prompt,
        sampling=Sampling(max_tokens=output_tokens),
        adapter=None if adapter is None else AdapterId(adapter),
    )
    return Counted(request, Silent(), output_tokens)


def batcher(num_blocks: int = 64, *, budget: int = 10_000, prefill_first: bool = False) -> Batcher:
    return Batcher(
        num_blocks=num_blocks,
        block_tokens=16,
        max_requests=8,
        token_budget=budget,
        batching="prefill_first" if prefill_first else "mixed",
        prefix_reuse=True,
    )


def run(pool: Batcher, *sequences: Counted) -> list[int]:
    """Serve them to their end; return how many tokens each step computed."""
    for sequence in sequences:
        pool.add(sequence)
    counts: list[int] = []
    while len(pool):
        step = pool.plan()
        counts.append(step.num_tokens)
        pool.commit(step)
    return counts


def test_a_shared_prefix_is_computed_once() -> None:
    for prefill_first in (False, True):
        pool = batcher(prefill_first=prefill_first)
        assert run(pool, counted(*range(100)))[0] == 100
        assert run(pool, counted(*range(100)))[0] == 4  # six whole blocks were there
        assert run(pool, counted(*range(96)))[0] == 16  # the last token is computed in any case
        assert run(pool, counted(*range(50), *range(50)))[0] == 52  # three blocks are the same
        assert run(pool, counted(*range(1, 100)))[0] == 99
        assert run(pool, counted(*range(100), adapter="x"))[0] == 100  # other weights, other keys
        assert pool.num_reused_tokens == 96 + 80 + 48
        assert pool.num_free_blocks == pool.num_blocks


def test_two_at_the_same_time_share_blocks_and_need_fewer() -> None:
    pool = batcher(16)
    first = counted(*range(160), output_tokens=8)
    pool.add(first)
    pool.commit(pool.plan())
    pool.add(counted(*range(160), *range(999, 1030), output_tokens=8))
    assert pool.num_next_blocks == 2  # of twelve, of which ten are lent
    step = pool.plan()
    assert step.num_tokens == 1 + 31
    assert pool.num_free_blocks == 16 - 12 - 1
    pool.commit(step)
    pool.remove(first)
    assert pool.num_free_blocks == 16 - 12


def test_the_least_recently_used_prefix_is_evicted_first_and_its_end_before_its_start() -> None:
    pool = batcher(10)
    old, new = range(64), range(500, 564)
    run(pool, counted(*old))
    run(pool, counted(*new))
    run(pool, counted(*range(900, 930), output_tokens=20))  # takes the two free blocks, and two of the old
    assert run(pool, counted(*new, 1))[0] == 1
    assert run(pool, counted(*old, 1))[0] == 65 - 32


def test_a_preempted_request_finds_its_prompt_cached() -> None:
    pool = batcher(11)
    run(pool, counted(*range(80), output_tokens=30), counted(*range(200, 280), output_tokens=30))
    assert pool.num_reused_tokens >= 64
    assert pool.num_free_blocks == 11


def test_no_prefix_is_found_after_an_unload() -> None:
    pool = batcher()
    run(pool, counted(*range(100)))
    pool.clear(RuntimeError("unloaded"))
    assert run(pool, counted(*range(100)))[0] == 100


asked = st.tuples(st.integers(0, 3), st.integers(1, 90), st.integers(1, 40), st.booleans())


@given(
    st.lists(asked, min_size=1, max_size=14),
    st.integers(9, 40),
    st.sampled_from([16, 64, 400]),
    st.booleans(),
)
def test_all_blocks_are_released_whatever_is_shared_preempted_or_left(
    requests: list[tuple[int, int, int, bool]], num_blocks: int, budget: int, prefill_first: bool
) -> None:
    """Every block is free, one sequence's own, or named and used; in the end all are free."""
    pool = batcher(num_blocks, budget=budget, prefill_first=prefill_first)
    left: list[Counted] = []
    for family, prompt_tokens, output_tokens, leaves in requests:
        sequence = counted(*range(family * 1000, family * 1000 + prompt_tokens), output_tokens=output_tokens)
        pool.add(sequence)
        if leaves:
            left.append(sequence)
        pool.commit(pool.plan())
        balanced(pool)
    for sequence in left:
        pool.remove(sequence)
        balanced(pool)
    run(pool)
    assert pool.num_free_blocks == pool.num_blocks


def balanced(pool: Batcher) -> None:
    own = sum(sequence.num_blocks - sequence.num_named for sequence in pool)
    named = {name for sequence in pool for name in sequence.names[: sequence.num_named]}
    assert pool.num_free_blocks + own + len(named) == pool.num_blocks
    assert pool.num_free_blocks >= 0


@given(
    st.lists(st.integers(0, 2), min_size=1, max_size=60), st.lists(st.integers(0, 2), min_size=1, max_size=60)
)
def test_blocks_have_the_same_name_if_all_tokens_up_to_their_end_are_the_same(
    left: list[int], right: list[int]
) -> None:
    one, two = (block_names(counted(*prompt).request, 4) for prompt in (left, right))
    assert (len(one), len(two)) == (len(left) // 4, len(right) // 4)
    for number, (a, b) in enumerate(zip(one, two, strict=False), start=1):
        assert (a == b) == (left[: 4 * number] == right[: 4 * number])


# ---------------------------------------------------------------------- fleets


def conversations(seed: int, num: int = 25, rate_per_s: float = 2.0, gap_s: float = 4.0) -> Trace:
    """Conversations of four turns, each of which begins with all that was said before."""
    random = Random(seed)
    starts = poisson_gaps(random, rate_per_s=rate_per_s)
    at_s, requests = 0.0, []
    for talk in range(num):
        at_s += next(starts)
        blocks = [0, *(1000 * (talk + 1) + turn for turn in range(12))]
        for turn in range(4):
            said = 2 + 2 * turn
            requests.append(
                TraceRequest(
                    arrive_s=at_s + turn * gap_s + random.random(),
                    prompt_tokens=512 * said + random.randrange(400),
                    output_tokens=random.randrange(5, 60),
                    prefix_blocks=tuple(blocks[: said + 1]),
                )
            )
    return Trace.of(requests, "conversations")


SMALL = Cluster(num_engines=3, profile="l40s-llama-3.1-8b", min_replicas=3, prefix_reuse=True)
PREFIX = PrefixRouter(block_tokens=512, num_blocks=2)


def test_both_drivers_reuse_the_same() -> None:
    for cluster in (SMALL, replace(SMALL, profile="a10-llama-7b", token_budget=256, losses=((9.0, "e1"),))):
        outcome = assert_same(conversations(1), cluster, router=PREFIX, scheduler=FLOORS)
        assert outcome.num_reused_tokens > 512


def test_both_drivers_reuse_the_same_among_moves_and_swaps() -> None:
    cluster = replace(SMALL, profile="a10-llama-7b", batching="prefill_first", watermark=0.01)
    moves = Chain(FLOORS, VirtualUsageRescheduler())
    assert_same(conversations(2), cluster, router=FreenessRouter(Freeness("artifact")), scheduler=moves)
    two = Trace.of(
        replace(request, model=f"m{number % 2}") for number, request in enumerate(conversations(3).requests)
    )
    swaps = WeightedLoadSwap(4, 50, 2, patience_s=1.0, sigmas=0)
    assert_same(
        two, replace(SMALL, num_engines=1, min_replicas=0), router=LeastLoadedRouter(), scheduler=swaps
    )


def played(cluster: Cluster, router: PrefixRouter | RoundRobinRouter) -> Outcome:
    return simulate(
        conversations(4, num=60, rate_per_s=4.0), cluster, router=router, scheduler=FLOORS, driver="events"
    )


def test_requests_with_a_cached_prefix_wait_less() -> None:
    meet, scattered = played(SMALL, PREFIX), played(SMALL, RoundRobinRouter())
    anew = played(replace(SMALL, prefix_reuse=False), RoundRobinRouter())
    assert anew.num_reused_tokens == 0 < scattered.num_reused_tokens < meet.num_reused_tokens
    waits = [outcome.summary()["ttft_s_mean"] for outcome in (meet, scattered, anew)]
    assert waits == sorted(waits)
    tokens = [outcome.summary()["num_reused_tokens"] for outcome in (meet, scattered)]
    assert tokens == [meet.num_reused_tokens, scattered.num_reused_tokens]


def test_both_drivers_report_the_same_recovery_where_prompts_fill_their_blocks() -> None:
    """What was preempted in its first decode finds its whole prompt again, and decodes at once."""
    requests = [
        TraceRequest(
            arrive_s=0.4 * n, prompt_tokens=512 * (1 + n % 3), output_tokens=900 + 40 * n, prefix_blocks=(n,)
        )
        for n in range(16)
    ]
    cluster = replace(SMALL, num_engines=1, min_replicas=1, profile="a10-llama-7b")
    outcome = assert_same(Trace.of(requests), cluster, router=PREFIX, scheduler=FLOORS)
    assert outcome.summary()["num_preempted"] > 0
