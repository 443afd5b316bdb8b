"""A simulated request: the life of a request, driven by the events of its engine."""

from __future__ import annotations

import asyncio
from typing import Protocol

import anyio
from opentelemetry.trace import INVALID_SPAN

from hotswap.runtime.active import ActiveRequest
from hotswap.runtime.core import Core, NewRequest
from hotswap.runtime.instance import Instance
from hotswap.runtime.kv_restoring import NO_RESTORE, NoRestore, Restore
from hotswap.runtime.lifecycle import End, Event, Finished, Interrupted, Requeue, departure
from hotswap.runtime.queue import ORDINARY, Standing, Ticket
from hotswap.simulation.events.engine import Counted, EventEngine

__all__ = ["RequestListener", "SimulatedRequest"]

_FINISHED, _INTERRUPTED = Finished(), Interrupted()


class RequestListener(Protocol):
    """What is told of simulated requests."""

    def request_ended(self, request: SimulatedRequest) -> None:
        """It has all its tokens, or its `error`."""
        ...


class SimulatedRequest(ActiveRequest):
    """A request without a task, a client or tokens: it counts them, and knows when the first came.

    It makes the steps of `hotswap.runtime.flow.Flow`, in its order. Each of them is a callback of the loop.

    Args:
        new: The request.
        core: The fleet that serves it.
        number: Its number among the requests of its listener.
        listener: Told when it has ended.

    Attributes:
        first_s: When its first token came, `None` if none did.
        error: What ended it, `None` if it has all its tokens.
    """

    __slots__ = ("__weakref__", "_begun", "_core", "_ended", "_event", "_has_task", "_is_answered", "_left",
        "_listener", "_loading", "_num_before", "_restored", "_sequence", "_standing", "_ticket",
        "_why_left", "error", "first_s", "number")  # fmt: skip

    def __init__(self, new: NewRequest, core: Core, number: int, listener: RequestListener) -> None:
        super().__init__(new.request, new.adapter, new.arrival, INVALID_SPAN)
        self.number, self._num_before = number, 0
        self.first_s: float | None = None
        self.error: Exception | None = None
        self._core, self._listener, self._standing = core, listener, ORDINARY
        self._ticket: Ticket | None = None
        self._begun = self._ended = self._is_answered = False
        self._sequence: Counted | None = None
        self._left: anyio.Event | None = None  # its adapter is held until then
        self._event: Event = _INTERRUPTED
        self._why_left: Event = _INTERRUPTED
        self._has_task = self.adapter is not None or core.offload is not None  # which takes as many turns
        self._loading: anyio.CancelScope | None = None
        self._restored: Restore | NoRestore = NO_RESTORE

    @property
    def finished(self) -> bool:
        return self._ended or isinstance(self._event, Finished)

    @property
    def num_generated(self) -> int:
        if self._sequence is None or self.instance is None:
            return self._num_before
        return _engine(self.instance).position(self._sequence)

    @property
    def tokens_so_far(self) -> tuple[int, ...]:
        return (0,) * self.num_generated

    def interrupt(self) -> None:
        if self._loading is not None:
            self._loading.cancel()
        elif self._sequence is not None and not self._sequence.closed and self.instance is not None:
            self._num_before = self.num_generated
            _engine(self.instance).drop(self._sequence)
            self._leave_soon(_INTERRUPTED)

    def set(self) -> None:
        """Take the answer, in the next turn of the loop; a client's task has to begin before."""
        self._is_answered = True
        if self._begun and self._has_task:
            self._core.lifetime.tasks.start_soon(self._take_and_stay)
        elif self._begun:
            asyncio.get_running_loop().call_soon(self._take)

    def is_set(self) -> bool:
        """Return whether there is an answer."""
        return self._is_answered

    async def wait(self) -> None:
        """Never called, since no task waits."""
        raise NotImplementedError

    def got_first_token(self) -> None:
        """Note the first token of a stay."""
        self._core.state.note_token(self)
        if self._core.offload is not None and self._sequence is not None:
            self._core.offload.learn_first(self, self._sequence.num_reused, self._restored)
            self._restored.leave()
        if self.first_s is None:
            self.first_s = asyncio.get_running_loop().time()

    def ended(self, error: Exception | None) -> None:
        """Leave the instance, which has ended the sequence, in the next turn of the loop."""
        self._leave_soon(_FINISHED if error is None else departure(error))

    def begin(self) -> None:
        """Ask for an instance for the first time."""
        asyncio.get_running_loop().call_soon(self._note_begin)
        self.start()

    def _note_begin(self) -> None:
        self._begun = True
        if self._is_answered:
            self.set()

    def start(self) -> None:
        """Ask for an instance; one that was found is taken in the next turn of the loop."""
        if (following := self.take_next()) is not None:
            self._hop(following)
            return
        self._is_answered = False
        request = self.remaining if self._num_before else self.request
        self._ticket = self._core.admission.enter(
            request, self.arrival, standing=self._standing, answered=self
        )

    def _take(self) -> None:
        if (instance := self._taken()) is not None:
            self._hop(instance)

    def _taken(self) -> Instance | None:
        ticket, self._ticket = self._ticket, None  # which refers to this request in turn
        assert ticket is not None
        try:
            return self._core.admission.take(ticket)
        except Exception as exc:  # a router's fault, or a model that cannot be loaded
            self._end(exc)
            return None

    def _hop(self, instance: Instance) -> None:
        self._core.state.attach(self, instance)
        self.begin_hop(instance)
        if self._has_task:
            self._core.lifetime.tasks.start_soon(self._stay, instance)
            return
        try:
            self._admit(instance)
        except Exception as exc:
            self._depart(instance, departure(exc))

    async def _take_and_stay(self) -> None:
        if (instance := self._taken()) is not None:
            self._core.state.attach(self, instance)
            self.begin_hop(instance)
            await self._stay(instance)

    async def _stay(self, instance: Instance) -> None:
        """Run on an instance once it has the adapter and the KV blocks that are stored."""
        self._left = left = anyio.Event()
        self._event, offload = _INTERRUPTED, self._core.offload
        try:
            with anyio.CancelScope() as self._loading:
                async with (
                    self._core.caches.held(self.adapter, self.request.id, instance, self.span),
                    offload.restored(self, instance, self.span) if offload else NO_RESTORE as self._restored,
                ):
                    self._loading = None
                    self._admit(instance)
                    await left.wait()
                    self._note_left()
        except Exception as exc:
            self._event = departure(exc)
        self._loading, self._restored = None, NO_RESTORE
        self._depart(instance, self._event)

    def _admit(self, instance: Instance) -> None:
        request = self.remaining if self._num_before else self.request
        self._sequence = _engine(instance).admit(request, self)

    def _leave_soon(self, why: Event) -> None:
        self._why_left = why
        if self._left is not None:
            self._left.set()
        else:
            asyncio.get_running_loop().call_soon(self._leave)

    def _leave(self) -> None:
        self._note_left()
        assert self.instance is not None
        self._depart(self.instance, self._event)

    def _note_left(self) -> None:
        if self._sequence is not None and self._why_left is not _INTERRUPTED:
            self._num_before = self._sequence.position
        self._sequence, self._event = None, self._why_left

    def _depart(self, instance: Instance, event: Event) -> None:
        """End a stay, and go on from there."""
        self._event = event
        decision = self._core.state.depart(self, instance, event)
        if isinstance(decision, End):
            self._end(decision.error)
            return
        self._standing, pause_s = ORDINARY, 0.0
        if isinstance(decision, Requeue):
            self._standing, pause_s = Standing(decision.suspect, decision.stalled), decision.pause_s
        if pause_s:
            asyncio.get_running_loop().call_later(pause_s, self.start)
        else:
            self.start()

    def abort(self, error: Exception) -> None:
        raise NotImplementedError("a simulation removes no models")

    def _end(self, error: Exception | None) -> None:
        self.error, self._ended = error, True
        if (unused := self.take_next()) is not None:
            self._core.state.release(self.request, unused)
        if self.arrived is not None:
            self.arrived.set()
        self._core.state.end(self)
        self._listener.request_ended(self)

    def __repr__(self) -> str:
        where = self.instance.id if self.instance is not None else "waiting"
        tokens = f"{self.num_generated} tokens"
        return f"<SimulatedRequest {self.request.id} {self.request.model} at {where} [{tokens}]>"


def _engine(instance: Instance) -> EventEngine:
    assert isinstance(instance.engine, EventEngine), "an event fleet has no other"
    return instance.engine
