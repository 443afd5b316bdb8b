"""A model and its batcher: one `step` after another."""

from __future__ import annotations

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


class Runner:
    """Runs the requests of one loaded model; belongs to one thread."""

    def __init__(self, forward: Forward, batcher: Batcher) -> None:
        self._forward = forward
        self.batcher = batcher

    @property
    def idle(self) -> bool:
        """Whether there is nothing to step for."""
        return not self.batcher.running and not self.batcher.waiting

    def report(self, sampled: tuple[Sampled, ...] = ()) -> Report:
        """Return the books as they stand, with the tokens of a step."""
        return Report(
            sampled, len(self.batcher.running), self.batcher.blocks.num_free, self.batcher.num_preempted
        )

    def step(self) -> Report:
        """Compute one batch and return the tokens it brought forth."""
        chunks, fresh = self.batcher.schedule()
        chunks = sorted(chunks, key=_length, reverse=True)
        logits = self._forward.run(Work(tuple(chunk.piece() for chunk in chunks), fresh))
        sampling = [chunk.sequence for chunk in chunks if chunk.is_last]
        for chunk in chunks:
            chunk.sequence.num_computed = chunk.end
        if not sampling:
            return self.report()
        tokens = choose(logits, [s.sampler for s in sampling], [s.index for s in sampling])
        return self.report(tuple(self._extend(s, token) for s, token in zip(sampling, tokens, strict=True)))

    def _extend(self, sequence: Sequence, token: int) -> Sampled:
        index = sequence.index
        finish_reason = sequence.append(token)
        if finish_reason is not None:
            self.batcher.remove(sequence)
        return Sampled(sequence.ticket, token, index, finish_reason)


def _length(chunk: Chunk) -> tuple[bool, int]:
    """Decodes before prefills, the longest first."""
    return (chunk.num_tokens == 1, chunk.end)
