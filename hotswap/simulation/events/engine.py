"""An engine that is visited when its batch changes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Protocol, Self

from hotswap.backends.sim import SimEngine
from hotswap.backends.sim.load import Load, load_of
from hotswap.backends.sim.sequence import Sequence, Step
from hotswap.engine import StatusListener
from hotswap.model import ModelCard
from hotswap.request import Request
from hotswap.simulation.events.decode_run import DecodeRun, num_alike, num_missing
from hotswap.view import EngineStatus

__all__ = ["Counted", "EventEngine", "SequenceListener"]


class SequenceListener(Protocol):
    """What is told of a sequence, in place of a stream."""

    def got_first_token(self) -> None:
        """It has got a token here."""
        ...

    def ended(self, error: Exception | None) -> None:
        """It has, by its last token or an error; the engine is amid its step, so change nothing of it now."""
        ...


@dataclass(slots=True, eq=False)
class Counted(Sequence):
    """A sequence whose tokens are counted.

    Attributes:
        listener: What is told.
        limit: The position at which it ends.
        begun: Whether it has got a token here.
        closed: Whether its end was told.
        num_reused: How many tokens were found in KV blocks.
    """

    listener: SequenceListener
    limit: int
    begun: bool = False
    closed: bool = False
    num_reused: int = 0

    def generate(self) -> bool:
        self.position += 1
        if not self.begun:
            self.begun = True
            self.listener.got_first_token()
        return self.position >= self.limit

    def token(self, position: int) -> int:
        return 0

    def reuse(self, num_tokens: int) -> None:
        self.num_reused = num_tokens

    def close(self, error: Exception | None = None) -> None:
        if not self.closed:
            self.closed = True
            self.listener.ended(error)


class EventEngine(SimEngine):
    """A `SimEngine` in all that it decides and in how long it takes; tokens are counted, not given away.

    It plans a step, and sees how many in a row are alike: those it takes as one (`DecodeRun`), and when
    something happens to its batch before they are over it looks up how far they have come. Needs an asyncio
    loop, and virtual time to be of use.
    """

    _step: Step | None = None
    _run: DecodeRun | None = None
    _timer: asyncio.TimerHandle | None = None
    _woken = _in_step = False
    _checks_tokens = False  # a trace makes its prompts of the vocabulary
    _listener: StatusListener | None = None
    _told = True  # whether the listener, if there is one, knows of a change that has not been looked at yet

    @asynccontextmanager
    async def __asynccontextmanager__(self) -> AsyncGenerator[Self]:
        # Without a task group: thousands of them, one within the other, would make every cancel scope slow.
        self._loop = asyncio.get_running_loop()
        self._batcher.on_change, self._batcher.clock = self._before_change, self._loop.time
        try:
            with self._running():
                yield self
        finally:
            if self._timer is not None:
                self._timer.cancel()
            self._step = self._run = None

    # ------------------------------------------------------------------ sequences

    def admit(self, request: Request, listener: SequenceListener) -> Counted:
        """Take a request in, as `stream` does, and tell a listener what happens to it; same errors."""

        def counted(request: Request, model: ModelCard) -> Counted:
            room = model.max_context_tokens - len(request.prompt)
            return Counted(request, listener, min(request.sampling.max_tokens, room))

        return self._admit(request, counted)

    def drop(self, sequence: Counted) -> None:
        """Forget a sequence; its listener is told nothing more."""
        sequence.closed = True
        self._batcher.remove(sequence)
        self._drain.note()

    def position(self, sequence: Counted) -> int:
        """Return how many tokens of its generation a sequence has by now."""
        if self._run is None or sequence not in self._batcher.running:
            return sequence.position
        return sequence.position + self._run.num_ended(self._loop.time())

    def watch(self, listener: StatusListener) -> bool:
        self._listener, self._told = listener, False
        return super().watch(listener)

    def status(self) -> EngineStatus:
        self._told = self._listener is None
        return super().status()

    def _load(self) -> Load:
        run = self._run
        if run is None:
            return super()._load()
        self._tell_load()  # by the next look there will be fewer blocks
        ended = run.num_ended(self._loop.time())
        if not self._reports.by_step:
            return self._ahead(ended + 1)
        told = self._ahead(ended) if ended else self._reports.told
        assert told is not None
        return told

    def _ahead(self, step: int) -> Load:
        """The load as of the beginning of a step of the run, counted from 1."""
        taken = num_missing(self._batcher.running, step, self._batcher.block_tokens)
        return load_of(self._batcher, decoding=True, num_taken=taken)

    def _refuse_if_lost(self) -> None:
        super()._refuse_if_lost()
        self._before_change()  # what asks this looks at a sequence next

    # ------------------------------------------------------------------ steps

    def _step_soon(self) -> None:
        if self._step is None and not self._woken:
            self._woken = True
            self._loop.call_soon(self._wake)

    def _wake(self) -> None:
        self._woken = False
        if self._step is None and self._started:
            self._begin()

    def _begin(self) -> None:
        """Plan what comes next, and when it ends."""
        self._tell_load()
        self._in_step = True
        step = self._batcher.plan()
        self._in_step = False
        self._drain.note()  # a plan refuses what has outgrown the pool
        self._reports.begin(idle=not step.num_tokens)
        if not step.num_tokens:
            self._step = None
            return
        self._step, self._migration.is_stepping = step, True
        num_steps = num_alike(step, self._batcher, _least_left(step))
        if num_steps > 1:
            self._run = DecodeRun.of(step, num_steps, self._loop.time(), self.profile)
            self._end_at(self._run.end_s(num_steps))
        else:
            self._end_at(self._loop.time() + step.seconds(self.profile))

    def _end_at(self, when_s: float) -> None:
        self._timer = self._loop.call_at(when_s, self._end)

    def _end(self) -> None:
        step = self._step
        assert step is not None
        if self._run is not None:
            self._pass(self._run.num_steps - 1)
        self._tell_load()
        self._reports.end()
        self._in_step = True
        self._batcher.commit(step)
        self._in_step = False
        self._step = None
        self._drain.note()
        self._migration.end_step()
        self._begin()

    def _before_change(self) -> None:
        """Cut a run short: the step that is under way is the last before the change."""
        if self._in_step:
            return
        if self._run is not None:
            run, ended = self._run, self._run.num_ended(self._loop.time())
            self._pass(ended)
            if self._timer is not None:
                self._timer.cancel()
            self._end_at(run.end_s(ended + 1))
        self._tell_load()

    def _pass(self, num_steps: int) -> None:
        """Count steps that have ended, and take the blocks of the one after them."""
        batcher = self._batcher
        if num_steps and self._reports.by_step:
            self._reports.told = self._ahead(num_steps)
        self._run = None
        for sequence in batcher.running:
            sequence.num_cached += num_steps
            sequence.position += num_steps
            blocks = max(sequence.num_blocks, -(-(sequence.num_cached + 1) // batcher.block_tokens))
            batcher.num_free_blocks -= blocks - sequence.num_blocks
            sequence.num_blocks = blocks
        self._reports.begin(idle=False)

    def _tell_load(self) -> None:
        if not self._told and self._listener is not None:
            self._told = True
            self._listener.load_changed()


def _least_left(step: Step) -> int:
    """Return how many tokens the first to end lacks; 1 if one waits for its first token, or prefills."""
    if step.prefills:
        return 1
    left = [
        sequence.limit - sequence.position
        if isinstance(sequence, Counted) and sequence.begun and not sequence.num_to_recompute
        else 1
        for sequence in step.chunks
    ]
    return max(1, min(left))
