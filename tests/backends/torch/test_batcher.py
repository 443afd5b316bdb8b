"""The batcher fills its budget, starves no request, releases all blocks, and shares only equal prefixes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from hotswap.backends.torch import batcher as batching
from hotswap.backends.torch import prefix
from hotswap.backends.torch.batcher import Batcher, Plan
from hotswap.backends.torch.blocks import BlockPool
from hotswap.backends.torch.prefix import root_key
from hotswap.backends.torch.prompt_logprobs import PromptScores
from hotswap.backends.torch.sequence import Chunk, Sequence
from tests.backends.torch.batcher_harness import BatcherHarness, make

BLOCK = 16


class Arrivals(RuleBasedStateMachine):
    """Requests with common prefixes come and go while the batcher runs; `BatcherHarness` checks each step."""

    keeps_states = False

    @initialize(
        num_blocks=st.integers(6, 14),
        budget=st.integers(4, 24),
        max_requests=st.integers(1, 4),
        reuse=st.booleans(),
        places=st.integers(0, 3),
        snapshots=st.integers(1, 6),
    )
    def start(
        self, num_blocks: int, budget: int, max_requests: int, reuse: bool, places: int, snapshots: int
    ) -> None:
        self.bench = BatcherHarness(
            num_blocks=num_blocks,
            block_tokens=4,
            budget=budget,
            max_requests=max_requests,
            prefix_reuse=reuse or self.keeps_states,
            snapshots=snapshots if self.keeps_states else 0,
            priority_places=places,
        )
        self.requests: list[Sequence] = []

    @rule(
        data=st.data(),
        length=st.integers(1, 16),
        count=st.integers(1, 9),
        priority=st.sampled_from([0, 0, 0, 1, 2]),
        root=st.sampled_from([b"a", b"a", b"b"]),
    )
    def add(self, data: st.DataObject, length: int, count: int, priority: int, root: bytes) -> None:
        tokens = [0] * length
        goes_on: bool = data.draw(st.booleans())
        if self.requests and goes_on:  # shares a prefix with another request
            other = data.draw(st.sampled_from(self.requests))
            tokens = [*other.tokens[:length], *tokens[len(other.tokens) :]]
            tokens[-1] = data.draw(st.integers(0, 1))
        sequence = make(len(self.requests) + 1, tokens, count, priority=priority, root=root)
        self.requests.append(sequence)
        self.bench.add(sequence)

    @rule(steps=st.integers(1, 6))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            self.bench.step()

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.bench.batcher.remove(data.draw(st.sampled_from(self.requests)))
        self.bench.check_accounting()

    @rule(extra=st.integers(0, 20))
    def change_budget(self, extra: int) -> None:
        self.bench.batcher.token_budget = self.bench.batcher.max_requests + extra

    def teardown(self) -> None:
        if not hasattr(self, "bench"):
            return
        batcher, steps = self.bench.batcher, 0
        while batcher.running or batcher.waiting:
            self.bench.step()
            steps += 1
            assert steps < 3000, "a request starves"
        assert self.bench.pool.num_free == self.bench.pool.num_blocks


TestArrivals = Arrivals.TestCase
TestArrivals.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)


def steps_of(bench: BatcherHarness) -> Iterator[Plan]:
    while bench.batcher.running or bench.batcher.waiting:
        yield bench.step()


def test_decodes_go_first_and_prompts_fill_the_rest() -> None:
    bench = BatcherHarness(num_blocks=100, block_tokens=BLOCK, budget=20, max_requests=8)
    old, long, young = make(1, 5, 9), make(2, 50, 9), make(3, 30, 9)

    def step() -> list[tuple[Sequence, int]]:
        return [(chunk.sequence, chunk.num_tokens) for chunk in bench.step().chunks]

    bench.add(old)
    assert step() == [(old, 5)]
    bench.add(long, young)
    assert step() == [(old, 1), (long, 19)]
    assert step() == [(old, 1), (long, 19)]
    assert step() == [(old, 1), (long, 12), (young, 7)]


@given(lengths=st.lists(st.integers(1, 90), min_size=1, max_size=8), budget=st.integers(8, 100))
@settings(max_examples=40, deadline=None)
def test_a_backlog_takes_no_more_steps_than_it_must(lengths: list[int], budget: int) -> None:
    """With every step full, prompts take the fewest steps there are."""
    bench = BatcherHarness(num_blocks=400, block_tokens=BLOCK, budget=budget, max_requests=8)
    bench.add(*(make(ticket, length, 1) for ticket, length in enumerate(lengths, start=1)))
    assert len(list(steps_of(bench))) == -(-sum(lengths) // budget)


def test_the_youngest_is_preempted_and_reuses_its_cached_blocks() -> None:
    bench = BatcherHarness(num_blocks=7, block_tokens=BLOCK, budget=64, max_requests=8)
    old, young, last = make(1, 30, 60), make(2, 30, 60), make(3, 1, 1)
    bench.add(old, young)
    while not bench.batcher.num_preempted:
        if len(old.tokens) == 40:
            bench.add(last)
        plan = bench.step()
    assert [chunk.sequence for chunk in plan.chunks] == [old]
    assert bench.batcher.waiting[0] is young, "before those that came after it"
    (kept,) = bench.batcher.blocks.cached_ends()
    assert kept.key in young.keys, "a swap finds it among the prefixes of requests that have ended"
    num_tokens, num_computed = len(young.tokens), bench.num_computed_tokens
    list(steps_of(bench))
    assert bench.ended == [old, last, young] or bench.ended == [old, young, last]
    assert 0 < bench.batcher.num_reused_tokens < num_tokens
    assert young.num_reused == 0, "nothing was cached at its first admission"
    assert bench.num_computed_tokens > num_computed


def test_of_lower_priorities_the_youngest_is_preempted_first() -> None:
    bench = BatcherHarness(num_blocks=9, block_tokens=BLOCK, budget=64, max_requests=8)
    low_old, high, low_young = make(1, 30, 60), make(2, 30, 60, priority=1), make(3, 30, 60)
    bench.add(low_old, high, low_young)
    for _ in steps_of(bench):
        pass
    assert bench.ended == [high, low_old, low_young]


def test_a_higher_priority_preempts_lower_ones_if_that_admits_it() -> None:
    bench = BatcherHarness(num_blocks=8, block_tokens=BLOCK, budget=64, max_requests=8)
    first, second = make(1, 40, 20), make(2, 40, 20)
    bench.add(first, second)
    bench.step()
    bench.step()
    urgent = make(3, 30, 10, priority=1)
    bench.add(urgent)
    bench.step()
    assert bench.batcher.running == [urgent, first]
    too_large = make(4, 128, 1, priority=2)
    bench.batcher.remove(too_large)  # unknown so far
    bench.add(make(5, 40, 1))
    bench.step()
    assert bench.batcher.num_preempted == 1, "equal ones wait for each other"


def test_a_higher_priority_goes_before_long_prompts_that_run_already() -> None:
    bench = BatcherHarness(num_blocks=100, block_tokens=BLOCK, budget=16, max_requests=8)
    bench.add(make(1, 1000, 1))
    bench.step()
    urgent = make(2, 16, 1, priority=1)
    bench.add(urgent)
    assert [chunk.sequence for chunk in bench.step().chunks] == [urgent]


@given(places=st.integers(0, 20), priority=st.integers(0, 3), crowded=st.booleans())
@settings(max_examples=12, deadline=None)
def test_a_request_is_overtaken_by_a_bounded_number_of_arrivals(
    places: int, priority: int, crowded: bool
) -> None:
    """A request ends although requests of higher priority keep arriving."""
    bench = BatcherHarness(
        num_blocks=8, block_tokens=BLOCK, budget=32, max_requests=2 if crowded else 4, priority_places=places
    )
    poor = make(1, 40, 20)
    bench.add(poor)
    for ticket in range(2, 100):
        bench.add(make(ticket, 40, 5, priority=priority))
        bench.step()
        if poor in bench.ended:
            break
    # The requests that may overtake it, and those that ran at the same time.
    num_before = bench.ended.index(poor) if poor in bench.ended else len(bench.ended)
    for _ in steps_of(bench):
        pass
    assert poor in bench.ended
    assert num_before <= places * priority + 4 + 4


# ---------------------------------------------------------------------- prefixes


def run(bench: BatcherHarness, *sequences: Sequence) -> None:
    bench.add(*sequences)
    for _ in steps_of(bench):
        pass


def bench_of(num_blocks: int = 40, **options: int) -> BatcherHarness:
    return BatcherHarness(num_blocks=num_blocks, block_tokens=BLOCK, budget=64, max_requests=8, **options)


PROMPT = list(range(100, 140))


def test_a_prompt_is_computed_from_where_it_differs_from_a_cached_one() -> None:
    bench = bench_of()
    run(bench, make(1, PROMPT, 5))
    again, longer, other = make(2, PROMPT, 5), make(3, PROMPT + [7] * 9, 5), make(4, [*PROMPT[:20], 9], 5)
    run(bench, again)
    run(bench, longer)
    run(bench, other)
    assert (again.num_reused, longer.num_reused, other.num_reused) == (39, 40, 20)


def test_a_conversation_reuses_all_tokens_but_the_last() -> None:
    bench = bench_of()
    first = make(1, PROMPT, 9)
    run(bench, first)
    second = make(2, [*first.tokens, 5, 5, 5], 9)
    run(bench, second)
    assert second.num_reused == len(first.tokens) - 1, "the last token was sampled and never computed"


def test_concurrent_requests_share_blocks() -> None:
    bench = bench_of()
    bench.add(make(1, PROMPT, 20))
    bench.step()
    used = bench.pool.num_blocks - bench.pool.num_free
    bench.add(make(2, PROMPT, 20), make(3, PROMPT, 20))
    bench.step()
    assert bench.pool.num_blocks - bench.pool.num_free == used + 2, "one block each for their own tokens"


def test_other_weights_and_other_adapters_share_nothing() -> None:
    bench = bench_of()
    for ticket, root in enumerate(
        (root_key("1"), root_key("2"), root_key("2", b"1"), root_key("2", b"2")), start=1
    ):
        sequence = make(ticket, PROMPT, 5, root=root)
        run(bench, sequence)
        assert sequence.num_reused == 0


def test_prefix_reuse_can_be_disabled() -> None:
    bench = bench_of(prefix_reuse=False)
    run(bench, make(1, PROMPT, 5))
    again = make(2, PROMPT, 5)
    run(bench, again)
    assert (again.num_reused, bench.pool.num_cached) == (0, 0)


def test_the_least_recently_used_prefix_is_dropped_first() -> None:
    bench = bench_of(num_blocks=10)
    for ticket, first in enumerate((1, 2, 3, 1), start=1):  # three blocks each
        run(bench, make(ticket, [first] * 40, 5))
    run(bench, make(5, [4] * 50, 5))  # one block more than are free and cached for one prefix
    found = [bench.pool.find_start(b"m", [first]) is not None for first in (1, 2, 3, 4)]
    assert found == [True, False, True, True]


def test_what_left_since_the_pool_says_is_all_there() -> None:
    bench, left, kept = bench_of(num_blocks=10), list[tuple[float, int]](), list[bool]()
    for ticket, first in enumerate((1, 2, 3, 1, 4, 5), start=1):  # three blocks each
        run(bench, make(ticket, [first] * 40, 5))
        left.append((time.monotonic(), first))
        for left_s, other in left:
            is_kept = bench.pool.kept_since_s <= left_s
            kept.append(is_kept)
            if is_kept:
                assert bench.pool.find_start(b"m", [other] * 8) is not None
    assert kept[0]
    assert kept[-1]
    assert not all(kept)
    bench.pool.withdraw(10)
    assert bench.pool.kept_since_s > left[-2][0]


# ---------------------------------------------------------------------- mistakes that the checks must detect


def shared_blocks_freed_by_the_first_to_go(patch: pytest.MonkeyPatch) -> None:
    def release(self: Any, blocks: list[int]) -> None:
        for block in blocks:
            self._ref_counts.pop(block, None)
            if block not in self._free:
                self._free.append(block)

    patch.setattr(BlockPool, "release", release)


def blocks_leaked_by_sharing(patch: pytest.MonkeyPatch) -> None:
    original = BlockPool.acquire

    def acquire(self: Any, blocks: Any) -> None:
        original(self, blocks)
        original(self, list(blocks)[:1])

    patch.setattr(BlockPool, "acquire", acquire)


def blocks_found_after_they_were_handed_out(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(BlockPool, "_forget", lambda self, block: self._contents.pop(block))


def used_blocks_still_cached(patch: pytest.MonkeyPatch) -> None:
    def acquire(self: Any, blocks: Any) -> None:
        for block in blocks:
            self._ref_counts[block] = self._ref_counts.get(block, 0) + 1

    patch.setattr(BlockPool, "acquire", acquire)


def weights_left_out_of_the_keys(patch: pytest.MonkeyPatch) -> None:
    original = Batcher.add

    def add(self: Any, sequence: Sequence) -> None:
        sequence.root = b"one for all"
        original(self, sequence)

    patch.setattr(Batcher, "add", add)


def blocks_known_by_their_tokens_alone(patch: pytest.MonkeyPatch) -> None:
    original = prefix.block_content

    def content(parent: bytes, tokens: Any) -> Any:
        return original(b"", tokens)

    patch.setattr(prefix, "block_content", content)
    patch.setattr(batching, "block_content", content)


def nothing_left_to_compute(patch: pytest.MonkeyPatch) -> None:
    original = prefix.find_prefix

    def find(pool: Any, keys: Any, root: bytes, tokens: list[int], block_tokens: int) -> Any:
        return original(pool, keys, root, [*tokens, 0], block_tokens)

    patch.setattr(batching, "find_prefix", find)


def one_token_too_many_copied(patch: pytest.MonkeyPatch) -> None:
    original = BlockPool.find_start

    def find_start(self: Any, parent: bytes, tokens: Any) -> tuple[int, int] | None:
        found = original(self, parent, tokens)
        return found and (found[0], min(found[1] + 1, len(tokens)))

    patch.setattr(BlockPool, "find_start", find_start)


def copies_not_made(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(BatcherHarness, "_compute", _computing(lambda plan: Plan(plan.chunks, (), plan.fresh)))


def copied_blocks_cleared(patch: pytest.MonkeyPatch) -> None:
    def cleared(plan: Plan) -> Plan:
        targets = tuple(copy.target for copy in plan.copies)
        return Plan(plan.chunks, plan.copies, plan.fresh + targets)

    patch.setattr(BatcherHarness, "_compute", _computing(cleared))


def the_source_of_a_copy_handed_out_as_its_target(patch: pytest.MonkeyPatch) -> None:
    original_acquire, original_release = BlockPool.acquire, BlockPool.release
    # A copy's source is acquired as a list, a prefix as a tuple.
    patch.setattr(
        BlockPool, "acquire", lambda self, b: None if isinstance(b, list) else original_acquire(self, b)
    )

    def release(self: Any, blocks: list[int]) -> None:
        if len(blocks) != 1 or blocks[0] in self._ref_counts:
            original_release(self, blocks)

    patch.setattr(BlockPool, "release", release)


def tails_found_with_a_token_too_many(patch: pytest.MonkeyPatch) -> None:
    original = Batcher._publish

    def publish(self: Any, sequence: Sequence, at: int, num_tokens: int) -> None:
        original(self, sequence, at, min(num_tokens + 1, self.block_tokens))

    patch.setattr(Batcher, "_publish", publish)


def blocks_found_before_they_are_full(patch: pytest.MonkeyPatch) -> None:
    def advance(self: Any, chunks: list[Chunk]) -> None:
        for chunk in chunks:
            sequence = chunk.sequence
            first, sequence.num_computed = sequence.num_computed // self.block_tokens, chunk.end
            for at in range(first, -(-chunk.end // self.block_tokens)):
                self._publish(sequence, at, self.block_tokens)

    patch.setattr(Batcher, "advance", advance)


def a_row_of_the_budget_left_unused(patch: pytest.MonkeyPatch) -> None:
    original = Batcher._prefills
    patch.setattr(Batcher, "_prefills", lambda self, budget: original(self, budget - 1))


def the_first_preempted(patch: pytest.MonkeyPatch) -> None:
    original = Batcher.preempt
    patch.setattr(Batcher, "preempt", lambda self, _: original(self, self.running[0]))


def a_decode_skipped_for_a_prompt(patch: pytest.MonkeyPatch) -> None:
    original = Batcher._decodes
    patch.setattr(Batcher, "_decodes", lambda self: original(self)[: max(1, self.token_budget // 3)])


def _computing(plan_of: Callable[[Plan], Plan]) -> Any:
    original = BatcherHarness._compute
    return lambda self, plan: original(self, plan_of(plan))


MISTAKES = [
    shared_blocks_freed_by_the_first_to_go,
    blocks_leaked_by_sharing,
    blocks_found_after_they_were_handed_out,
    used_blocks_still_cached,
    weights_left_out_of_the_keys,
    blocks_known_by_their_tokens_alone,
    nothing_left_to_compute,
    one_token_too_many_copied,
    copies_not_made,
    copied_blocks_cleared,
    the_source_of_a_copy_handed_out_as_its_target,
    tails_found_with_a_token_too_many,
    blocks_found_before_they_are_full,
    a_row_of_the_budget_left_unused,
    the_first_preempted,
    a_decode_skipped_for_a_prompt,
]
SEARCH = settings(
    max_examples=400,
    stateful_step_count=30,
    deadline=None,
    database=None,
    derandomize=True,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)


def test_the_correct_batcher_passes_all_checks() -> None:
    run_state_machine_as_test(Arrivals, settings=settings(SEARCH, max_examples=40))


@pytest.mark.parametrize("plant", MISTAKES, ids=lambda plant: plant.__name__)
def test_an_injected_mistake_is_detected(
    plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    with pytest.raises(Exception):  # noqa: B017, PT011 - a mistake may fail with any error before it is checked
        run_state_machine_as_test(Arrivals, settings=SEARCH)


def test_the_blocks_that_the_first_waiting_request_needs_are_counted() -> None:
    bench = BatcherHarness(num_blocks=10, block_tokens=BLOCK, budget=64, max_requests=8)
    assert bench.batcher.num_next_blocks == 0
    bench.add(make(1, 6 * BLOCK, 9))
    bench.step()
    assert bench.batcher.num_next_blocks == 0
    bench.add(make(2, 8 * BLOCK + 1, 9), make(3, 1, 9))
    assert bench.batcher.num_next_blocks == 9
    assert bench.batcher.preempted == ()


def test_what_has_arrived_is_admitted_while_the_first_waits_and_others_are_not() -> None:
    batcher = Batcher(BlockPool(10), block_tokens=BLOCK, token_budget=64, max_requests=8)
    held = batcher.blocks.allocate(6)
    first, other, arrived = make(1, 5 * BLOCK, 9), make(2, BLOCK, 9), make(3, BLOCK, 9)
    arrived.has_arrived = True
    for sequence in (first, other, arrived):
        batcher.add(sequence)
    batcher.advance(batcher.schedule().chunks)
    assert (batcher.running, batcher.waiting) == ([arrived], [first, other])
    batcher.blocks.release(held)
    batcher.schedule()
    assert batcher.running == [first, other, arrived]


def test_preempted_requests_are_named() -> None:
    bench = BatcherHarness(num_blocks=8, block_tokens=BLOCK, budget=64, max_requests=8)
    bench.add(make(1, 2 * BLOCK, 4 * BLOCK), make(2, 3 * BLOCK, 4 * BLOCK))
    named = {bench.batcher.preempted for _ in steps_of(bench)}
    assert named == {(), (2,)}


@given(
    lengths=st.lists(st.tuples(st.integers(1, 24), st.booleans()), min_size=1, max_size=6),
    num_blocks=st.integers(9, 20),
    budget=st.integers(4, 24),
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_rows_that_are_scored_are_bounded_and_each_is_computed(
    monkeypatch: pytest.MonkeyPatch, lengths: list[tuple[int, bool]], num_blocks: int, budget: int
) -> None:
    """Whatever shares a prefix, waits or is preempted, every token of a prompt gets its log-probability."""
    monkeypatch.setattr(batching, "MAX_SCORED_ROWS", 5)
    batcher = Batcher(BlockPool(num_blocks), block_tokens=4, token_budget=budget, max_requests=4)
    asked: list[PromptScores] = []
    for ticket, (length, is_scored) in enumerate(lengths):
        sequence = make(ticket, [0] * length, 6)
        if is_scored:
            sequence.scores = PromptScores(sequence.tokens[:length], 0)
            asked.append(sequence.scores)
        batcher.add(sequence)
    while batcher.running or batcher.waiting:
        chunks = batcher.schedule().chunks
        pieces = [chunk.piece() for chunk in chunks]
        assert sum(piece.num_scored for piece in pieces) <= 5
        assert 0 < sum(chunk.num_tokens for chunk in chunks) <= budget
        batcher.advance(chunks)
        for chunk, piece in zip(chunks, pieces, strict=True):
            if chunk.sequence.scores is not None:
                chunk.sequence.scores.add(piece.start, torch.zeros(piece.num_scored, 2))
            if piece.samples:
                chunk.sequence.scores = None
                if chunk.sequence.append(0):
                    batcher.remove(chunk.sequence)
    assert [scores.num_scored for scores in asked] == [length for length, is_scored in lengths if is_scored]
