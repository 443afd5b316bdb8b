"""The simulated batcher: which sequences wait, run and are preempted, and what a preemption costs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotswap import ModelId, Request, RequestId, Sampling
from hotswap.backends.sim.batcher import Batcher, Batching
from hotswap.simulation.events.engine import Counted

BLOCK = 16


class Silent:
    def got_first_token(self) -> None:
        return

    def ended(self, error: Exception | None) -> None:
        return


class Clock:
    """A second a look."""

    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def counted(prompt: int, output: int = 50, *, at_s: float = 0.0, priority: int = 0) -> Counted:
    request = Request(
        id=RequestId(f"r{at_s:g}"),
        model=ModelId("m"),
        prompt=(1,) * prompt,
        sampling=Sampling(max_tokens=output),
        priority=priority,
        arrived_s=at_s,
    )
    return Counted(request, Silent(), output)


def batcher_of(
    num_blocks: int,
    *,
    batching: Batching = "prefill_first",
    watermark: float = 0.0,
    turnover: bool = False,
) -> Batcher:
    return Batcher(
        num_blocks=num_blocks,
        block_tokens=BLOCK,
        max_requests=8,
        token_budget=1000,
        batching=batching,
        watermark=watermark,
        turnover=turnover,
    )


def filled(batcher: Batcher, sequences: Iterable[Counted]) -> None:
    """Add sequences and have their prompts computed."""
    for sequence in sequences:
        batcher.add(sequence)
    batcher.commit(batcher.plan())


# ------------------------------------------------------------------ the queue


@pytest.mark.parametrize("batching", ["mixed", "prefill_first"])
@given(st.lists(st.integers(0, 3), max_size=8))
def test_sequences_wait_by_priority_and_then_by_arrival(batching: Batching, priorities: list[int]) -> None:
    batcher = batcher_of(100, batching=batching)
    for at_s, priority in enumerate(priorities):
        batcher.add(counted(10, at_s=at_s, priority=priority))
    order = [(-sequence.request.priority, sequence.request.arrived_s) for sequence in batcher.waiting]
    assert order == sorted(order)


def test_a_sequence_that_arrives_with_blocks_runs_in_the_next_step_though_others_wait_for_memory() -> None:
    batcher = batcher_of(20, watermark=0.1)
    running, head, arriving = (
        counted(10 * BLOCK),
        counted(15 * BLOCK, at_s=1),
        counted(5 * BLOCK - 1, at_s=2),
    )
    filled(batcher, [running])
    batcher.add(head)
    batcher.hold(5)  # what a sink reserved
    batcher.add(arriving)

    def give(sequence: object) -> None:
        arriving.num_cached, arriving.num_blocks = 5 * BLOCK - 2, 5

    batcher.give_blocks(arriving, give)
    step = batcher.plan()
    assert set(step.chunks) == {running, arriving}
    assert list(batcher.waiting) == [head]


def test_a_sequence_that_arrives_with_blocks_leaves_as_many_free_as_an_admission() -> None:
    for batching, spare in (("mixed", 3), ("prefill_first", 2)):
        batcher = batcher_of(20, batching=batching, watermark=0.1)  # type: ignore[arg-type]
        filled(batcher, [counted(10, at_s=at_s) for at_s in range(3)])
        assert batcher.num_spare_blocks == spare


# ------------------------------------------------------------------ preemption


def to_their_end(batcher: Batcher, sequences: Sequence[Counted]) -> Iterable[tuple[set[object], set[object]]]:
    """Step until all have ended; yield the sequences that ran before each step, and those that left since."""
    for sequence in sequences:
        batcher.add(sequence)
    for _ in range(20_000):
        if not len(batcher):
            return
        before: set[object] = set(batcher.running)
        step = batcher.plan()
        yield before, before - set(batcher.running)
        batcher.commit(step)
    raise AssertionError("they never end")


lengths = st.lists(st.tuples(st.integers(1, 90), st.integers(1, 90)), min_size=1, max_size=7)


@given(lengths, st.permutations(range(7)))
def test_the_last_to_arrive_is_preempted_first_where_whole_prompts_go_first(
    lengths: list[tuple[int, int]], order: list[int]
) -> None:
    sequences = [
        counted(prompt, output, at_s=at_s) for (prompt, output), at_s in zip(lengths, order, strict=False)
    ]
    for before, gone in to_their_end(batcher_of(14), sequences):
        stay = [s.request.arrived_s for s in sequences if s in before - gone and not s.closed]
        left = [s.request.arrived_s for s in sequences if s in gone and not s.closed]
        assert not stay or not left or max(stay) < min(left)


@pytest.mark.parametrize("batching", ["mixed", "prefill_first"])
@given(lengths)
def test_the_load_counts_the_tokens_and_blocks_of_the_queue(
    batching: Batching, lengths: list[tuple[int, int]]
) -> None:
    sequences = [counted(prompt, output, at_s=at_s) for at_s, (prompt, output) in enumerate(lengths)]
    batcher = batcher_of(14, batching=batching)
    for _ in to_their_end(batcher, sequences):
        pending = [s.num_pending for s in batcher if s.num_pending > 1]
        assert batcher.num_prefill_tokens(running=True) == sum(pending)
        again = [s.request.id for s in batcher.waiting if s.position > len(s.request.generated)]
        assert sorted(batcher.preempted) == sorted(again)
    assert batcher.num_prefill_tokens(running=True) == 0
    assert batcher.num_free_blocks == batcher.num_blocks


# ------------------------------------------------------------------ what it costs


def test_a_recovery_takes_until_the_lost_tokens_are_computed_again() -> None:
    batcher, clock, told = batcher_of(6), Clock(), list[tuple[RequestId, float]]()
    batcher.clock = clock
    batcher.on_recovered = lambda request, seconds: told.append((request, seconds))
    first, second = counted(3 * BLOCK - 1, 20, at_s=1), counted(3 * BLOCK - 1, 40, at_s=2)
    filled(batcher, [first, second])
    while second in batcher.running:
        clock.now_s += 1
        batcher.commit(step := batcher.plan())
    began_s, lost = clock.now_s, second.num_to_recompute
    assert lost == 3 * BLOCK
    assert told == []
    while second.num_cached < lost:
        step = batcher.plan()
        clock.now_s += 1  # how long it takes
        batcher.commit(step)
    assert told == [("r2", clock.now_s - began_s)]
    assert clock.now_s - began_s > 15, "the first had to end before"


def test_a_recovery_of_a_sequence_that_ends_before_takes_until_its_end() -> None:
    batcher, clock, told = batcher_of(6), Clock(), list[float]()
    batcher.clock = clock
    batcher.on_recovered = lambda _, seconds: told.append(seconds)
    first, second = counted(3 * BLOCK - 1, at_s=1), counted(3 * BLOCK - 1, at_s=2)
    filled(batcher, [first, second])
    while second in batcher.running:
        batcher.commit(batcher.plan())
    clock.now_s = 7.0
    batcher.remove(second)
    batcher.remove(first)
    assert told == [7.0]


@given(lengths)
def test_only_preempted_sequences_recover(lengths: list[tuple[int, int]]) -> None:
    sequences = [counted(prompt, output, at_s=at_s) for at_s, (prompt, output) in enumerate(lengths)]
    batcher, clock, told = batcher_of(14), Clock(), set[RequestId]()
    batcher.clock = clock
    batcher.on_recovered = lambda request, _: told.add(request)
    set_back = {
        s.request.id
        for _, gone in to_their_end(batcher, sequences)
        for s in sequences
        if s in gone and s.num_to_recompute
    }
    assert told == set_back


def test_a_prompt_of_nearly_all_blocks_does_not_wait_for_a_watermark() -> None:
    """No other sequence runs that could free more."""
    batcher = batcher_of(10, watermark=0.5)
    large, next_one = counted(9 * BLOCK), counted(BLOCK, at_s=1.0)
    batcher.add(large)
    batcher.add(next_one)
    assert batcher.plan().chunks == {large: 9 * BLOCK}


# ------------------------------------------------------------------ turnover


@pytest.mark.parametrize("batching", ["mixed", "prefill_first"])
@given(st.lists(st.lists(st.integers(1, 6), max_size=3), max_size=12))
def test_every_sequence_joins_once_and_leaves_once_if_others_go_on(
    batching: Batching, coming: list[list[int]]
) -> None:
    """A step tells how many decode for the first time, and how many of the last decodes are gone."""
    batcher = batcher_of(1000, batching=batching, turnover=True)
    before: set[object] = set()
    joined: list[object] = []
    for lengths in [*coming, *[[]] * 60]:
        for tokens in lengths:
            batcher.add(counted(5, tokens))
        step = batcher.plan()
        decodes: set[object] = {sequence for sequence in step.chunks if sequence.num_pending == 1}
        if decodes:
            assert step.num_joined == len(decodes - before)
            assert step.num_left == (len(before - decodes) if before & decodes else 0)
            joined += decodes - before
        else:
            assert step.num_joined == step.num_left == 0
        before = decodes if decodes or not step.num_tokens else before
        batcher.commit(step)
    assert not len(batcher)
    assert len(joined) == len(set(joined)) == sum(tokens > 1 for lengths in coming for tokens in lengths)
