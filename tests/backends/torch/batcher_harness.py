"""A test harness without a model: runs the steps of a batcher and records the content of every KV slot.

The content of a slot is recorded as what its keys and values depend on: the weights, and all tokens up to its
own. A request that reads a slot with another content has read a wrong block. So are recurrent states, which a
request must continue after exactly the tokens that it has computed.
"""

from __future__ import annotations

from collections import Counter

from hotswap import Sampling
from hotswap.backends.torch.batcher import Batcher, Plan
from hotswap.backends.torch.blocks import BlockPool
from hotswap.backends.torch.kv import blocks_for
from hotswap.backends.torch.prefix import extend_keys
from hotswap.backends.torch.recurrent import SnapshotPool, StateCopy
from hotswap.backends.torch.sampling import Sampler
from hotswap.backends.torch.sequence import Sequence

Slot = tuple[bytes, tuple[int, ...]]

_NONSENSE: Slot = (b"nonsense", (-1,))


def make(
    ticket: int, prompt: int | list[int], count: int, *, priority: int = 0, root: bytes = b"m"
) -> Sequence:
    """Return a sequence; an integer `prompt` is the length of a generated one."""
    tokens = [ticket * 1000 + at for at in range(prompt)] if isinstance(prompt, int) else list(prompt)
    sampler = Sampler(Sampling(), (), ())
    return Sequence(ticket, tokens, len(tokens), len(tokens) + count, sampler, priority=priority, root=root)


