"""A model and its batcher: one `step` after another."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from hotswap.backends.torch.batcher import Batcher, Chunk, Sequence
from hotswap.backends.torch.forward import Forward, Work
from hotswap.backends.torch.sampling import choose
from hotswap.request import FinishReason

__all__ = ["Report", "Runner", "Sampled"]


@dataclass(frozen=True, slots=True)
class Sampled:
    """A token that a step brought forth."""

    ticket: int
    token: int
    index: int
    finish_reason: FinishReason | None


@dataclass(frozen=True, slots=True)
class Report:
    """What the worker tells its engine: the tokens of a step, and how the books stand after it."""

    sampled: tuple[Sampled, ...] = ()
    num_running: int = 0
    num_free_blocks: int = 0
    num_preempted: int = 0


@dataclass(frozen=True, slots=True)
class _Flight:
    """Work under way: the requests that it samples for, and how many tokens each had when it began."""

    sampling: tuple[tuple[Sequence, int], ...]


class Runner:
    """Runs the requests of one loaded model; belongs to one thread.

    As many batches are under way as the model can work on at once. A request is in at most one that samples
    for it, and may be preempted or leave meanwhile.
    """

    def __init__(self, forward: Forward, batcher: Batcher) -> None:
        self._forward = forward
        self._flights: deque[_Flight] = deque()
        self.batcher = batcher
        self.tidy = False

    @property
    def idle(self) -> bool:
        """Whether there is nothing to step for."""
        return not (self._flights or self.batcher.running or self.batcher.waiting)

    def tidy_up(self) -> None:
        """Do a little of what makes later steps faster; `tidy` says whether all is done."""
        self.tidy = self.tidy or not self._forward.improve()

    def report(self, sampled: tuple[Sampled, ...] = ()) -> Report:
        """Return the books as they stand, with the tokens of a step."""
        return Report(
            sampled, len(self.batcher.running), self.batcher.blocks.num_free, self.batcher.num_preempted
        )

    def step(self) -> Report:
        """Begin what can be begun, and return the tokens of the oldest batch under way."""
        while len(self._flights) < self._forward.depth and self._begin():
            pass
        flight = self._flights.popleft()
        logits = self._forward.result()
        # One that was preempted and came back may have had its token from a later flight of the same tokens.
        fresh = [row for row, (s, count) in enumerate(flight.sampling) if len(s.tokens) == count]
        if not fresh:
            return self.report()
        sampling = [flight.sampling[row][0] for row in fresh]
        rows = logits if len(fresh) == len(logits) else logits[fresh]
        tokens = choose(rows, [s.sampler for s in sampling], [s.index for s in sampling])
        return self.report(tuple(self._extend(s, token) for s, token in zip(sampling, tokens, strict=True)))

    def _begin(self) -> bool:
        """Submit the next batch; false if there is none, because all requests wait for tokens under way."""
        chunks, fresh = self.batcher.schedule()
        if not chunks:
            return False
        chunks = sorted(chunks, key=_length, reverse=True)
        self._forward.submit(Work(tuple(chunk.piece() for chunk in chunks), fresh))
        sampling = [chunk.sequence for chunk in chunks if chunk.is_last]
        for chunk in chunks:
            chunk.sequence.num_computed = chunk.end
        self._flights.append(_Flight(tuple((sequence, len(sequence.tokens)) for sequence in sampling)))
        return True

    def _extend(self, sequence: Sequence, token: int) -> Sampled:
        index = sequence.index
        finish_reason = sequence.append(token)
        if finish_reason is not None:
            self.batcher.remove(sequence)
        return Sampled(sequence.ticket, token, index, finish_reason)


def _length(chunk: Chunk) -> tuple[bool, int]:
    """Decodes before prefills, the longest first."""
    return (chunk.num_tokens == 1, chunk.end)
