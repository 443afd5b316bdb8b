"""A model and its batcher: one `step` after another."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass

from hotswap.backends.torch.batcher import Batcher, Chunk, Sequence
from hotswap.backends.torch.budget import TokenBudget
from hotswap.backends.torch.forward import Forward, Work
from hotswap.backends.torch.sampling import choose
from hotswap.request import FinishReason

__all__ = ["Report", "Runner", "Sampled"]


@dataclass(frozen=True, slots=True)
class Sampled:
    """A token that a step brought forth, for a request that found `num_reused` tokens computed."""

    ticket: int
    token: int
    index: int
    finish_reason: FinishReason | None
    num_reused: int = 0


@dataclass(frozen=True, slots=True)
class Report:
    """What the worker tells its engine: the tokens of a step, and how the books stand after it.

    `last_ticket` is that of the latest request that the books know; `preempted` are tickets as well.
    """

    sampled: tuple[Sampled, ...] = ()
    num_running: int = 0
    num_prefill_tokens: int = 0
    num_next_blocks: int = 0
    preempted: tuple[int, ...] = ()
    last_ticket: int = 0
    num_free_blocks: int = 0
    num_cached_blocks: int = 0
    num_preempted: int = 0
    num_reused_tokens: int = 0
    token_budget: int = 0


@dataclass(frozen=True, slots=True)
class _Flight:
    """Work under way: its size, the requests that it samples for, and how many tokens each had then."""

    num_tokens: int
    sampling: tuple[tuple[Sequence, int], ...]


class Runner:
    """Runs the requests of one loaded model; belongs to one thread.

    As many batches are under way as the model can work on at once. A request is in at most one that samples
    for it, and may be preempted or leave meanwhile.

    Args:
        forward: The model.
        batcher: Its requests.
        budget: What finds the batcher's token budget; `None` leaves it as it is.
    """

    def __init__(self, forward: Forward, batcher: Batcher, budget: TokenBudget | None = None) -> None:
        self._forward, self._budget = forward, budget
        self._flights: deque[_Flight] = deque()
        self.batcher = batcher
        self.tidy = False
        if budget is not None:
            batcher.token_budget = budget.tokens

    @property
    def idle(self) -> bool:
        """Whether there is nothing to step for."""
        return not (self._flights or self.batcher.running or self.batcher.waiting)

    @property
    def is_timed(self) -> bool:
        """Whether steps are measured and kept to a latency."""
        return self._budget is not None

    def tidy_up(self) -> None:
        """Do a little of what makes later steps faster; `tidy` says whether all is done."""
        self.tidy = self.tidy or not self._forward.improve()

    def report(self, sampled: tuple[Sampled, ...] = ()) -> Report:
        """Return the books as they stand, with the tokens of a step."""
        batcher, blocks = self.batcher, self.batcher.blocks
        return Report(
            sampled,
            num_running=len(batcher.running) + len(batcher.parked),
            num_prefill_tokens=batcher.num_prefill_tokens,
            num_next_blocks=batcher.num_next_blocks,
            preempted=batcher.preempted,
            last_ticket=batcher.last_ticket,
            num_free_blocks=blocks.num_free,
            num_cached_blocks=blocks.num_cached,
            num_preempted=batcher.num_preempted,
            num_reused_tokens=batcher.num_reused_tokens,
            token_budget=batcher.token_budget,
        )

    def step(self) -> Report:
        """Begin what can be begun, and return the tokens of the oldest batch under way."""
        start_s = time.perf_counter()
        while len(self._flights) < self._forward.depth and self._begin():
            pass
        flight = self._flights.popleft()
        sampled = self._finish(flight)
        if self._budget is not None:
            # A request gets a token in one of the batches that are under way together.
            num_batches = self.batcher.num_batches
            took_s = time.perf_counter() - start_s
            self._budget.observe(flight.num_tokens * num_batches, took_s * num_batches)
            self.batcher.token_budget = self._budget.tokens
        return self.report(sampled)

    def _begin(self) -> bool:
        """Submit the next batch; false if there is none, because all requests wait for tokens under way."""
        plan = self.batcher.schedule()
        if not plan.chunks:
            return False
        chunks = sorted(plan.chunks, key=_length, reverse=True)
        self._forward.submit(Work(tuple(chunk.piece() for chunk in chunks), plan.fresh, plan.copies))
        sampling = [chunk.sequence for chunk in chunks if chunk.is_last]
        num_tokens = plan.num_tokens
        self.batcher.advance(chunks)
        self._flights.append(_Flight(num_tokens, tuple((s, len(s.tokens)) for s in sampling)))
        return True

    def _finish(self, flight: _Flight) -> tuple[Sampled, ...]:
        logits = self._forward.result()
        # One that was preempted and came back may have had its token from a later flight of the same tokens.
        fresh = [row for row, (s, count) in enumerate(flight.sampling) if len(s.tokens) == count]
        if not fresh:
            return ()
        sampling = [flight.sampling[row][0] for row in fresh]
        rows = logits if len(fresh) == len(logits) else logits[fresh]
        tokens = choose(rows, [s.sampler for s in sampling], [s.index for s in sampling])
        return tuple(self._extend(s, token) for s, token in zip(sampling, tokens, strict=True))

    def _extend(self, sequence: Sequence, token: int) -> Sampled:
        index = sequence.index
        finish_reason = sequence.append(token)
        if finish_reason is not None:
            self.batcher.remove(sequence)
        return Sampled(sequence.ticket, token, index, finish_reason, sequence.num_reused or 0)


def _length(chunk: Chunk) -> tuple[bool, int]:
    """Decodes before prefills, the longest first."""
    return (chunk.num_tokens == 1, chunk.end)