class BatcherHarness:
    """Runs the steps of a batcher and checks all its invariants at each step.

    `num_blocks` may be a pool that has them.
    """

    def __init__(
        self,
        *,
        num_blocks: int | BlockPool,
        block_tokens: int,
        budget: int,
        max_requests: int,
        **options: int,
    ):
        self.pool = BlockPool(num_blocks) if isinstance(num_blocks, int) else num_blocks
        count = options.pop("snapshots", 0)
        slots = range(max_requests, max_requests + count)
        self.snapshots = SnapshotPool(slots) if count else None
        self.batcher = Batcher(
            self.pool,
            block_tokens=block_tokens,
            token_budget=budget,
            max_requests=max_requests,
            prefix_reuse=bool(options.pop("prefix_reuse", True)),
            snapshots=self.snapshots,
            **options,
        )
        self.memory: dict[tuple[int, int], Slot] = {}
        self.states: dict[int, Slot] = {}
        self.weights: dict[int, bytes] = {}
        self.ended: list[Sequence] = []
        self.num_computed_tokens = 0

    def add(self, *sequences: Sequence) -> None:
        """Queue requests."""
        for sequence in sequences:
            self.weights[sequence.ticket] = sequence.root
            self.batcher.add(sequence)

    def step(self) -> Plan:
        """Compute one step, as a model does, and sample."""
        decoding = [s for s in self.batcher.running if s.num_pending == 1]
        plan = self.batcher.schedule()
        self._check(plan, decoding)
        self._compute(plan)
        sampling = [chunk.sequence for chunk in plan.chunks if chunk.is_last]
        self.batcher.advance(plan.chunks)
        for sequence in sampling:
            # Equal weights and tokens give equal samples, so that requests share later blocks too.
            if sequence.append(_sampled(sequence)) is not None:
                self.batcher.remove(sequence)
                self.ended.append(sequence)
        self.check_accounting()
        return plan

    def fail(self) -> None:
        """Compute a step that fails, having written nonsense wherever it may; compute all requests anew."""
        plan = self.batcher.schedule()
        starts = {id(chunk.sequence): chunk.sequence.num_computed for chunk in plan.chunks}
        self._compute(plan)
        self.batcher.advance(plan.chunks)
        for chunk in plan.chunks:
            sequence = chunk.sequence
            for at in range(starts[id(sequence)], sequence.num_computed):
                block, offset = divmod(at, self.batcher.block_tokens)
                self._write(sequence.blocks[block], offset, _NONSENSE)
        for slot in (*(chunk.sequence.slot for chunk in plan.chunks), *(copy.target for copy in plan.saved)):
            self.states[slot] = _NONSENSE
        for sequence in tuple(self.batcher.running):
            self.batcher.recompute(sequence, starts.get(id(sequence), sequence.num_computed))
        self.check_accounting()

    def check_accounting(self) -> None:
        """Check that every block is free, cached or in use, with the right reference count."""
        pool = self.pool
        used = Counter(block for s in self.batcher.running for block in s.blocks)
        assert pool._ref_counts == used, "the reference count is the number of requests that use a block"
        free, cached, everything = list(pool._free), list(pool._cached), range(1, pool.most_blocks + 1)
        assert sorted([*free, *cached, *used, *pool._withdrawn]) == list(everything), "one state for each"
        assert pool.num_free == pool.num_blocks - len(used)
        assert set(pool._contents) >= set(cached)
        assert not set(pool._contents) & set(free)
        assert {block: content.key for block, content in pool._contents.items()} == {
            block: key for key, block in pool._by_key.items()
        }
        assert set(pool._by_start.values()) <= set(pool._contents)
        self._check_snapshots()
        assert all(not s.blocks and not s.num_computed for s in self.batcher.waiting)
        for block, content in pool._contents.items():
            for at, token in enumerate(content.tokens):
                assert self.memory[block, at][1][-1] == token, "a block has the content of its key"
        for sequence in self.batcher.running:
            self._check_slots(sequence, sequence.num_computed)

    def _check_snapshots(self) -> None:
        """Check that each slot has one owner, and that requests and snapshots have their own states."""
        batcher, pool = self.batcher, self.snapshots
        given = [sequence.slot for sequence in batcher.running]
        assert sorted([*given, *batcher._free_slots]) == list(range(batcher.max_requests))
        if pool is None:
            return
        kept = [*pool._slots.values(), *pool._free]
        assert sorted(kept) == [batcher.max_requests + at for at in range(pool.num_slots)]
        for sequence in batcher.running:
            if sequence.num_computed:
                assert self.states[sequence.slot] == self._slot(sequence, sequence.num_computed - 1)
        for key, slot in pool._slots.items():
            root, tokens = self.states[slot]
            assert _key_after(root, tokens, batcher.block_tokens) == key

    def _check(self, plan: Plan, decoding: list[Sequence]) -> None:
        batcher, chunks = self.batcher, plan.chunks
        assert len({id(chunk.sequence) for chunk in chunks}) == len(chunks), "one chunk for each request"
        assert all(chunk.sequence in batcher.running for chunk in chunks)
        assert all(1 <= chunk.num_tokens <= chunk.sequence.num_pending for chunk in chunks)
        assert chunks or not (batcher.running or batcher.waiting), "no step is empty while there is work"
        assert len(batcher.running) <= batcher.max_requests
        assert batcher.running == sorted(batcher.running, key=batcher._rank)
        assert batcher.waiting == sorted(batcher.waiting, key=batcher._rank)
        scheduled = {id(chunk.sequence) for chunk in chunks}
        for sequence in decoding:
            assert id(sequence) in scheduled or sequence in batcher.waiting, "no decode is skipped"
        backlog = sum(s.num_pending for s in batcher.running)
        if self.snapshots is None:
            assert plan.num_tokens == min(batcher.token_budget, backlog), "the budget is filled exactly"
        elif plan.num_tokens < min(batcher.token_budget, backlog):
            stopped = [chunk for chunk in chunks if not chunk.is_last]
            assert stopped
            assert all(chunk.end % batcher.block_tokens == 0 for chunk in stopped), "for a snapshot"
        for sequence in batcher.running:
            room = len(sequence.blocks) * batcher.block_tokens
            assert room >= len(sequence.tokens) - (
                sequence.num_pending == 1 and id(sequence) not in scheduled
            )
        if plan.num_tokens < batcher.token_budget and len(batcher.running) < batcher.max_requests:
            assert not batcher.waiting or not self._fits_without_reuse(batcher.waiting[0])

    def _fits_without_reuse(self, sequence: Sequence) -> bool:
        need = blocks_for(len(sequence.tokens), self.batcher.block_tokens) + len(self.batcher.running)
        return need <= self.pool.num_free

    def _compute(self, plan: Plan) -> None:
        block_tokens = self.batcher.block_tokens
        for copy in plan.copies:
            for at in range(block_tokens):
                slot = self.memory.get((copy.source, at)) if at < copy.num_tokens else None
                self._write(copy.target, at, slot)
        for block in plan.fresh:
            for at in range(block_tokens):
                self._write(block, at, None)
        self._copy_states(plan.restored)
        for chunk in plan.chunks:
            sequence = chunk.sequence
            if self.snapshots is not None and sequence.num_computed:
                continued = self.states[sequence.slot]
                assert continued == self._slot(sequence, sequence.num_computed - 1), "it continues its states"
            self.states[sequence.slot] = self._slot(sequence, chunk.end - 1)
            for at in range(sequence.num_computed, chunk.end):
                slot = self._slot(sequence, at)
                self._write(sequence.blocks[at // block_tokens], at % block_tokens, slot)
            self._check_slots(sequence, chunk.end)
            # Masked slots must be cleared: they are multiplied by zero, and a NaN would stay a NaN.
            for at in range(chunk.end, len(sequence.blocks) * block_tokens):
                assert (sequence.blocks[at // block_tokens], at % block_tokens) not in self.memory
            self.num_computed_tokens += chunk.num_tokens
        self._copy_states(plan.saved)

    def _copy_states(self, copies: tuple[StateCopy, ...]) -> None:
        for copy in copies:
            self.states[copy.target] = self.states[copy.source]

    def _slot(self, sequence: Sequence, at: int) -> Slot:
        return self.weights[sequence.ticket], tuple(sequence.tokens[: at + 1])

    def _write(self, block: int, at: int, slot: Slot | None) -> None:
        if slot is None:
            self.memory.pop((block, at), None)
        else:
            self.memory[block, at] = slot

    def _check_slots(self, sequence: Sequence, end: int) -> None:
        for at in range(end):
            block, offset = divmod(at, self.batcher.block_tokens)
            slot = self.memory.get((sequence.blocks[block], offset))
            assert slot == self._slot(sequence, at), "a request reads its own content"


def _key_after(root: bytes, tokens: tuple[int, ...], block_tokens: int) -> bytes:
    keys: list[bytes] = []
    assert len(tokens) % block_tokens == 0, "snapshots are made at boundaries of blocks"
    extend_keys(keys, root, tokens, block_tokens, num_blocks=len(tokens) // block_tokens)
    return keys[-1]


def _sampled(sequence: Sequence) -> int:
    return (sequence.root[0] + sum(sequence.tokens[-3:])) % 2
