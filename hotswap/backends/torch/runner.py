"""Runs the steps of one loaded model: schedules batches, computes them, samples tokens."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Collection
from concurrent.futures import Future
from dataclasses import dataclass, replace

from torch import Tensor

from hotswap.backends.torch.batcher import Batcher
from hotswap.backends.torch.budget import TokenBudget
from hotswap.backends.torch.device import is_out_of_memory
from hotswap.backends.torch.distribution import Workspace
from hotswap.backends.torch.forward import Forward, Work
from hotswap.backends.torch.masks import Masks, MaskThread
from hotswap.backends.torch.sampling import Choice
from hotswap.backends.torch.sequence import Chunk, Sequence
from hotswap.backends.torch.smaller_steps import compute_in_parts, sample_in_parts
from hotswap.errors import HotswapError, InstanceError, InstanceLost
from hotswap.request import FinishReason, ScoredPrompt, TokenLogprob

__all__ = ["Report", "Runner", "Sampled"]

_log = logging.getLogger("hotswap")

# A failed step is computed again without up to so many of its newest requests.
_MAX_DROPPED = 4
# After so many steps in a row that failed, each of one request, the engine is lost.
_MAX_FAILED_STEPS = 3


@dataclass(frozen=True, slots=True)
class Sampled:
    """A sampled token.

    Attributes:
        ticket: The request's ticket.
        token: The token id.
        index: Its position among the generated tokens.
        finish_reason: Why it is the request's last token; `None` if it is not.
        num_reused: The number of the request's tokens that were found in the prefix cache.
        logprob: Its log-probability, if the request asks for it.
        top_logprobs: The most probable tokens, likewise.
        prompt_logprobs: Those of the prompt, with the first token, likewise.
        error: Why the request ends without a token; the engine and its other requests go on.
    """

    ticket: int
    token: int
    index: int
    finish_reason: FinishReason | None
    num_reused: int = 0
    logprob: float | None = None
    top_logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: ScoredPrompt | None = None
    error: HotswapError | None = None

    @property
    def is_last(self) -> bool:
        """Whether the request has ended."""
        return self.finish_reason is not None or self.error is not None


@dataclass(frozen=True, slots=True)
class Report:
    """The tokens of a step, and the counters of the batcher and the block pool after it.

    `last_ticket` is the ticket of the latest request that the batcher has received; `preempted` are the
    tickets of the requests that wait after a preemption.
    """

    sampled: tuple[Sampled, ...] = ()
    num_running: int = 0
    num_prefill_tokens: int = 0
    num_next_blocks: int = 0
    preempted: tuple[int, ...] = ()
    last_ticket: int = 0
    num_blocks: int = 0
    num_free_blocks: int = 0
    num_cached_blocks: int = 0
    num_preempted: int = 0
    num_reused_tokens: int = 0
    token_budget: int = 0
    kept_since_s: float | None = None


@dataclass(frozen=True, slots=True)
class _InFlightStep:
    """A step in flight.

    Attributes:
        work: What was submitted.
        sequences: The requests of its pieces, in order.
        sampling: The requests it samples for, each with its number of tokens then.
        masks: The masks of requests; `None` if no request is constrained.
        rows: Which of the masks are those of `sampling`, in its order.
    """

    work: Work
    sequences: tuple[Sequence, ...]
    sampling: tuple[tuple[Sequence, int], ...]
    masks: Future[Masks] | None = None
    rows: tuple[int, ...] = ()

    @property
    def num_tokens(self) -> int:
        """The number of rows."""
        return self.work.num_tokens

    def without(self, dropped: Collection[Sequence]) -> _InFlightStep:
        """Return the step of the other requests."""
        kept = [at for at, sequence in enumerate(self.sequences) if sequence not in dropped]
        sampling = [at for at, (sequence, _) in enumerate(self.sampling) if sequence not in dropped]
        return replace(
            self,
            work=replace(self.work, pieces=tuple(self.work.pieces[at] for at in kept)),
            sequences=tuple(self.sequences[at] for at in kept),
            sampling=tuple(self.sampling[at] for at in sampling),
            rows=tuple(self.rows[at] for at in sampling),
        )


class Runner:
    """Runs the requests of one loaded model; used by one thread.

    Keeps up to `forward.depth` batches in flight. A request has at most one batch in flight that samples for
    it, and may be preempted or removed meanwhile.

    Args:
        forward: The model.
        batcher: The scheduler of its requests.
        budget: The controller of the token budget; `None` for a fixed budget.

    Attributes:
        background_done: Whether no background work is left.
        is_blocked: Whether no request can be computed until a command has changed something: requests that
            are stopped, or arrive, hold the blocks that all others wait for.
    """

    def __init__(self, forward: Forward, batcher: Batcher, budget: TokenBudget | None = None) -> None:
        self._forward, self._budget = forward, budget
        self._in_flight: deque[_InFlightStep] = deque()
        self._space, self._masks = Workspace(), MaskThread()
        self._num_failed = 0
        self.batcher = batcher
        self.background_done = self.is_blocked = False
        if budget is not None:
            batcher.token_budget = budget.tokens

    @property
    def idle(self) -> bool:
        """Whether there are no batches in flight, and no requests that could be computed."""
        waits = self.is_blocked or not (self.batcher.running or self.batcher.waiting)
        return waits and not self._in_flight

    @property
    def is_timed(self) -> bool:
        """Whether steps are timed for a target latency."""
        return self._budget is not None

    def is_in_flight(self, sequence: Sequence) -> bool:
        """Return whether a batch in flight computes a request."""
        return any(sequence in step.sequences for step in self._in_flight)

    def do_background_work(self) -> None:
        """Do a small piece of background work, such as packing weights, and update `background_done`."""
        self.background_done = self.background_done or not self._forward.do_background_work()

    def close(self) -> None:
        """End the thread of masks; the runner must not be used afterwards."""
        self._masks.close()

    def report(self, sampled: tuple[Sampled, ...] = ()) -> Report:
        """Return the current counters, with the tokens of a step."""
        batcher, blocks = self.batcher, self.batcher.blocks
        return Report(
            sampled,
            num_running=len(batcher.running) + len(batcher.parked),
            num_prefill_tokens=batcher.num_prefill_tokens,
            num_next_blocks=batcher.num_next_blocks,
            preempted=batcher.preempted,
            last_ticket=batcher.last_ticket,
            num_blocks=blocks.num_blocks,
            num_free_blocks=blocks.num_free,
            num_cached_blocks=blocks.num_cached,
            num_preempted=batcher.num_preempted,
            num_reused_tokens=batcher.num_reused_tokens,
            token_budget=batcher.token_budget,
            kept_since_s=blocks.kept_since_s if batcher.needs_blocks_alone else None,
        )

    def step(self) -> Report:
        """Submit batches up to the depth of the pipeline, then finish the oldest and return its tokens."""
        start_s = time.perf_counter()
        while len(self._in_flight) < self._forward.depth and self._begin():
            pass
        if not self._in_flight:
            self.is_blocked = True
            self.batcher.settle()
            return self.report()
        step = self._in_flight.popleft()
        sampled = self._finish(step)
        if self._budget is not None:
            # A decoding request gets one token per `num_batches` steps.
            num_batches = self.batcher.num_batches
            took_s = time.perf_counter() - start_s
            self._budget.observe(step.num_tokens * num_batches, took_s * num_batches)
            self.batcher.token_budget = self._budget.tokens
        if not self._in_flight:
            self.batcher.settle()
        return self.report(sampled)

    def _begin(self) -> bool:
        """Submit the next batch; false if there is none, since all requests wait for batches in flight."""
        plan = self.batcher.schedule()
        if not plan.chunks:
            return False
        chunks = sorted(plan.chunks, key=_length, reverse=True)
        sampling = tuple((chunk.sequence, len(chunk.sequence.tokens)) for chunk in chunks if chunk.is_last)
        masks = self._masks.begin([sequence.sampler.constraint for sequence, _ in sampling])
        work = Work(
            tuple(chunk.piece() for chunk in chunks), plan.fresh, plan.copies, plan.restored, plan.saved
        )
        self._forward.submit(work)
        self.batcher.advance(chunks)
        step = _InFlightStep(work, tuple(chunk.sequence for chunk in chunks), sampling)
        self._in_flight.append(replace(step, masks=masks, rows=tuple(range(len(sampling)))))
        return True

    def _finish(self, step: _InFlightStep) -> tuple[Sampled, ...]:
        try:
            logits = self._forward.result()
        except Exception as exc:
            return self._retry(step, exc)
        self._num_failed = 0
        return self._sample(step, logits)

    def _retry(self, step: _InFlightStep, error: Exception) -> tuple[Sampled, ...]:
        """Compute a failed step again without its newest requests, which end; raise if that does not help.

        The requests that go on get the same tokens: a step writes the same keys and values again. Recurrent
        states may have been changed by a part of the step: with these, the other requests are computed anew,
        from snapshots made before.
        """
        self._num_failed += 1
        is_lost = isinstance(error, InstanceLost)  # nothing is left to compute with
        if is_lost or self._forward.depth > 1 or self._num_failed > _MAX_FAILED_STEPS:
            raise error
        if is_out_of_memory(error) and (sampled := self._retry_smaller(step, error)) is not None:
            return sampled
        newest = sorted(step.sequences, key=lambda sequence: sequence.ticket, reverse=True)
        if self._forward.keeps_states:
            self._recompute_all(step, but=newest[0])
            return (self._drop(newest[0], step, error),)
        for count in range(1, min(len(newest), _MAX_DROPPED) + 1):
            rest, logits = step.without(newest[:count]), None
            if rest.sequences:
                self._forward.submit(rest.work)
                try:
                    logits = self._forward.result()
                except Exception:
                    _log.debug("A step without its %d newest requests failed as well.", count, exc_info=True)
                    continue
                self._num_failed = 0
            _log.warning(
                "A step of %d requests failed; the engine goes on without its newest %d: %r",
                len(newest),
                count,
                error,
            )
            dropped = tuple(self._drop(sequence, step, error) for sequence in newest[:count])
            return dropped if logits is None else dropped + self._sample(rest, logits)
        raise error

    def _retry_smaller(self, step: _InFlightStep, error: Exception) -> tuple[Sampled, ...] | None:
        """Compute a step that ran out of memory in parts, and later ones with half of its tokens at most.

        Returns `None` if that does not help: steps are no larger than what decoding takes, or a part fails.
        """
        batcher = self.batcher
        tokens = max(step.num_tokens // 2, batcher.max_requests + batcher.block_tokens)
        if is_lower := tokens < batcher.token_budget:
            _log.warning(
                "A step of %d tokens ran out of memory; steps have at most %d from now on: %s",
                step.num_tokens,
                tokens,
                error,
            )
            batcher.token_budget = tokens
            if self._budget is not None:
                self._budget.limit(tokens)
        if self._forward.keeps_states:
            if not is_lower:
                return None
            self._recompute_all(step)
            return ()
        try:
            logits = compute_in_parts(self._forward, step.work)
        except Exception:
            _log.debug("A step that ran out of memory failed in parts as well.", exc_info=True)
            return None
        self._num_failed = 0
        return self._sample(step, logits)

    def _recompute_all(self, step: _InFlightStep, but: Sequence | None = None) -> None:
        """Have the requests that run computed anew, as a failed step has changed their states."""
        starts = dict(zip(step.sequences, (piece.start for piece in step.work.pieces), strict=True))
        for sequence in tuple(self.batcher.running):
            if sequence is not but:
                self.batcher.recompute(sequence, starts.get(sequence, sequence.num_computed))

    def _drop(self, sequence: Sequence, step: _InFlightStep, error: Exception) -> Sampled:
        piece = step.work.pieces[step.sequences.index(sequence)]
        self.batcher.discard(sequence, piece.start)
        failure = InstanceError(
            f"A step with the request failed, and the engine goes on without the request: {error!r}"
        )
        failure.__cause__ = error.with_traceback(None)
        return Sampled(sequence.ticket, -1, sequence.index, None, error=failure)

    def _sample(self, step: _InFlightStep, logits: Tensor) -> tuple[Sampled, ...]:
        if any(piece.num_scored for piece in step.work.pieces):
            logits = _score(step, logits)
        # A request that was preempted and admitted again may have its token from a later step already.
        fresh = [row for row, (s, count) in enumerate(step.sampling) if len(s.tokens) == count]
        if not fresh:
            return ()
        sampling = [step.sampling[row][0] for row in fresh]
        rows = logits if len(fresh) == len(logits) else logits[fresh]
        samplers, indices = [s.sampler for s in sampling], [s.index for s in sampling]
        masks = step.masks.result() if step.masks is not None else ()
        chosen = [masks[step.rows[row]] for row in fresh] if masks else []
        choices = sample_in_parts(rows, samplers, indices, self._space, chosen)
        return tuple(self._extend(s, choice) for s, choice in zip(sampling, choices, strict=True))

    def _extend(self, sequence: Sequence, choice: Choice) -> Sampled:
        index = sequence.index
        finish_reason = sequence.append(choice.token) if choice.error is None else None
        scores, sequence.scores = sequence.scores, None
        sampled = Sampled(
            sequence.ticket,
            choice.token,
            index,
            finish_reason,
            sequence.num_reused or 0,
            choice.logprob,
            choice.top_logprobs,
            None if scores is None else scores.scored,
            choice.error,
        )
        if sampled.is_last:
            self.batcher.remove(sequence)
        return sampled


def _score(step: _InFlightStep, logits: Tensor) -> Tensor:
    """Add to the log-probabilities of prompts; return the rows that sample.

    Args:
        step: What was computed.
        logits: Of all rows that it needed.
    """
    sampling: list[int] = []
    at = 0
    for sequence, piece in zip(step.sequences, step.work.pieces, strict=True):
        if sequence.scores is not None and piece.num_scored:
            sequence.scores.add(piece.start, logits[at : at + piece.num_scored])
        at += piece.num_kept
        if piece.samples:
            sampling.append(at - 1)
    return logits[sampling]


def _length(chunk: Chunk) -> tuple[bool, int]:
    """Decodes before prefills, the longest first."""
    return (chunk.num_tokens == 1, chunk.end)
