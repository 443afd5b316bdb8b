"""Continuous batching: which tokens of which requests the next step computes.

Every step carries all requests that decode, then prefill chunks, oldest first, until `token_budget` rows are
full (Dynamic SplitFuse: Holmes et al., DeepSpeed-FastGen, arXiv:2401.08671, section 3), so that long prompts
neither stall decodes nor leave a step half empty. When KV blocks run out the youngest request is preempted:
it gives its blocks back, waits at the head of the queue, and is computed again.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from hotswap.backends.torch.adapters.plan import RankRange
from hotswap.backends.torch.forward import Piece
from hotswap.backends.torch.kv import BlockPool, blocks_for
from hotswap.backends.torch.sampling import Sampler
from hotswap.request import FinishReason

__all__ = ["Batcher", "Chunk", "Sequence"]


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
        adapter: Where its adapter lies. Keys and values depend on it: `adapter.serial` tells adapters apart.
        blocks: The KV blocks it holds.
        num_computed: How many of `tokens` have their keys and values in `blocks`.
    """

    ticket: int
    tokens: list[int]
    num_prompt: int
    max_tokens: int
    sampler: Sampler
    stop_ids: frozenset[int] = frozenset()
    min_tokens: int = 0
    adapter: RankRange | None = None
    blocks: list[int] = field(default_factory=list[int])
    num_computed: int = 0

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


class Batcher:
    """The queue of an engine, and the blocks of those that run.

    `running` and `waiting` are in order of arrival, and whoever runs came before whoever waits. The oldest
    request never waits for blocks, so everything admitted ends; admitting one that needs more blocks than
    there are would break that, and is up to the caller.

    With `num_batches`, as many are under way at once, and each takes its share of the decodes and of the
    token budget: the stages of a pipeline are then equally long, and none waits for another. Requests that
    wait for a token under way have nothing pending and are in no other batch.
    """

    def __init__(
        self,
        blocks: BlockPool,
        *,
        block_tokens: int,
        token_budget: int,
        max_requests: int,
        num_batches: int = 1,
    ) -> None:
        self.blocks = blocks
        self.block_tokens = block_tokens
        self.token_budget, self.max_requests = token_budget, max_requests
        self.num_batches = num_batches
        self.running: list[Sequence] = []
        self.waiting: deque[Sequence] = deque()
        self.num_preempted = 0

    def add(self, sequence: Sequence) -> None:
        """Queue a request."""
        self.waiting.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Forget a request wherever it is; its blocks are free. Unknown ones are ignored."""
        if sequence in self.running:
            self.running.remove(sequence)
            self._release(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)

    def schedule(self) -> tuple[list[Chunk], list[int]]:
        """Return what the next step computes, and the blocks handed out for it."""
        before = [(sequence, len(sequence.blocks)) for sequence in self.running]
        chunks = [Chunk(sequence, 1) for sequence in self._decodes()]
        chunks += self._prefills(-(-self.token_budget // self.num_batches) - len(chunks))
        held = dict(before)
        fresh = [block for c in chunks for block in c.sequence.blocks[held.get(c.sequence, 0) :]]
        return chunks, fresh

    def _decodes(self) -> list[Sequence]:
        share = -(-len(self.running) // self.num_batches)
        # Asked again whether each runs: it may have been preempted for the sake of one before it.
        decodes = (
            sequence
            for sequence in tuple(self.running)
            if sequence in self.running and sequence.num_pending == 1 and self._grow(sequence)
        )
        return list(itertools.islice(decodes, share))

    def _prefills(self, budget: int) -> Iterator[Chunk]:
        for sequence in tuple(self.running):
            if sequence.num_pending > 1 and budget > 0:
                yield (chunk := Chunk(sequence, min(sequence.num_pending, budget)))
                budget -= chunk.num_tokens
        while budget > 0 and (admitted := self._admit()) is not None:
            yield (chunk := Chunk(admitted, min(admitted.num_pending, budget)))
            budget -= chunk.num_tokens

    def _admit(self) -> Sequence | None:
        if not self.waiting or len(self.running) >= self.max_requests:
            return None
        need = blocks_for(len(self.waiting[0].tokens), self.block_tokens)
        # A spare block for each that runs: without it a newcomer would be preempted as soon as it came.
        if need + len(self.running) > self.blocks.num_free:
            return None
        sequence = self.waiting.popleft()
        sequence.blocks = self.blocks.take(need)
        self.running.append(sequence)
        return sequence

    def _grow(self, sequence: Sequence) -> bool:
        """Make room for the next token, at the cost of younger requests; false if it had to go itself."""
        need = blocks_for(sequence.num_computed + 1, self.block_tokens) - len(sequence.blocks)
        while need > self.blocks.num_free:
            victim = self.running[-1]
            self._preempt(victim)
            if victim is sequence:
                return False
        sequence.blocks += self.blocks.take(max(0, need))
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._release(sequence)
        self.waiting.appendleft(sequence)
        self.num_preempted += 1

    def _release(self, sequence: Sequence) -> None:
        self.blocks.give(sequence.blocks)
        sequence.blocks, sequence.num_computed = [], 0
