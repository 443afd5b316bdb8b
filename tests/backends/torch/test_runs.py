"""What decodes keep from step to step is what their blocks hold, within its memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from hotswap.backends.torch.blocks import Copy
from hotswap.backends.torch.kv import KVCache, LayerShape, lines_of
from hotswap.backends.torch.runs import Prelude, Row, Run, Runs

BLOCK, HEADS, DIM, NUM_BLOCKS = 16, 2, 4, 24
LAYERS = (LayerShape(HEADS, DIM, DIM, torch.float32),) * 2
ROW_BYTES = HEADS * DIM * 4


class Decoding:
    """Some requests that write a token each in every step, and read all of theirs through a run."""

    def __init__(
        self, runs_bytes: int, *, across: bool = False, dtype: torch.dtype = torch.float32, fixed: float = 1e9
    ) -> None:
        self.across, self.dtype = across, dtype
        layers = [replace(layer, dtype=dtype) for layer in LAYERS]
        self.cache = KVCache(NUM_BLOCKS, BLOCK, torch.device("cpu"), layers, runs_bytes=runs_bytes)
        self.cache.runs.grouping = replace(self.cache.runs.grouping, fixed=fixed)
        self.free = list(range(1, NUM_BLOCKS + 1))
        self.requests: list[tuple[list[int], int]] = []
        self.num_gathered = 0  # requests, in a layer, whole

    def add(self, num_tokens: int) -> None:
        """A request whose prompt is in its blocks; its next token is the one at position `num_tokens`."""
        blocks: list[int] = []
        self.requests.append((blocks, num_tokens))
        for at in range(num_tokens):
            self._grow(blocks, at)
            self._write([(blocks, at)], layers=(0, 1))

    def foresee(self, random: Random) -> Prelude | None:
        """Have some of the last request's full blocks gathered before its first step, in some layers."""
        blocks, num_tokens = self.requests[-1]
        if num_tokens < BLOCK:
            return None
        prelude = self.cache.runs.prelude(blocks[: random.randint(1, num_tokens // BLOCK)])
        for layer in random.sample([0, 1], random.randint(0, 2)):
            self.cache.prepare(prelude, layer)
        if random.random() < 0.8:
            self.cache.runs.release(prelude)
        return prelude

    def leave(self, index: int) -> None:
        blocks, _ = self.requests.pop(index)
        self.free += blocks

    def step(self, layers: tuple[int, ...] = (0, 1), only: Sequence[int] | None = None) -> list[Run]:
        """Compute a token for each, or only for some, and compare what is read with what the blocks hold."""
        rows: list[Row] = []
        stepping = range(len(self.requests)) if only is None else only
        for index in stepping:
            blocks, at = self.requests[index]
            self._grow(blocks, at)
            rows.append((list(blocks), at))
            self.requests[index] = blocks, at + 1
        self.cache.runs.begin()
        runs = self.cache.runs.arrange(rows)
        for layer in layers:
            keys, values = self._write(rows, layers=(layer,))
            for run in runs or ():
                order = run.rows
                self._compare(run, layer, [rows[row] for row in order], keys[order], values[order])
        self._check_sums()
        if runs is not None:
            assert sorted(row for run in runs for row in run.rows) == list(range(len(rows)))
        return runs or []

    def _compare(self, run: Run, layer: int, rows: list[Row], keys: Tensor, values: Tensor) -> None:
        width = max(len(blocks) for blocks, _ in rows)
        table = torch.tensor([[*blocks, *[0] * (width - len(blocks))] for blocks, _ in rows])

        def gather() -> tuple[Tensor, Tensor]:
            self.num_gathered += len(rows)
            return self.cache.gather(layer, lines_of(table, HEADS), len(rows))

        def gather_one(index: int, first: int) -> tuple[Tensor, Tensor]:
            self.num_gathered += first == 0
            blocks, _ = rows[index]
            return self.cache.gather(layer, lines_of(torch.tensor([blocks[first:]]), HEADS), 1)

        parts = run.read(layer, keys, values, width * BLOCK, gather, gather_one, across=self.across)
        read = [part.clone() for part in parts]
        for part, pool in zip(read, (self.cache._keys[layer], self.cache._values[layer]), strict=True):
            for row, (blocks, at) in zip(part, rows, strict=True):
                held = torch.cat(list(pool[blocks]), 1)[:, : at + 1]
                # Bit by bit: where a layer missed a step, keys are not numbers.
                assert torch.equal(_bits(row[:, : at + 1]), _bits(held))
        assert torch.isfinite(read[1]).all(), "a masked value must be a number"

    def _check_sums(self) -> None:
        """All memory is lent once, or free, and what is known of requests is of those in runs."""
        runs = self.cache.runs
        layers = [kept for run in runs._runs for kept in run._layers.values()]
        layers += [kept for prelude in runs._preludes for kept in prelude.layers.values()]
        buffers = [*runs.lender._free, *(buffer for kept in layers for buffer in kept.buffers)]
        assert len(set(map(id, buffers))) == len(buffers)
        assert sum(map(len, buffers)) == runs.used_bytes
        held = {block for run in runs._runs for seat in run.members for block in seat.blocks}
        assert held == runs._holders.keys()

    def _grow(self, blocks: list[int], at: int) -> None:
        if at % BLOCK == 0:
            blocks.append(self.free.pop(0))
            self.cache.clear(blocks[-1:])

    def _write(self, rows: list[Row], layers: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        keys, values = torch.randn(2, len(rows), HEADS, DIM, dtype=self.dtype)
        blocks = torch.tensor([blocks[at // BLOCK] for blocks, at in rows], dtype=torch.long)
        offsets = torch.tensor([at % BLOCK for _, at in rows], dtype=torch.long)
        for layer in layers:
            self.cache.write(layer, keys.transpose(0, 1)[None], values.transpose(0, 1)[None], blocks, offsets)
        return keys, values


def _bits(part: Tensor) -> Tensor:
    return part.contiguous().view(torch.uint8)


@given(
    st.integers(0, 1 << 32),
    st.sampled_from([1 << 20, 30_000, 9_000]),
    st.booleans(),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.sampled_from([0.0, 1.0, 1e9]),
)
def test_what_is_read_is_what_the_blocks_hold_whoever_comes_and_goes(
    seed: int, runs_bytes: int, across: bool, dtype: torch.dtype, fixed: float
) -> None:
    """Whatever a run costs beside what is read: nothing, then each length has its own, or all too much."""
    random = Random(seed)
    decoding = Decoding(runs_bytes, across=across, dtype=dtype, fixed=fixed)
    for pool in (*decoding.cache._keys.values(), *decoding.cache._values.values()):
        pool[1:] = float("nan")  # what a block held before it was handed out
    for _ in range(40):
        if len(decoding.requests) < 5 and len(decoding.free) > 8 and random.random() < 0.3:
            decoding.add(random.choice([1, 15, 16, 40]))
            if random.random() < 0.3:
                decoding.foresee(random)
        elif (decoding.requests and random.random() < 0.2) or len(decoding.free) < 6:
            decoding.leave(random.randrange(len(decoding.requests)))
        if random.random() < 0.2 and decoding.requests:
            random.shuffle(decoding.requests)
        num_stepping = len(decoding.requests) if random.random() < 0.7 else random.randint(0, 5)
        stepping = random.sample(range(len(decoding.requests)), min(num_stepping, len(decoding.requests)))
        decoding.step(random.choice([(0, 1), (0, 1), (0, 1), (0,), (0, 1, 1)]), stepping)
        assert decoding.cache.runs.used_bytes <= runs_bytes


def test_a_request_is_gathered_once_and_then_no_more() -> None:
    decoding = Decoding(1 << 20)
    decoding.add(3)
    decoding.add(20)
    for _ in range(30):
        decoding.step()
    assert decoding.num_gathered == 2 * len(LAYERS)


def test_who_comes_is_gathered_alone_and_who_leaves_costs_one_at_most() -> None:
    """The others stay where they are, and the last one takes the slot that is left."""
    decoding = Decoding(1 << 20)
    for _ in range(4):
        decoding.add(16)
    decoding.step()
    assert decoding.num_gathered == 4 * len(LAYERS)
    decoding.add(17)
    decoding.step()
    assert decoding.num_gathered == 5 * len(LAYERS)
    decoding.leave(0)
    decoding.step()
    assert decoding.num_gathered == 6 * len(LAYERS)
    decoding.leave(0)
    decoding.add(18)
    decoding.step()
    assert decoding.num_gathered == 7 * len(LAYERS), "the newcomer took the slot"


def test_requests_that_take_turns_keep_what_was_gathered() -> None:
    """As the parts of a batch do in a pipeline."""
    decoding = Decoding(1 << 20)
    for _ in range(4):
        decoding.add(10)
    for _ in range(20):
        decoding.step(only=(0, 1))
        decoding.step(only=(2, 3))
    assert decoding.num_gathered == 4 * len(LAYERS)


def test_one_that_steps_with_others_for_once_leaves_those_that_wait_where_they_are() -> None:
    decoding = Decoding(1 << 20)
    for _ in range(6):
        decoding.add(10)
    for _ in range(3):
        decoding.step(only=(0, 1, 2))
        decoding.step(only=(3, 4, 5))
    before = decoding.num_gathered
    decoding.step(only=(0, 3, 4, 5))
    decoding.step(only=(1, 2))
    assert decoding.num_gathered <= before + 2 * len(LAYERS), "it, and who took its slot"


def test_short_requests_are_not_read_as_wide_as_a_long_one() -> None:
    decoding = Decoding(1 << 20, fixed=2.0)
    for num_tokens in (1, 1, 1, 100):
        decoding.add(num_tokens)
    assert sorted(len(run.rows) for run in decoding.step()) == [1, 3]


def test_room_that_a_long_request_left_behind_is_not_read_for_long() -> None:
    """In bf16 slots are read up to their end."""
    decoding = Decoding(1 << 20, dtype=torch.bfloat16, fixed=20.0)
    for num_tokens in (100, 1, 1, 1, 1):
        decoding.add(num_tokens)
    (run,) = decoding.step()
    assert run.width >= 7
    decoding.leave(0)
    decoding.step()
    (run,) = decoding.step()
    assert run.width == run.capacity == 3, "one block, and room for two"


@pytest.mark.parametrize("across", [False, True])
def test_keys_that_are_kept_lie_as_rows_or_as_columns(across: bool) -> None:
    """What is multiplied by them would else be copied in every step."""
    decoding = Decoding(1 << 20, across=across)
    decoding.add(20)
    for _ in range(3):
        decoding.step()
    blocks, at = decoding.requests[0]
    decoding.cache.runs.begin()
    (run,) = decoding.cache.runs.arrange([(blocks, at)]) or []
    one = torch.zeros(1, HEADS, DIM)
    keys, values = run.read(
        0,
        one,
        one,
        len(blocks) * BLOCK,
        lambda: pytest.fail("it is kept"),
        lambda index, first: pytest.fail("it is kept"),
    )
    assert keys.shape[2] == values.shape[2] == len(blocks) * BLOCK, "no more than that is read"
    assert keys.stride(-2 if across else -1) == 1
    assert values.stride(-1) == 1


def test_a_request_that_was_foreseen_gathers_nothing_but_its_tail() -> None:
    decoding = Decoding(1 << 20)
    decoding.add(40)
    decoding.step()
    decoding.add(40)
    prelude = decoding.cache.runs.prelude(decoding.requests[1][0][:2])
    for layer in range(len(LAYERS)):
        decoding.cache.prepare(prelude, layer)
    assert sorted(map(len, (run.rows for run in decoding.step()))) == [1, 1], "it brings what it has"
    assert decoding.num_gathered == len(LAYERS), "the other"
    for _ in range(20):
        assert len(decoding.step()) == 1
    assert decoding.num_gathered == 2 * len(LAYERS), "to be with the other"


def test_a_prelude_of_blocks_that_were_handed_on_is_not_read() -> None:
    decoding = Decoding(1 << 20)
    decoding.add(32)
    blocks, _ = decoding.requests[0]
    prelude = decoding.cache.runs.prelude(blocks)
    for layer in range(len(LAYERS)):
        decoding.cache.prepare(prelude, layer)
    decoding.cache.clear(blocks)
    decoding.cache._keys[0][blocks] = 7.0
    decoding.step()
    assert decoding.num_gathered == len(LAYERS)


def test_what_was_foreseen_and_never_came_gives_its_memory_back() -> None:
    decoding = Decoding(1 << 20)
    decoding.add(32)
    prelude = decoding.cache.runs.prelude(decoding.requests[0][0])
    decoding.cache.prepare(prelude, 0)
    held = decoding.cache.runs.used_bytes
    decoding.leave(0)
    for _ in range(20):
        decoding.step()
    assert prelude.layers, "it is awaited"
    decoding.cache.runs.release(prelude)
    for _ in range(20):
        decoding.step()
    assert not prelude.layers
    assert len(decoding.cache.runs.lender.take([held // 2, held // 2])) == 2
    assert decoding.cache.runs.used_bytes == held, "its memory serves others"


def test_a_block_that_was_handed_on_is_not_read_from_a_run() -> None:
    """The same ids, positions in turn, and other bytes: only that the block was cleared tells."""
    decoding = Decoding(1 << 20)
    decoding.add(16)
    for _ in range(4):
        decoding.step()
    blocks, at = decoding.requests[0]
    decoding.cache.clear(blocks)
    decoding.cache._keys[0][blocks] = 7.0
    decoding.step()
    assert at == 20


def test_a_block_that_was_copied_over_is_not_read_from_a_run() -> None:
    decoding = Decoding(1 << 20)
    decoding.add(16)
    decoding.add(16)
    for _ in range(4):
        decoding.step()
    (source, _), (target, _) = decoding.requests
    decoding.cache.copy([Copy(source[0], target[0], 16)])
    decoding.step()


def test_tokens_that_came_past_a_run_are_read_too() -> None:
    """As with a chunk of two, in blocks that the request has already."""
    decoding = Decoding(1 << 20)
    decoding.add(16)
    for _ in range(4):
        decoding.step()
    blocks, at = decoding.requests[0]
    for past in (at, at + 1):
        decoding._write([(blocks, past)], layers=(0, 1))
    decoding.requests[0] = blocks, at + 2
    decoding.step()


def test_memory_that_is_wanted_is_given_back_with_the_next_step() -> None:
    decoding = Decoding(1 << 20)
    decoding.add(16)
    for _ in range(3):
        decoding.step()
    runs = decoding.cache.runs
    assert runs.used_bytes > 0
    runs.fit(0)
    decoding.step()
    assert runs.used_bytes == 0
    runs.fit(1 << 30)
    for _ in range(3):
        decoding.step()
    assert 0 < runs.used_bytes <= 1 << 20


def test_the_memory_of_runs_that_ended_serves_the_next() -> None:
    decoding, used_bytes = Decoding(1 << 20, fixed=2.0), set[int]()
    for _ in range(4):
        for num_tokens in (1, 16, 60):
            decoding.add(num_tokens)
        for _ in range(40):  # rooms are outgrown meanwhile
            decoding.step()
        while decoding.requests:
            decoding.leave(0)
        for _ in range(10):
            decoding.step()
        used_bytes.add(decoding.cache.runs.used_bytes)
    assert len(used_bytes) == 1
    assert not decoding.cache.runs._holders, "nothing is known of requests that are gone"


def test_what_a_run_needs_no_more_is_given_back() -> None:
    decoding = Decoding(1 << 20)
    for num_tokens in (230, *[1] * 9):
        decoding.add(num_tokens)
    decoding.step()
    kept = decoding.cache.runs.used_bytes
    for _ in range(8):
        decoding.leave(0)
        decoding.step()
    free = sum(map(len, decoding.cache.runs.lender._free))
    assert kept - free < kept / 4, "two short requests are left of ten"
    assert decoding.num_gathered <= 18 * len(LAYERS), "what is left was copied"


def test_requests_stay_where_they_are_if_nothing_changes() -> None:
    """In bf16 they are read with the room they will have, which counts from the first."""
    decoding = Decoding(1 << 20, dtype=torch.bfloat16)
    decoding.cache.runs.grouping = replace(decoding.cache.runs.grouping, most=14)
    for _ in range(6):
        decoding.add(17)
    for _ in range(12):
        assert sorted(len(run.rows) for run in decoding.step()) == [3, 3], "two blocks, and room for two"
    assert decoding.num_gathered == 6 * len(LAYERS)


def test_a_prelude_too_small_for_its_request_is_not_begun_with() -> None:
    decoding = Decoding(1 << 20)
    decoding.add(100)
    prelude = decoding.cache.runs.prelude(decoding.requests[0][0][:1])
    for layer in range(len(LAYERS)):
        decoding.cache.prepare(prelude, layer)
    decoding.step()
    assert decoding.num_gathered == len(LAYERS)


def test_requests_that_share_their_first_blocks_are_told_apart() -> None:
    decoding = Decoding(1 << 20)
    decoding.add(32)
    blocks, _ = decoding.requests[0]
    for _ in range(3):
        decoding.requests.append((list(blocks), 32))
    for _ in range(20):
        decoding.step()
    assert decoding.num_gathered == 4 * len(LAYERS)


def test_a_run_that_outlived_its_longest_takes_more_requests_in_less_room() -> None:
    decoding = Decoding(1 << 20)
    for num_tokens in (200, 1):
        decoding.add(num_tokens)
    decoding.step()
    decoding.leave(0)
    for _ in range(6):
        decoding.add(1)
        decoding.step()
    assert len(decoding.step()) == 1


def test_what_is_kept_is_given_up_where_less_memory_is_left_than_it_takes() -> None:
    decoding = Decoding(1 << 20)
    decoding.add(16)
    decoding.step()
    runs, before = decoding.cache.runs, decoding.num_gathered
    runs.fit(runs.used_bytes)
    decoding.step()
    assert decoding.num_gathered == before, "it just fits"
    runs.fit(runs.used_bytes - 1)
    decoding.step()
    assert decoding.num_gathered == before + len(LAYERS)


def test_a_request_is_not_taken_for_another_that_shares_a_block() -> None:
    """With the same position next, and another beginning."""
    decoding = Decoding(1 << 20)
    decoding.add(31)
    decoding.step()
    (first, shared), at = decoding.requests[0]
    other = decoding.free.pop()
    decoding.cache.clear([other])  # as any block that is handed out; it holds whatever lay in memory before
    decoding.cache._keys[0][other] = 7.0
    decoding.requests[0] = [other, shared], at
    decoding.step()
    assert first != other


def test_requests_of_about_one_length_are_read_together() -> None:
    cache = KVCache(NUM_BLOCKS, BLOCK, torch.device("cpu"), LAYERS, runs_bytes=1 << 20)
    cache.runs.begin()
    (run,) = cache.runs.arrange([([1], 3), ([2, 3], 20), ([4, 5, 6], 40)]) or []
    assert sorted(run.rows) == [0, 1, 2]


def test_a_prelude_that_was_dropped_takes_no_memory() -> None:
    decoding = Decoding(1 << 20)
    decoding.add(32)
    runs = decoding.cache.runs
    prelude = runs.prelude(decoding.requests[0][0])
    decoding.cache.prepare(prelude, 0)
    held = runs.used_bytes
    runs.drop(prelude)
    decoding.cache.prepare(prelude, 0)
    assert not prelude.layers
    assert len(runs.lender.take([held // 2, held // 2])) == 2
    assert runs.used_bytes == held, "its memory serves others"


@pytest.mark.parametrize("num_bytes", [0, 100])
def test_without_room_nothing_is_kept(num_bytes: int) -> None:
    decoding = Decoding(num_bytes)
    decoding.add(16)
    for _ in range(5):
        decoding.step()
    assert decoding.cache.runs.used_bytes == 0
    if not num_bytes:
        assert decoding.cache.runs.arrange([([1], 3)]) is None, "as on a GPU"
    assert "0 of" in repr(Runs(0, BLOCK))
