"""The batcher's books balance, nothing admitted starves, and every token is computed once."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hotswap import Sampling
from hotswap.backends.torch.batcher import Batcher, Sequence
from hotswap.backends.torch.kv import BlockPool, blocks_for
from hotswap.backends.torch.sampling import Sampler

BLOCK = 16
NUM_BLOCKS = 12


def make(ticket: int, prompt: int, count: int) -> Sequence:
    return Sequence(ticket, [0] * prompt, prompt, prompt + count, Sampler(Sampling(), (), ()))


@given(
    wishes=st.lists(st.tuples(st.integers(1, 100), st.integers(1, 90)), min_size=1, max_size=12),
    budget=st.integers(4, 80),
    aborts=st.lists(st.tuples(st.integers(0, 60), st.integers(1, 12)), max_size=3),
)
def test_everything_admitted_ends_and_gives_its_blocks_back(
    wishes: list[tuple[int, int]], budget: int, aborts: list[tuple[int, int]]
) -> None:
    pool = BlockPool(NUM_BLOCKS)
    batcher = Batcher(pool, block_tokens=BLOCK, token_budget=budget, max_requests=4)
    sequences = [make(ticket, *wish) for ticket, wish in enumerate(wishes, start=1)]
    for sequence in sequences:
        batcher.add(sequence)
    ended: set[int] = set()
    steps = 0
    while batcher.running or batcher.waiting:
        for at, ticket in aborts:
            if at == steps and ticket <= len(sequences):
                batcher.remove(sequences[ticket - 1])
                ended.add(ticket)
        chunks, fresh = batcher.schedule()
        held = [block for sequence in batcher.running for block in sequence.blocks]
        assert len(held) == len(set(held)) == NUM_BLOCKS - pool.num_free, "a block has one holder"
        assert set(fresh) <= set(held)
        assert sum(chunk.num_tokens for chunk in chunks) <= budget
        assert chunks or not (batcher.running or batcher.waiting), "no step is empty while there is work"
        for chunk in chunks:
            sequence = chunk.sequence
            assert blocks_for(chunk.end, BLOCK) <= len(sequence.blocks)
            is_last, sequence.num_computed = chunk.is_last, chunk.end
            if is_last and sequence.append(0) is not None:
                batcher.remove(sequence)
                ended.add(sequence.ticket)
        steps += 1
        assert steps < 5000, "somebody starves"
    assert ended == {sequence.ticket for sequence in sequences}
    assert pool.num_free == NUM_BLOCKS


def test_decodes_go_first_and_prompts_fill_the_rest() -> None:
    batcher = Batcher(BlockPool(100), block_tokens=BLOCK, token_budget=20, max_requests=8)
    old, long, young = make(1, 5, 9), make(2, 50, 9), make(3, 30, 9)
    batcher.add(old)
    assert [(c.sequence, c.num_tokens) for c in batcher.schedule()[0]] == [(old, 5)]
    old.num_computed = 5
    old.append(0)
    batcher.add(long)
    batcher.add(young)
    assert [(c.sequence, c.num_tokens) for c in batcher.schedule()[0]] == [(old, 1), (long, 19)]
    old.num_computed, long.num_computed = 6, 45
    old.append(0)
    chunks, _ = batcher.schedule()
    assert [(c.sequence, c.num_tokens) for c in chunks] == [(old, 1), (long, 5), (young, 14)]


def test_the_youngest_is_preempted_and_waits_at_the_head() -> None:
    batcher = Batcher(BlockPool(4), block_tokens=BLOCK, token_budget=64, max_requests=8)
    old, young, last = make(1, 16, 40), make(2, 15, 40), make(3, 1, 1)
    for sequence in (old, young):
        batcher.add(sequence)
    batcher.schedule()
    for sequence in (old, young):
        sequence.num_computed = len(sequence.tokens)
        sequence.append(0)
    batcher.add(last)
    young.tokens += [0] * 17  # it has decoded on, until the blocks ran out
    young.blocks += batcher.blocks.take(2)
    young.num_computed = len(young.tokens) - 1
    chunks, fresh = batcher.schedule()
    assert [chunk.sequence for chunk in chunks] == [old]
    assert list(batcher.waiting) == [young, last]
    assert (young.blocks, young.num_computed) == ([], 0)
    assert fresh == old.blocks[1:]
    assert batcher.num_preempted == 1
