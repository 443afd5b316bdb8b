"""Continuous batching: which tokens of which requests the next step computes.

Every step carries all requests that decode, then prefill chunks until `token_budget` rows are full (Dynamic
SplitFuse: Holmes et al., DeepSpeed-FastGen, arXiv:2401.08671, section 3), so that long prompts neither stall
decodes nor leave a step half empty. Who comes first, everywhere, is a matter of *rank*: arrival, and
priority worth so many places. When KV blocks run out the request of the last rank is preempted: it gives its
blocks back, waits, and is computed again, but for what is still there.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator
from collections.abc import Sequence as Items
from dataclasses import dataclass, field

from hotswap.backends.torch.adapters.places import Place
from hotswap.backends.torch.blocks import BlockPool, Copy
from hotswap.backends.torch.forward import Piece
from hotswap.backends.torch.kv import blocks_for
from hotswap.backends.torch.prefix import Prefix, block_content, extend_keys, find_prefix
from hotswap.backends.torch.sampling import Sampler
from hotswap.request import FinishReason

__all__ = ["Batcher", "Chunk", "Plan", "Sequence"]


@dataclass(slots=True, eq=False)
class Sequence:
    """One request inside an engine.

    Attributes:
        ticket: Its number in order of arrival.
        tokens: Prompt and generation.
        num_prompt: How many of `tokens` are the prompt.
        max_tokens: The length of `tokens` at which it ends.
        stop_ids: End tokens.
        min_tokens: No end token counts before the generation is this long.
        sampler: Chooses its tokens.
        adapter: Where its adapter lies.
        priority: Lets it go ahead of requests that arrived before it.
        root: Stands for the weights that compute it, adapter included: `prefix.root_key`.
        blocks: The KV blocks it holds; only ever added to while it runs.
        num_computed: How many of `tokens` have their keys and values in `blocks`.
        num_reused: How many of them it found computed when it was first admitted; `None` before that.
        keys: Those of its full blocks, as far as they were needed.
    """

    ticket: int
    tokens: list[int]
    num_prompt: int
    max_tokens: int
    sampler: Sampler
    stop_ids: frozenset[int] = frozenset()
    min_tokens: int = 0
    adapter: Place | None = None
    priority: int = 0
    root: bytes = b""
    blocks: list[int] = field(default_factory=list[int])
    num_computed: int = 0
    num_reused: int | None = None
    keys: list[bytes] = field(default_factory=list[bytes])

    @property
    def num_pending(self) -> int:
        """Tokens yet to be computed; 1 while it decodes."""
        return len(self.tokens) - self.num_computed

    @property
    def index(self) -> int:
        """The position in the generation of the token that comes next."""
        return len(self.tokens) - self.num_prompt

    def append(self, token: int) -> FinishReason | None:
        """Add the next token and return why it is the last, if it is."""
        may_stop = self.index >= self.min_tokens
        self.tokens.append(token)
        self.sampler.saw(token)
        if may_stop and token in self.stop_ids:
            return "stop"
        return "length" if len(self.tokens) >= self.max_tokens else None


@dataclass(frozen=True, slots=True, eq=False)
class Chunk:
    """The next `num_tokens` tokens of a request, to be computed in this step."""

    sequence: Sequence
    num_tokens: int

    @property
    def is_last(self) -> bool:
        """Whether the request samples a token after this step."""
        return self.num_tokens == self.sequence.num_pending

    @property
    def end(self) -> int:
        """The position after the chunk's last token."""
        return self.sequence.num_computed + self.num_tokens

    def piece(self) -> Piece:
        """What the model is told of it; nothing of it changes when the request goes on."""
        start, end = self.sequence.num_computed, self.end
        sequence = self.sequence
        return Piece(sequence.tokens[start:end], start, sequence.blocks, self.is_last, sequence.adapter)


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """One step.

    Attributes:
        chunks: What it computes.
        copies: What is copied before that, one after the other.
        fresh: The other blocks that were handed out for it, to be cleared after the copies.
    """

    chunks: list[Chunk]
    copies: tuple[Copy, ...] = ()
    fresh: tuple[int, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Rows of the step."""
        return sum(chunk.num_tokens for chunk in self.chunks)


class Batcher:
    """The queue of an engine, and the blocks of those that run.

    `running` and `waiting` are in order of rank. A priority of *p* goes ahead of requests with none that came
    at most *p* times `priority_places` before, and no request is overtaken by more arrivals than that. The
    first in rank is never preempted and never waits for another's blocks for longer than that one runs, so
    everything admitted ends; admitting one that needs more blocks than there are would break that, and is up
    to the caller.

    With `num_batches`, as many are under way at once, and each takes its share of the decodes and of the
    token budget: the stages of a pipeline are then equally long, and none waits for another. Requests that
    wait for a token under way have nothing pending and are in no other batch.

    Args:
        blocks: The books, of which this is the one writer.
        block_tokens: Tokens of a block.
        token_budget: Most tokens of a step, at least `max_requests`; may be changed between two steps.
        max_requests: Most requests that run at once.
        num_batches: Steps under way at once; they are computed in the order in which they were scheduled.
        prefix_reuse: Whether requests share the blocks of what they have in common, with those gone too.
        priority_places: How many places one level of priority is worth.
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
        priority_places: int = 64,
    ) -> None:
        self.blocks = blocks
        self.block_tokens = block_tokens
        self.token_budget, self.max_requests = token_budget, max_requests
        self.num_batches = num_batches
        self.running: list[Sequence] = []
        self.waiting: list[Sequence] = []
        self.parked: list[Sequence] = []
        self.num_preempted = self.num_reused_tokens = self.last_ticket = 0
        self._prefix_reuse, self._priority_places = prefix_reuse, priority_places
        self._fresh: set[int] = set()
        self._copies: dict[int, Copy] = {}

    @property
    def num_prefill_tokens(self) -> int:
        """Tokens to be computed before those that wait, or are prefilled, get their next one."""
        sequences = (*self.running, *self.waiting)
        return sum(sequence.num_pending for sequence in sequences if sequence.num_pending > 1)

    @property
    def num_next_blocks(self) -> int:
        """KV blocks that the first of those that wait needs, shared or not; 0 if none waits."""
        return blocks_for(len(self.waiting[0].tokens), self.block_tokens) if self.waiting else 0

    @property
    def preempted(self) -> tuple[int, ...]:
        """Tickets of those that wait again after they had run."""
        return tuple(sequence.ticket for sequence in self.waiting if sequence.num_reused is not None)

    def add(self, sequence: Sequence) -> None:
        """Queue a request."""
        self.last_ticket = max(self.last_ticket, sequence.ticket)
        insort(self.waiting, sequence, key=self._rank)

    def remove(self, sequence: Sequence) -> None:
        """Forget a request wherever it is; its blocks are free. Unknown ones are ignored."""
        if sequence in self.running:
            self.running.remove(sequence)
            self._release(sequence)
        elif sequence in self.parked:
            self.parked.remove(sequence)
            self._release(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)

    def park(self, sequence: Sequence) -> None:
        """Take a request that runs out of the steps; it keeps its blocks and its place."""
        self.running.remove(sequence)
        self.parked.append(sequence)

    def unpark(self, sequence: Sequence) -> None:
        """Let a parked request run again; unknown ones are ignored."""
        if sequence in self.parked:
            self.parked.remove(sequence)
            insort(self.running, sequence, key=self._rank)

    def schedule(self) -> Plan:
        """Return what the next step computes; tell `advance` once that is sure to come before the next."""
        self._fresh.clear()
        self._copies.clear()
        self._admit_urgent()
        chunks = self._decodes()
        chunks += self._prefills(-(-self.token_budget // self.num_batches) - len(chunks))
        return Plan(chunks, tuple(self._copies.values()), tuple(sorted(self._fresh - self._copies.keys())))

    def advance(self, chunks: Items[Chunk]) -> None:
        """Note that the chunks of a step come first: whoever is next may use the blocks that they fill."""
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
        # Those that run become fewer, from their end, for the sake of those before.
        while at < len(self.running) and len(chunks) < share:
            sequence = self.running[at]
            if sequence.num_pending == 1 and self._grow(sequence):
                chunks.append(Chunk(sequence, 1))
            at += 1
        return chunks

    def _prefills(self, budget: int) -> Iterator[Chunk]:
        for sequence in tuple(self.running):
            if sequence.num_pending > 1 and budget > 0:
                yield (chunk := Chunk(sequence, min(sequence.num_pending, budget)))
                budget -= chunk.num_tokens
        while budget > 0 and (admitted := self._admit()) is not None:
            yield (chunk := Chunk(admitted, min(admitted.num_pending, budget)))
            budget -= chunk.num_tokens

    # ------------------------------------------------------------------ admission

    def _rank(self, sequence: Sequence) -> tuple[int, int]:
        return sequence.ticket - sequence.priority * self._priority_places, sequence.ticket

    def _admit_urgent(self) -> None:
        """Admit those that rank before some that run, if need be in the place of such of lower priority."""
        while self.waiting and self.running and self._rank(self.waiting[0]) < self._rank(self.running[-1]):
            if self._admit() is None and (not self._make_room(self.waiting[0]) or self._admit() is None):
                return

    def _admit(self) -> Sequence | None:
        if not self.waiting or self._num_seated >= self.max_requests or not self._seat(self.waiting[0]):
            return None
        sequence = self.waiting.pop(0)
        insort(self.running, sequence, key=self._rank)
        return sequence

    @property
    def _num_seated(self) -> int:
        return len(self.running) + len(self.parked)

    def _seat(self, sequence: Sequence) -> bool:
        """Give a request blocks for all its tokens, some filled already; false if there are too few."""
        pool, prefix = self.blocks, self._find_prefix(sequence)
        num_new = blocks_for(len(sequence.tokens), self.block_tokens) - len(prefix.blocks)
        # A spare block for each that runs: without it a newcomer would be preempted as soon as it came.
        room = pool.num_free - sum(not pool.is_held(block) for block in prefix.blocks) - self._num_seated
        if num_new > room:
            return False
        pool.hold(prefix.blocks)
        sequence.num_computed = len(prefix.blocks) * self.block_tokens
        source = prefix.source
        if source is not None and (pool.is_held(source) or num_new < room):
            pool.hold([source])  # lest it be handed out as new
            new = self._take(num_new)
            pool.give([source])
            self._copies[new[0]] = Copy(source, new[0], prefix.num_copied)
            sequence.num_computed += prefix.num_copied
        else:
            new = self._take(num_new)
        sequence.blocks = [*prefix.blocks, *new]
        self.num_reused_tokens += sequence.num_computed
        if sequence.num_reused is None:
            sequence.num_reused = sequence.num_computed
        return True

    def _make_room(self, newcomer: Sequence) -> bool:
        """Preempt the last of those that run behind and below a newcomer, if that seats it."""
        victims: list[Sequence] = []
        while not self._would_fit(newcomer, victims):
            if len(victims) == len(self.running):
                return False
            last = self.running[-1 - len(victims)]
            if last.priority >= newcomer.priority or self._rank(last) < self._rank(newcomer):
                return False
            victims.append(last)
        for victim in victims:
            self._preempt(victim)
        return True

    def _would_fit(self, newcomer: Sequence, victims: Items[Sequence]) -> bool:
        num_left = self._num_seated - len(victims)
        room = self.blocks.num_free + self.blocks.num_freed_by([victim.blocks for victim in victims])
        need = blocks_for(len(newcomer.tokens), self.block_tokens) + num_left
        return num_left < self.max_requests and need <= room

    # ------------------------------------------------------------------ blocks

    def _grow(self, sequence: Sequence) -> bool:
        """Make room for the next token, at the cost of those behind; false if it had to go itself."""
        need = blocks_for(sequence.num_computed + 1, self.block_tokens) - len(sequence.blocks)
        while need > self.blocks.num_free:
            victim = self.running[-1]
            self._preempt(victim)
            if victim is sequence:
                return False
        sequence.blocks += self._take(max(0, need))
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._release(sequence)
        self.add(sequence)
        self.num_preempted += 1

    def _take(self, count: int) -> list[int]:
        blocks = self.blocks.take(count)
        self._fresh.update(blocks)
        return blocks

    def _release(self, sequence: Sequence) -> None:
        # Never right after an admission, whose copy is still to be made: the spare blocks see to that.
        at, num_tokens = divmod(sequence.num_computed, self.block_tokens)
        if num_tokens:
            self._publish(sequence, at, num_tokens)
        self.blocks.give(sequence.blocks)
        sequence.blocks, sequence.num_computed = [], 0

    # ------------------------------------------------------------------ prefixes

    def _find_prefix(self, sequence: Sequence) -> Prefix:
        if not self._prefix_reuse:
            return Prefix()
        tokens, block_tokens = sequence.tokens, self.block_tokens
        num_full = len(tokens) // block_tokens
        extend_keys(sequence.keys, sequence.root, tokens, block_tokens, num_blocks=num_full)
        return find_prefix(self.blocks, sequence.keys, sequence.root, tokens, block_tokens)

    def _publish(self, sequence: Sequence, at: int, num_tokens: int) -> None:
        """Let the first tokens of a request's block be found by others; those of a full one, all."""
        if not self._prefix_reuse:
            return
        tokens, first = sequence.tokens, at * self.block_tokens
        extend_keys(sequence.keys, sequence.root, tokens, self.block_tokens, num_blocks=at)
        parent = sequence.keys[at - 1] if at else sequence.root
        content = block_content(parent, tokens[first : first + num_tokens])
        self.blocks.publish(sequence.blocks[at], content)
