"""Continuous batching: which tokens of which requests the next step computes.

A step contains every request that decodes, then prefill chunks up to `token_budget` rows (Dynamic SplitFuse:
Holmes et al., DeepSpeed-FastGen, arXiv:2401.08671, section 3), so that long prompts neither delay decodes nor
leave a step half empty. At most `MAX_SCORED_ROWS` of them are of prompts whose log-probabilities are asked
for, which need the logits of every row. All decisions follow the *rank* of requests: the order of arrival, in
which one level of priority counts as a fixed number of arrivals. When no KV block is free, the request with
the last rank is preempted: its blocks are released, it waits, and it is recomputed except for blocks that are
still cached. A pool that can grow does so before a request waits or is preempted.

A model with recurrent states goes on from a snapshot of the states after a prefix (`SnapshotPool`). A part of
a prompt ends where one is made: after the last full block, and where a prefix that was found has none. While
a request decodes, one follows it from block to block.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator
from collections.abc import Sequence as Items
from dataclasses import dataclass
from itertools import chain

from hotswap.backends.torch.arrival import Arrival
from hotswap.backends.torch.blocks import BlockPool, Content, Copy
from hotswap.backends.torch.forward import MAX_SCORED_ROWS
from hotswap.backends.torch.kv import blocks_for
from hotswap.backends.torch.prefix import Prefix, block_content, extend_keys, find_continued, find_prefix
from hotswap.backends.torch.recurrent.snapshots import SnapshotPool, StateCopy
from hotswap.backends.torch.sequence import Chunk, Sequence

__all__ = ["Batcher", "Plan"]


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """The work of one step.

    Attributes:
        chunks: The tokens to compute.
        copies: Block copies to make first, in order.
        fresh: Other newly allocated blocks, to be cleared after the copies.
        restored: Snapshots that become the states of requests before the step.
        saved: States that become snapshots after the step.
    """

    chunks: list[Chunk]
    copies: tuple[Copy, ...] = ()
    fresh: tuple[int, ...] = ()
    restored: tuple[StateCopy, ...] = ()
    saved: tuple[StateCopy, ...] = ()

    @property
    def num_tokens(self) -> int:
        """The number of rows of the step."""
        return sum(chunk.num_tokens for chunk in self.chunks)


class Batcher:
    """The queue of an engine and the block tables of its running requests; forms the batches.

    `running` and `waiting` are in order of rank. A request of priority *p* goes ahead of requests of priority
    0 that arrived at most *p* times `priority_places` requests before it, and no request is overtaken by more
    arrivals than that. The first in rank is never preempted and waits for blocks only until other requests
    end, so every admitted request ends. Requests whose blocks have arrived are admitted while it waits: they
    hold blocks that it may wait for. The caller must not add a request that needs more blocks than the pool
    has.

    With `num_batches` > 1 as many batches are in flight at once. Each gets its share of the decodes and of
    the token budget, so that the stages of a pipeline take equally long. A request that waits for a token of
    a batch in flight has no pending token, and so is in no other batch.

    Args:
        blocks: The KV block pool; only this batcher changes it.
        block_tokens: Tokens per KV block.
        token_budget: The maximum number of tokens of a step, at least `max_requests`; may be changed between
            two steps.
        max_requests: The maximum number of running requests.
        num_batches: Batches in flight at once; computed in the order in which they were scheduled.
        prefix_reuse: Whether requests share blocks of common prefixes, also with ended requests.
        snapshots: Has the states after prefixes, without which their blocks are not used; `None` for a model
            without recurrent states.
        priority_places: How many arrivals one level of priority counts as.
    """

    def __init__(
        self,
        blocks: BlockPool,
        *,
        block_tokens: int,
        token_budget: int,
        max_requests: int,
        num_batches: int = 1,
        prefix_reuse: bool = True,
        snapshots: SnapshotPool | None = None,
        priority_places: int = 64,
    ) -> None:
        self.blocks = blocks
        self.block_tokens = block_tokens
        self.token_budget, self.max_requests, self.num_batches = token_budget, max_requests, num_batches
        self.running: list[Sequence] = []
        self.waiting: list[Sequence] = []
        self.parked: list[Sequence] = []
        self.num_preempted = self.num_reused_tokens = self.last_ticket = 0
        self._prefix_reuse, self._priority_places = prefix_reuse, priority_places
        self._fresh: set[int] = set()
        self._copies: dict[int, Copy] = {}
        self.snapshots, self._restored = snapshots, list[StateCopy]()
        self.needs_blocks_alone = prefix_reuse and snapshots is None  # to go on where a request left
        self._free_slots = list(range(max_requests))

    @property
    def num_prefill_tokens(self) -> int:
        """Tokens to compute before every waiting or prefilling request gets its next token."""
        sequences = (*self.running, *self.waiting)
        return sum(sequence.num_pending for sequence in sequences if sequence.num_pending > 1)

    @property
    def num_next_blocks(self) -> int:
        """KV blocks that the first waiting request needs, shared ones included; 0 if none waits."""
        return blocks_for(len(self.waiting[0].tokens), self.block_tokens) if self.waiting else 0

    @property
    def preempted(self) -> tuple[int, ...]:
        """Tickets of the requests that wait after a preemption."""
        return tuple(sequence.ticket for sequence in self.waiting if sequence.num_reused is not None)

    def add(self, sequence: Sequence) -> None:
        """Queue a request."""
        self.last_ticket = max(self.last_ticket, sequence.ticket)
        insort(self.waiting, sequence, key=self._rank)

    def remove(self, sequence: Sequence) -> None:
        """Remove a request in any state and release its blocks; unknown ones are ignored."""
        for queue in (self.running, self.parked, self.waiting):
            if sequence in queue:
                queue.remove(sequence)
                if queue is not self.waiting:
                    self._release(sequence)

    def discard(self, sequence: Sequence, num_computed: int) -> None:
        """Remove a request of which a step failed; of its tokens `num_computed` had been computed before."""
        self._retract(sequence, num_computed)
        self.remove(sequence)

    def recompute(self, sequence: Sequence, num_computed: int) -> None:
        """Preempt a running request of which a step failed that had changed its states."""
        self._retract(sequence, num_computed)
        self.preempt(sequence)

    def park(self, sequence: Sequence) -> None:
        """Exclude a running request from steps; it keeps its blocks and counts to `max_requests`."""
        self.running.remove(sequence)
        self.parked.append(sequence)

    def unpark(self, sequence: Sequence) -> None:
        """Include a parked request in steps again; unknown ones are ignored."""
        if sequence in self.parked:
            self.parked.remove(sequence)
            insort(self.running, sequence, key=self._rank)

    def reserve_slot(self) -> int | None:
        """Take the slot of a request that arrives, which counts to `max_requests`; `None` if none is free."""
        return self._free_slots.pop() if self._free_slots else None

    def free_slot(self, slot: int) -> None:
        """Give back a slot that was reserved."""
        self._free_slots.append(slot)

    def schedule(self) -> Plan:
        """Return the plan of the next step. Call `advance` with its chunks before the next `schedule`."""
        self._fresh.clear()
        self._copies.clear()
        self._restored.clear()
        for sequence in [one for one in self.running if one.outgrows_keys]:
            self.preempt(sequence)
            sequence.root, sequence.keys = sequence.long_root, []
        self._admit_urgent()
        chunks = self._decodes()
        chunks += self._prefills(-(-self.token_budget // self.num_batches) - len(chunks))
        fresh = tuple(sorted(self._fresh - self._copies.keys()))
        # States are saved last: no request of this step begins with those that it saves.
        restored, saved = tuple(self._restored), tuple(self._save_states(chunks))
        return Plan(chunks, tuple(self._copies.values()), fresh, restored, saved)

    def settle(self) -> None:
        """Give back blocks that other engines want and no request here waits for.

        Called between steps: not before the copies of a step are made, whose sources may be cached blocks.
        """
        self.blocks.settle(num_running=self._num_admitted, is_waiting=bool(self.waiting))

    def resize(self, num_blocks: int) -> int:
        """Bring the pool as near to a size as is possible; return the number of blocks reached.

        To shrink preempts requests, the last in rank first, but not the first. Called between steps.
        """
        pool = self.blocks
        least = max(num_blocks, pool.least_blocks)
        while pool.num_blocks - pool.num_free > least and len(self.running) > 1:
            self.preempt(self.running[-1])
        return pool.resize(num_blocks)

    def advance(self, chunks: Items[Chunk]) -> None:
        """Count the chunks of a step as computed: later steps may reuse the blocks that they fill."""
        for chunk in chunks:
            sequence, first = chunk.sequence, chunk.sequence.num_computed // self.block_tokens
            sequence.num_computed = chunk.end
            for at in range(first, sequence.num_computed // self.block_tokens):
                self._publish(sequence, at, self.block_tokens)

    # ------------------------------------------------------------------ forming a step

    def _decodes(self) -> list[Chunk]:
        share = -(-len(self.running) // self.num_batches)
        chunks: list[Chunk] = []
        at = 0
        # `_grow` may preempt requests from the end of `running` meanwhile.
        while at < len(self.running) and len(chunks) < share:
            sequence = self.running[at]
            if sequence.num_pending == 1 and self._grow(sequence):
                chunks.append(Chunk(sequence, 1))
            at += 1
        return chunks

    def _prefills(self, budget: int) -> Iterator[Chunk]:
        prefilling = iter([sequence for sequence in self.running if sequence.num_pending > 1])
        room = MAX_SCORED_ROWS
        while budget > 0 and (sequence := next(prefilling, None) or self._admit()) is not None:
            count = sequence.up_to_stop(budget)
            if (scored := min(count, sequence.num_unscored)) > room:
                count = scored = room
            if count:
                yield Chunk(sequence, count)
            budget -= count
            room -= scored

    # ------------------------------------------------------------------ admission

    def _rank(self, sequence: Sequence) -> tuple[int, int]:
        return sequence.ticket - sequence.priority * self._priority_places, sequence.ticket

    def _admit_urgent(self) -> None:
        """Admit requests that rank before a running one; preempt running ones of lower priority for them."""
        while self.waiting and self.running and self._rank(self.waiting[0]) < self._rank(self.running[-1]):
            first = self.waiting[0]
            if not self._try_admit(first) and not (self._make_room(first) and self._try_admit(first)):
                return

    def _admit(self) -> Sequence | None:
        """Admit the first waiting request that fits: of all but the first, only those that have arrived."""
        arrived = (sequence for sequence in self.waiting[1:] if sequence.has_arrived)
        return next(filter(self._try_admit, chain(self.waiting[:1], arrived)), None)

    def _try_admit(self, sequence: Sequence) -> bool:
        arrival = _arrival_of(sequence)
        has_room = self._allocate_all(sequence) if arrival is None else self._take_over(sequence, arrival)
        if not has_room:
            return False
        self.waiting.remove(sequence)
        insort(self.running, sequence, key=self._rank)
        sequence.has_arrived, sequence.arrival = False, None  # what holds its blocks releases them
        self.num_reused_tokens += sequence.num_computed
        if sequence.num_reused is None:
            sequence.num_reused = sequence.num_computed
        return True

    def _take_over(self, sequence: Sequence, arrival: Arrival) -> bool:
        """Take over blocks and states that have arrived; false if too few blocks are free for the others."""
        num_new = max(0, blocks_for(len(sequence.tokens), self.block_tokens) - len(arrival.blocks))
        missing = num_new - self.blocks.num_free + self._num_admitted
        if missing > 0 and not self.blocks.grow(missing):
            return False
        blocks, slot = arrival.take()
        assert slot is not None, "it has not been taken over before"
        sequence.blocks, sequence.slot = [*blocks, *self._allocate(num_new)], slot
        sequence.num_computed = len(arrival.tokens)
        self._set_stops(sequence)
        for at in range(sequence.num_computed // self.block_tokens):
            self._publish(sequence, at, self.block_tokens)
        return True

    def _allocate_all(self, sequence: Sequence) -> bool:
        """Allocate a slot, and blocks for all tokens, cached ones first; false if there are too few."""
        if not self._free_slots:
            return False
        prefix = self._find_prefix(sequence)
        if not self._allocate_blocks(sequence, prefix):
            return False
        sequence.slot = self._free_slots.pop()
        if prefix.snapshot is not None:
            self._restored.append(StateCopy(prefix.snapshot, sequence.slot))
        self._set_stops(sequence, prefix.num_found)
        return True

    @property
    def _num_admitted(self) -> int:
        return len(self.running) + len(self.parked)

    def _allocate_blocks(self, sequence: Sequence, prefix: Prefix) -> bool:
        """Allocate blocks for all tokens of a request after its prefix; false if too few are free."""
        pool = self.blocks
        num_new = blocks_for(len(sequence.tokens), self.block_tokens) - len(prefix.blocks)
        # One spare block per running request: without it the new request would soon be preempted.
        room = (
            pool.num_free - sum(not pool.is_referenced(block) for block in prefix.blocks) - self._num_admitted
        )
        if num_new > room:
            if not pool.grow(num_new - room):
                return False
            room = num_new
        pool.acquire(prefix.blocks)
        sequence.num_computed = len(prefix.blocks) * self.block_tokens
        source = prefix.source
        if source is not None and (pool.is_referenced(source) or num_new < room):
            pool.acquire([source])  # so that it is not allocated as the target
            new = self._allocate(num_new)
            pool.release([source])
            self._copies[new[0]] = Copy(source, new[0], prefix.num_copied)
            sequence.num_computed += prefix.num_copied
        else:
            new = self._allocate(num_new)
        sequence.blocks = [*prefix.blocks, *new]
        return True

    def _make_room(self, newcomer: Sequence) -> bool:
        """Preempt running requests of lower rank and priority, if that suffices to admit `newcomer`."""
        victims: list[Sequence] = []
        while not self._would_fit(newcomer, victims):
            if len(victims) == len(self.running):
                return False
            last = self.running[-1 - len(victims)]
            if last.priority >= newcomer.priority or self._rank(last) < self._rank(newcomer):
                return False
            victims.append(last)
        for victim in victims:
            self.preempt(victim)
        return True

    def _would_fit(self, newcomer: Sequence, victims: Items[Sequence]) -> bool:
        num_left = self._num_admitted - len(victims)
        room = self.blocks.num_free + self.blocks.num_freed_by([victim.blocks for victim in victims])
        need = blocks_for(len(newcomer.tokens), self.block_tokens) + num_left
        has_slot = self._free_slots or victims or _arrival_of(newcomer)
        return bool(has_slot) and need <= room

    # ------------------------------------------------------------------ blocks

    def _grow(self, sequence: Sequence) -> bool:
        """Allocate a block for the next token, preempting the last in rank; false if that was `sequence`."""
        need = blocks_for(sequence.num_computed + 1, self.block_tokens) - len(sequence.blocks)
        while need > self.blocks.num_free and not self.blocks.grow(need - self.blocks.num_free):
            victim = self.running[-1]
            self.preempt(victim)
            if victim is sequence:
                return False
        sequence.blocks += self._allocate(max(0, need))
        return True

    def preempt(self, sequence: Sequence) -> None:
        """Release the blocks of a running request, which waits until it is admitted again."""
        self.running.remove(sequence)
        self._release(sequence)
        self.add(sequence)
        self.num_preempted += 1

    def _allocate(self, count: int) -> list[int]:
        blocks = self.blocks.allocate(count)
        self._fresh.update(blocks)
        return blocks

    def _release(self, sequence: Sequence) -> None:
        # Never in the step of its admission, whose copy is still to be made: the spare blocks prevent that.
        at, num_tokens = divmod(sequence.num_computed, self.block_tokens)
        if num_tokens and self.snapshots is None:  # nothing continues from within a block otherwise
            self._publish(sequence, at, num_tokens)
        self.blocks.release(sequence.blocks)
        sequence.blocks, sequence.num_computed = [], 0
        self._free_slots.append(sequence.slot)

    # ------------------------------------------------------------------ prefixes

    def _find_prefix(self, sequence: Sequence) -> Prefix:
        if not self._prefix_reuse:
            return Prefix()
        tokens, block_tokens = sequence.tokens, self.block_tokens
        num_full = len(tokens) // block_tokens
        extend_keys(sequence.keys, sequence.root, tokens, block_tokens, num_blocks=num_full)
        reusable = tokens[: sequence.num_reusable]
        if self.snapshots is not None:
            return find_continued(self.blocks, self.snapshots, sequence.keys, reusable, block_tokens)
        return find_prefix(self.blocks, sequence.keys, sequence.root, reusable, block_tokens)

    def _publish(self, sequence: Sequence, at: int, num_tokens: int) -> None:
        """Publish the first `num_tokens` tokens of a request's block to the prefix cache."""
        if not self._prefix_reuse:
            return
        keys, first = sequence.keys, at * self.block_tokens
        tokens, is_full = sequence.tokens[first : first + num_tokens], num_tokens == self.block_tokens
        extend_keys(keys, sequence.root, sequence.tokens, self.block_tokens, num_blocks=at + is_full)
        parent = keys[at - 1] if at else sequence.root
        content = Content(keys[at], parent, tuple(tokens)) if is_full else block_content(parent, tokens)
        self.blocks.publish(sequence.blocks[at], content)

    def _retract(self, sequence: Sequence, num_computed: int) -> None:
        """Take back what a step has published of a request, of whose tokens fewer are computed."""
        first, end = num_computed // self.block_tokens, sequence.num_computed // self.block_tokens
        for block in sequence.blocks[first:]:
            self.blocks.retract(block)
        if self.snapshots is not None:
            self.snapshots.drop(sequence.keys[first:end])
        sequence.num_computed = num_computed

    # ------------------------------------------------------------------ snapshots

    def _set_stops(self, sequence: Sequence, num_found: int = 0) -> None:
        """Choose where parts of a prompt end: after `num_found` blocks, which others share, and the last."""
        if self.snapshots is None:
            return
        last = (len(sequence.tokens) - 1) // self.block_tokens
        sequence.stops = tuple(count * self.block_tokens for count in sorted({num_found, last}))

    def _save_states(self, chunks: Items[Chunk]) -> Iterator[StateCopy]:
        """Yield the copies to snapshots after a step with these chunks."""
        if self.snapshots is None:
            return
        for chunk in chunks:
            sequence, (num_blocks, rest) = chunk.sequence, divmod(chunk.end, self.block_tokens)
            follows = chunk.end > sequence.stops[-1]
            if rest or not (follows or chunk.end in sequence.stops):
                continue
            extend_keys(
                sequence.keys, sequence.root, sequence.tokens, self.block_tokens, num_blocks=num_blocks
            )
            key = sequence.keys[num_blocks - 1]
            slot = self.snapshots.save(key, replaced=sequence.latest if follows else None)
            if slot is not None:
                yield StateCopy(sequence.slot, slot)
            if follows:
                sequence.latest = None if slot is None else key


def _arrival_of(sequence: Sequence) -> Arrival | None:
    """Return what has arrived with the recurrent states of a request; `None` if all is to be computed."""
    arrival = sequence.arrival
    if arrival is None:
        return None
    is_here = arrival.continues_to(sequence.tokens, sequence.num_reusable, sequence.root)
    return arrival if is_here else None
