"""Continuous batching with chunked prefill over append-only KV blocks, without a device under it.

Decodes take their tokens of a step's budget first and prefill chunks fill the rest (Holmes et al.,
DeepSpeed-FastGen: Dynamic SplitFuse, arXiv:2401.08671, section 3). Under KV pressure the latest request is
preempted by recompute (Kwon et al., PagedAttention, arXiv:2309.06180, section 4.5): the one admitted last, or
where whole prompts go first the one that arrived last. Everything here is synchronous.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Literal, TypeAlias

from hotswap.backends.sim.prefix import Prefixes, block_names
from hotswap.backends.sim.sequence import Sequence, Step, Turnover
from hotswap.errors import PromptTooLong
from hotswap.request import RequestId

__all__ = ["Batcher", "Batching"]


Batching: TypeAlias = Literal["mixed", "prefill_first"]


def _ignore(*told: object) -> None:
    pass


def _no_time() -> float:
    return 0.0


class Batcher:
    """Owns the KV blocks of an engine and decides, step by step, which sequences use them.

    Sequences wait by priority. A sequence that arrives with its KV blocks, or was preempted, is put in front
    of all that wait then.

    With the batching `"prefill_first"`, as of vLLM before 0.3, a step has whole prompts alone while any can
    be admitted, and decodes wait for it; `watermark` is the share of blocks that an admission leaves free
    while others run. A prompt longer than the budget has a step of its own. A sequence that arrives with its
    blocks decodes in the next step, even if no block is free. Sequences run in the order of arrival, also
    those that were preempted or have moved, and the last of them is preempted first.

    With `prefix_reuse`, full blocks of prompts are computed once for all prompts with that prefix. Blocks of
    ended requests count as free, and are taken when no others are left, the least recently used first.

    With `turnover`, steps count the sequences that joined the decodes, and those that left them.

    A pool that is leased has from `least_blocks` to `most_blocks`; before a sequence waits or is preempted
    for want of blocks, it is asked to grow.

    Attributes:
        num_blocks: How many KV blocks there are.
        least_blocks: The least that it can shrink to, and the most that one sequence may have.
        most_blocks: The most that it can grow to.
        on_short: Called with the number of blocks that are missing; may call `resize`.
        prefills_first: Whether the batching is `"prefill_first"`.
        on_change: Called before any of it changes.
        clock: Tells the time.
        on_recovered: Called with a request that was preempted and the seconds since, when its tokens are
            computed again or it ends before.
        num_reused_tokens: How many tokens of prompts were not computed, since their blocks were there.
    """

    def __init__(
        self,
        *,
        num_blocks: int,
        block_tokens: int,
        max_requests: int,
        token_budget: int,
        batching: Batching = "mixed",
        watermark: float = 0.0,
        prefix_reuse: bool = False,
        turnover: bool = False,
    ) -> None:
        self.num_blocks = self.num_free_blocks = self.least_blocks = self.most_blocks = num_blocks
        self.block_tokens = block_tokens
        self.waiting: deque[Sequence] = deque()
        self.running: dict[Sequence, None] = {}  # in order of admission
        self.parked: dict[Sequence, None] = {}  # out of the steps, with their blocks
        self.on_change: Callable[[], None] = _ignore
        self.clock: Callable[[], float] = _no_time
        self.on_recovered: Callable[[RequestId, float], None] = _ignore
        self.on_short: Callable[[int], None] = _ignore
        self._num_queued_tokens = 0  # of the sequences that wait
        self._preempted: dict[Sequence, None] = {}
        self._max_requests = max_requests
        self._token_budget = token_budget
        self.prefills_first = batching == "prefill_first"
        self._watermark = watermark
        self._prefixes = Prefixes() if prefix_reuse else None
        self._turnover = Turnover() if turnover else None
        self._num_resizes = 0  # since the last step
        self.num_reused_tokens = 0

    def __len__(self) -> int:
        return len(self.waiting) + len(self.running) + len(self.parked)

    def __iter__(self) -> Iterator[Sequence]:
        yield from self.running
        yield from self.parked
        yield from self.waiting

    @property
    def num_spare_blocks(self) -> int:
        """KV blocks that an arriving sequence leaves free: one for each that is here, or the watermark."""
        return self._kept_free if self.prefills_first else len(self)

    @property
    def num_unwanted_blocks(self) -> int:
        """Free KV blocks above the least that no sequence here is about to take; 0 while one waits."""
        unwanted = min(self.num_free_blocks - self.num_spare_blocks, self.num_blocks - self.least_blocks)
        return 0 if self.waiting else max(0, unwanted)

    @property
    def is_short(self) -> bool:
        """Whether a sequence waits that may be admitted as soon as the pool can grow."""
        may_admit = bool(self.waiting) and len(self.running) < self._max_requests
        return may_admit and self.num_blocks < self.most_blocks

    @property
    def _kept_free(self) -> int:
        return int(self._watermark * self.num_blocks)

    @property
    def num_next_blocks(self) -> int:
        """KV blocks that the first waiting sequence needs before it is admitted; 0 if none waits."""
        if not self.waiting:
            return 0
        first = self.waiting[0]
        lent = self._prefixes.num_used(self._reusable(first)) if self._prefixes else 0
        return self._blocks(first.num_tokens) - first.num_blocks - lent

    def num_prefill_tokens(self, *, running: bool) -> int:
        """Tokens to be computed before the sequences get their next one; without `running`, before others."""
        admitted = (*self.running, *self.parked) if running else self.parked
        if not admitted:
            return self._num_queued_tokens
        return self._num_queued_tokens + sum(count for s in admitted if (count := s.num_pending) > 1)

    @property
    def preempted(self) -> tuple[RequestId, ...]:
        """Requests that wait again after they had got tokens here."""
        return tuple(sequence.request.id for sequence in reversed(self._preempted)) if self._preempted else ()

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence.

        Raises:
            PromptTooLong: the blocks that a sequence may have would not hold its tokens.
        """
        if self._blocks(sequence.num_tokens) > self.least_blocks:
            raise self._too_long(sequence)
        self.on_change()
        if self._prefixes:
            sequence.names = block_names(sequence.request, self.block_tokens)
        at = len(self.waiting)
        while at and self.waiting[at - 1].request.priority < sequence.request.priority:
            at -= 1
        self._queue(sequence, at)

    def give_blocks(self, sequence: Sequence, give: Callable[[Sequence], None]) -> None:
        """Have `give` attach the blocks that a waiting sequence arrives with, and put it in front."""
        self._unqueue(sequence)
        give(sequence)
        self._queue(sequence, 0)

    def remove(self, sequence: Sequence) -> bool:
        """Free what a sequence holds; return whether it was still here. Harmless while a step runs."""
        if not self._take_out(sequence):
            return False
        if sequence.num_to_recompute:
            self._recovered(sequence)
        return True

    def _take_out(self, sequence: Sequence) -> bool:
        self.on_change()
        if sequence in self.running:
            del self.running[sequence]
        elif sequence in self.parked:
            del self.parked[sequence]
        elif sequence in self.waiting:
            self._unqueue(sequence)
        else:
            return False
        self._free(sequence)
        return True

    def resize(self, num_blocks: int) -> None:
        """Have so many KV blocks, or as few as those that sequences move with leave.

        To shrink takes free blocks that hold nothing, then the cached ones, then those of the sequences that
        would be preempted first. Harmless while a step runs.
        """
        self.on_change()
        self._trim()
        self.num_free_blocks += num_blocks - self.num_blocks
        self.num_blocks = num_blocks
        self._num_resizes += 1
        while self.num_free_blocks < 0 and self._free_last(Step()):
            pass
        missing = max(0, -self.num_free_blocks)
        self.num_free_blocks += missing
        self.num_blocks += missing

    def has_free(self, num_blocks: int) -> bool:
        """Whether so many blocks are free, once the pool has grown for them as far as it can."""
        if num_blocks > self.num_free_blocks and self.num_blocks < self.most_blocks:
            self.on_short(num_blocks - self.num_free_blocks)
        return num_blocks <= self.num_free_blocks

    def hold(self, num_blocks: int) -> None:
        """Take blocks for a sequence that is to arrive; a negative number gives them back."""
        self.on_change()
        self._trim()
        self.num_free_blocks -= num_blocks

    def park(self, sequence: Sequence) -> None:
        """Take a sequence that runs out of the steps; it keeps its blocks."""
        self.on_change()
        del self.running[sequence]
        self.parked[sequence] = None

    def unpark(self, sequence: Sequence) -> None:
        """Let a parked sequence run again; unknown ones are ignored."""
        if sequence in self.parked:
            self.on_change()
            del self.parked[sequence]
            self._run(sequence)

    def clear(self, error: Exception) -> int:
        """End every stream by `error` after the tokens it holds; return how many there were."""
        ended = list(self)
        for sequence in ended:
            self.remove(sequence)
            sequence.close(error)
        if self._prefixes:
            self._prefixes.forget()
        return len(ended)

    def plan(self) -> Step:
        """Compose the next step and take the blocks it needs; empty when there is nothing to do."""
        self.on_change()
        step = self._composed()
        if self._turnover:
            self._turnover.count(step)
        if step.num_tokens:
            step.num_resizes, self._num_resizes = self._num_resizes, 0
        return step

    def _composed(self) -> Step:
        step = Step()
        if self.prefills_first:
            self._add_prefills(step)
            if step.num_tokens:
                return step
        prefills: list[tuple[Sequence, int]] = []
        decodes: list[Sequence] = []
        for sequence in self.running:
            num_pending = sequence.num_prompt + sequence.position - sequence.num_cached  # without a call
            if num_pending == 1:
                decodes.append(sequence)
            elif num_pending:
                prefills.append((sequence, num_pending))
        budget, block_tokens = self._token_budget, self.block_tokens
        for sequence in decodes:
            has_room = sequence.num_cached < sequence.num_blocks * block_tokens and step.num_tokens < budget
            if has_room and sequence in self.running:  # the usual case, without a call
                step.chunks[sequence] = 1
                step.num_tokens += 1
            else:
                self._schedule(step, sequence, 1)
        for sequence, num_pending in prefills:
            self._schedule(step, sequence, num_pending)
        while not self.prefills_first and self._may_admit(step):
            sequence = self._admitted()
            self._schedule(step, sequence, sequence.num_pending)
        return step

    def commit(self, step: Step) -> None:
        """Account for a step that has run: sequences whose prefill is complete generate a token."""
        self.on_change()
        self._trim()
        for sequence, count in step.chunks.items():
            if sequence not in self.running:  # left or was evicted while the step ran
                continue
            sequence.num_cached += count
            if self._prefixes:
                self._name(sequence, self._prefixes)
            if 0 < sequence.num_to_recompute <= sequence.num_cached:
                self._recovered(sequence)
            if sequence.num_pending == 0 and sequence.generate():
                self.remove(sequence)
                sequence.close()

    def _add_prefills(self, step: Step) -> None:
        """Fill a step with whole prompts; sequences that arrive with their blocks decode in the next one."""
        while self.waiting and len(self.running) < self._max_requests:
            sequence = self.waiting[0]
            count = sequence.num_pending - self._num_found(sequence) * self.block_tokens
            if count > 1 or not sequence.num_blocks:
                if step.num_tokens and step.num_tokens + count > self._token_budget:
                    return
                kept_free = self._kept_free if self.running or self.parked else 0
                if not self.has_free(self.num_next_blocks + kept_free):
                    return
            self._admitted()
            if count > 1:
                self._grow(step, sequence, sequence.num_tokens)
                step.add(sequence, count)

    def _may_admit(self, step: Step) -> bool:
        if not self.waiting or len(self.running) >= self._max_requests:
            return False
        room = self._token_budget - step.num_tokens
        return room > 0 and self.has_free(self.num_next_blocks)

    def _schedule(self, step: Step, sequence: Sequence, num_pending: int) -> None:
        count = min(num_pending, self._token_budget - step.num_tokens)
        if count > 0 and sequence in self.running and self._grow(step, sequence, sequence.num_cached + count):
            step.add(sequence, count)

    def _grow(self, step: Step, sequence: Sequence, num_tokens: int) -> bool:
        """Take blocks for `num_tokens`, preempting later sequences if need be; false if it was preempted."""
        missing = max(0, self._blocks(num_tokens) - sequence.num_blocks)
        while not self.has_free(missing):
            if self._blocks(num_tokens) > self.num_blocks and not self._arrived():
                self.remove(sequence)
                sequence.close(self._too_long(sequence))
                return False
            if self._free_last(step) is sequence:
                return False
        sequence.num_blocks += missing
        self.num_free_blocks -= missing
        return True

    def _arrived(self) -> Sequence | None:
        """The first waiting sequence that arrived with blocks."""
        return next((waiting for waiting in self.waiting if waiting.num_blocks), None)

    def _free_last(self, step: Step) -> Sequence | None:
        """Take the blocks of one sequence, which computes them again, and return it; `None` if none can."""
        if (victim := self._arrived()) is not None:
            self._unqueue(victim)
            self._mark_for_recompute(victim)
            self._free(victim)
            self._queue(victim, 0)
        elif (victim := next(reversed(self.running), None)) is not None:
            self._preempt(step, victim)
        return victim

    def _preempt(self, step: Step, victim: Sequence) -> None:
        self._mark_for_recompute(victim)
        self._take_out(victim)
        self._queue(victim, 0)
        if victim.position > len(victim.request.generated):
            self._preempted[victim] = None
        step.drop(victim)

    def _mark_for_recompute(self, victim: Sequence) -> None:
        """Note the tokens that a sequence is about to lose."""
        if victim.num_cached and not victim.num_to_recompute:
            victim.preempted_s = self.clock()
        victim.num_to_recompute = max(victim.num_to_recompute, victim.num_cached)

    def _recovered(self, sequence: Sequence) -> None:
        sequence.num_to_recompute = 0
        self.on_recovered(sequence.request.id, self.clock() - sequence.preempted_s)

    def _queue(self, sequence: Sequence, at: int) -> None:
        self.waiting.insert(at, sequence)
        if (count := sequence.num_pending) > 1:
            self._num_queued_tokens += count

    def _unqueue(self, sequence: Sequence) -> None:
        self.waiting.remove(sequence)
        self._preempted.pop(sequence, None)
        if (count := sequence.num_pending) > 1:
            self._num_queued_tokens -= count

    def _admitted(self) -> Sequence:
        """Admit the first waiting sequence, with the blocks of its prompt that are cached."""
        sequence = self.waiting[0]
        self._unqueue(sequence)
        self._run(sequence)
        if self._prefixes and (names := self._reusable(sequence)):
            self._trim()
            num_found, num_idle = self._prefixes.take(names)
            self.num_free_blocks -= num_idle
            sequence.num_blocks = sequence.num_named = num_found
            sequence.num_cached = num_found * self.block_tokens
            self.num_reused_tokens += sequence.num_cached
            sequence.reuse(sequence.num_cached)
        return sequence

    def _run(self, sequence: Sequence) -> None:
        last = next(reversed(self.running), None)
        self.running[sequence] = None
        if self.prefills_first and last and sequence.request.arrived_s < last.request.arrived_s:
            self.running = dict.fromkeys(sorted(self.running, key=_arrived_s))

    def _too_long(self, sequence: Sequence) -> PromptTooLong:
        return PromptTooLong(
            f"Request {sequence.request.id!r} has {sequence.num_tokens} tokens, but the KV blocks that it "
            f"may have hold {self.least_blocks * self.block_tokens}. Shorten it, or give the engine more "
            "blocks."
        )

    def _reusable(self, sequence: Sequence) -> tuple[int, ...]:
        """The blocks that it need not compute if they are there: its last token is computed in any case."""
        if sequence.num_blocks:
            return ()
        return sequence.names[: (sequence.num_tokens - 1) // self.block_tokens]

    def _num_found(self, sequence: Sequence) -> int:
        if not self._prefixes:
            return 0
        self._trim()
        return self._prefixes.num_found(self._reusable(sequence))

    def _name(self, sequence: Sequence, prefixes: Prefixes) -> None:
        """Let others find the blocks of a prompt that have been computed."""
        ready = min(len(sequence.names), sequence.num_cached // self.block_tokens)
        if sequence.num_named < ready:
            for name in sequence.names[sequence.num_named : ready]:
                self.num_free_blocks += prefixes.keep(name)
            sequence.num_named = ready

    def _free(self, sequence: Sequence) -> None:
        self._trim()
        self.num_free_blocks += sequence.num_blocks
        if self._prefixes:
            self.num_free_blocks -= self._prefixes.give_back(sequence.names[: sequence.num_named])
        sequence.num_blocks = sequence.num_cached = sequence.num_named = 0

    def _trim(self) -> None:
        """Let go of blocks that have been taken for others, before any are given back."""
        if self._prefixes:
            self._prefixes.trim(max(0, self.num_free_blocks))

    def _blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_tokens)


def _arrived_s(sequence: Sequence) -> float:
    return sequence.request.arrived_s
