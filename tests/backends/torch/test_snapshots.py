"""Snapshots of recurrent states are found with the blocks before them, and nothing else is continued."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import settings
from hypothesis.stateful import precondition, rule, run_state_machine_as_test

from hotswap.backends.torch import batcher as batching
from hotswap.backends.torch.batcher import Batcher, Plan
from hotswap.backends.torch.blocks import BlockPool
from hotswap.backends.torch.prefix import Prefix, extend_keys, find_continued, root_key
from hotswap.backends.torch.recurrent import SnapshotPool, StateCopy
from hotswap.backends.torch.sequence import Sequence
from tests.backends.torch.batcher_harness import BatcherHarness, make
from tests.backends.torch.test_batcher import SEARCH, Arrivals

BLOCK = 16
PROMPT = list(range(100, 140))


class ContinuedArrivals(Arrivals):
    """The same with recurrent states, of which there are few snapshots; steps fail, too."""

    keeps_states = True

    @precondition(lambda self: self.bench.batcher.running)
    @rule()
    def fail(self) -> None:
        self.bench.fail()


TestContinuedArrivals = ContinuedArrivals.TestCase
TestContinuedArrivals.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)


def bench_of(num_blocks: int = 60, snapshots: int = 8, budget: int = 64) -> BatcherHarness:
    return BatcherHarness(
        num_blocks=num_blocks, block_tokens=BLOCK, budget=budget, max_requests=8, snapshots=snapshots
    )


def run(bench: BatcherHarness, *sequences: Sequence) -> None:
    bench.add(*sequences)
    while bench.batcher.running or bench.batcher.waiting:
        bench.step()


# ---------------------------------------------------------------------- what is found


def test_an_equal_prompt_is_computed_from_its_last_full_block_on() -> None:
    bench = bench_of()
    for ticket, (length, reused) in enumerate([(40, 32), (32, 16), (33, 32), (16, 0), (1, 0)]):
        first, again = (make(2 * ticket + one, [ticket] * length, 3) for one in range(2))
        run(bench, first)
        run(bench, again)
        assert (first.num_reused, again.num_reused) == (0, reused)


@pytest.mark.parametrize("length", [5, 16, 31, 32, 40, 48])
@pytest.mark.parametrize("count", [1, 2, 15, 16, 17, 40])
def test_a_conversation_computes_at_most_one_block_of_what_it_had(length: int, count: int) -> None:
    """From the second turn on, wherever prompts and answers end within their blocks."""
    bench = bench_of()
    turn = make(1, PROMPT[:5] * length, count)
    run(bench, turn)
    for ticket in range(2, 5):
        following = make(ticket, [*turn.tokens, 5, 5, 5], count)
        run(bench, following)
        computed = len(turn.tokens) - 1  # the last token was sampled and never computed
        assert following.num_reused is not None
        assert computed - BLOCK < following.num_reused <= computed
        assert following.num_reused % BLOCK == 0
        turn = following


def test_a_shared_prefix_gets_a_snapshot_when_a_second_request_finds_it() -> None:
    bench = bench_of()
    prompts = [[*range(200, 250), *[at] * 30] for at in range(3)]
    sequences = [make(ticket, prompt, 3) for ticket, prompt in enumerate(prompts, start=1)]
    for sequence in sequences:
        run(bench, sequence)
    assert [one.num_reused for one in sequences] == [0, 0, 48]


def test_requests_that_run_at_once_share_the_blocks_of_a_snapshot() -> None:
    bench = bench_of()
    bench.add(make(1, PROMPT, 20))
    bench.step()
    bench.step()
    used = bench.pool.num_blocks - bench.pool.num_free
    samples = [make(ticket, PROMPT, 20) for ticket in (2, 3, 4)]
    bench.add(*samples)
    bench.step()
    assert [one.num_reused for one in samples] == [32, 32, 32]
    assert bench.pool.num_blocks - bench.pool.num_free == used + 3, "one block each for their own tokens"


def test_a_request_that_was_preempted_goes_on_from_its_last_block() -> None:
    bench = bench_of()
    sequence = make(1, PROMPT, 60)
    bench.add(sequence)
    while len(sequence.tokens) < 70:
        bench.step()
    bench.batcher.preempt(sequence)
    num_computed = bench.num_computed_tokens
    bench.step()
    assert bench.num_computed_tokens - num_computed == len(sequence.tokens) - 1 - 64
    assert sequence.num_reused == 0, "nothing was there at its first admission"


def test_other_weights_and_other_adapters_share_nothing() -> None:
    bench = bench_of(snapshots=20)
    roots = (root_key("1"), root_key("2"), root_key("2", b"1"), root_key("2", b"2"))
    for ticket, root in enumerate(roots, start=1):
        sequence = make(ticket, PROMPT, 5, root=root)
        run(bench, sequence)
        assert sequence.num_reused == 0


def test_a_snapshot_whose_blocks_were_allocated_again_is_not_used() -> None:
    bench = bench_of(num_blocks=8, snapshots=20)
    run(bench, make(1, PROMPT, 3))
    run(bench, make(2, [7] * 100, 3))  # takes seven blocks
    again = make(3, PROMPT, 3)
    run(bench, again)
    assert again.num_reused == 0


def test_the_least_recently_used_snapshot_is_replaced() -> None:
    bench = bench_of(snapshots=2)
    for ticket, first in enumerate((1, 2, 1, 3), start=1):
        run(bench, make(ticket, [first] * 40, 2))
    again = {first: make(10 + first, [first] * 40, 2) for first in (1, 2)}
    run(bench, again[1])
    run(bench, again[2])
    assert (again[1].num_reused, again[2].num_reused) == (32, 0)


def test_a_request_that_decodes_keeps_two_snapshots_whatever_its_length() -> None:
    """One of its prompt, and the last; so long answers take nothing from others."""
    bench = bench_of(num_blocks=100, snapshots=8)
    others = [make(ticket, [ticket] * 40, 2) for ticket in range(1, 7)]
    for other in others:
        run(bench, other)
    assert bench.snapshots is not None
    assert len(bench.snapshots) == 6
    run(bench, make(10, PROMPT, 400))
    assert len(bench.snapshots) == 8
    for other in others:
        again = make(20 + other.ticket, other.tokens[:40], 2)
        run(bench, again)
        assert again.num_reused == 32


def test_prompts_take_one_step_more_for_their_snapshot_and_none_without_a_full_block() -> None:
    bench = bench_of(budget=64)
    for ticket, (length, steps) in enumerate([(16, 1), (17, 2), (40, 2), (64, 2), (65, 2), (100, 3)]):
        bench.add(make(ticket, [ticket] * length, 1))
        taken = 0
        while bench.batcher.running or bench.batcher.waiting:
            bench.step()
            taken += 1
        assert taken == steps


# ---------------------------------------------------------------------- mistakes that the checks must detect


def snapshots_with_a_token_too_many(patch: pytest.MonkeyPatch) -> None:
    """They are found by the key of a block, and have the states after the token that follows."""

    def save(self: Batcher, chunks: Any) -> Any:
        for chunk in chunks:
            if chunk.end % self.block_tokens == 1 and chunk.end > 1 and self.snapshots is not None:
                sequence, num_blocks = chunk.sequence, chunk.end // self.block_tokens
                extend_keys(
                    sequence.keys, sequence.root, sequence.tokens, self.block_tokens, num_blocks=num_blocks
                )
                if (slot := self.snapshots.save(sequence.keys[num_blocks - 1])) is not None:
                    yield StateCopy(sequence.slot, slot)

    patch.setattr(Batcher, "_save_states", save)


def snapshots_of_the_block_before(patch: pytest.MonkeyPatch) -> None:
    original = find_continued

    def find(pool: Any, snapshots: Any, keys: Any, tokens: Any, block_tokens: int) -> Prefix:
        found = original(pool, snapshots, keys, tokens, block_tokens)
        blocks = tuple(pool.find(key) for key in keys[: found.num_found])
        return found if found.snapshot is None else replace(found, blocks=blocks)

    patch.setattr(batching, "find_continued", find)


def snapshots_overwritten_before_they_are_read(patch: pytest.MonkeyPatch) -> None:
    original = BatcherHarness._compute

    def compute(self: BatcherHarness, plan: Plan) -> None:
        targets = {copy.target for copy in plan.saved}
        torn = tuple(copy for copy in plan.restored if copy.source in targets)
        for copy in torn:  # the memory is written to while it is read
            self.states[copy.source] = (b"torn", (0,))
        original(self, plan)

    patch.setattr(BatcherHarness, "_compute", compute)


def states_copied_after_the_step(patch: pytest.MonkeyPatch) -> None:
    original = Batcher.schedule

    def schedule(self: Batcher) -> Plan:
        plan = original(self)
        return replace(plan, restored=(), saved=(*plan.restored, *plan.saved))

    patch.setattr(Batcher, "schedule", schedule)


def weights_left_out_of_the_keys(patch: pytest.MonkeyPatch) -> None:
    original = Batcher.add

    def add(self: Any, sequence: Sequence) -> None:
        sequence.root = b"one for all"
        original(self, sequence)

    patch.setattr(Batcher, "add", add)


def keys_of_the_next_block(patch: pytest.MonkeyPatch) -> None:
    original = SnapshotPool.longest
    patch.setattr(
        SnapshotPool, "longest", lambda self, keys: min(original(self, keys) + 1, len(keys)) if keys else 0
    )
    patch.setattr(SnapshotPool, "use", lambda self, key: next(iter(self._slots.values()), 9))


def slots_shared_by_two_snapshots(patch: pytest.MonkeyPatch) -> None:
    original = SnapshotPool.save

    def save(self: SnapshotPool, key: bytes, *, replaced: bytes | None = None) -> int | None:
        before = None if replaced is None else self._slots.get(replaced)
        slot = original(self, key, replaced=replaced)
        if before is not None and slot == before and replaced is not None:
            self._slots[replaced] = before
        return slot

    patch.setattr(SnapshotPool, "save", save)


def states_not_copied(patch: pytest.MonkeyPatch) -> None:
    original = Batcher.schedule
    patch.setattr(Batcher, "schedule", lambda self: replace(original(self), restored=()))


def snapshots_of_a_step_that_failed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SnapshotPool, "drop", lambda self, keys: None)


def blocks_of_a_step_that_failed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(BlockPool, "retract", lambda self, block: None)


MISTAKES = [
    snapshots_with_a_token_too_many,
    snapshots_of_the_block_before,
    snapshots_overwritten_before_they_are_read,
    states_copied_after_the_step,
    weights_left_out_of_the_keys,
    keys_of_the_next_block,
    slots_shared_by_two_snapshots,
    states_not_copied,
    snapshots_of_a_step_that_failed,
    blocks_of_a_step_that_failed,
]


@pytest.mark.parametrize("plant", MISTAKES, ids=lambda plant: plant.__name__)
def test_an_injected_mistake_is_detected(
    plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    with pytest.raises(Exception):  # noqa: B017, PT011 - a mistake may fail with any error before it is checked
        run_state_machine_as_test(ContinuedArrivals, settings=SEARCH)
