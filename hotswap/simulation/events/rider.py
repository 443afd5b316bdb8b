"""A request's life in a fleet of event engines: what `fly` does, from one event to the next."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import anyio
from opentelemetry.trace import INVALID_SPAN

from hotswap.errors import InstanceError, InstanceLost, RequestEvicted
from hotswap.model import Adapter
from hotswap.request import Request
from hotswap.runtime.admission import Seat, WaitingRoom
from hotswap.runtime.flight import (
    FIRST_PAUSE_S,
    LONGEST_PAUSE_S,
    MAX_INSTANCE_ERRORS,
    Flight,
    Hop,
)
from hotswap.runtime.instance import Instance
from hotswap.runtime.shelves import Shelves
from hotswap.simulation.events.engine import Counted, EventEngine

if TYPE_CHECKING:
    from anyio.abc import TaskGroup

__all__ = ["Ground", "Rider"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ground:
    """What riders use of their fleet."""

    room: WaitingRoom
    shelves: Shelves
    release: Callable[[Request, Instance], None]
    on_lost: Callable[[], None]
    on_end: Callable[[Rider], None]  # called before the rider's own
    tasks: TaskGroup


class Rider(Flight):
    """A flight without a task, a client or tokens: it knows how many there were, and when the first came.

    It makes the steps of `hotswap.runtime.flight.fly`, in its order.

    Attributes:
        first_s: When its first token came, `None` if none did.
        error: What ended it, `None` if it has all its tokens.
    """

    def __init__(
        self, request: Request, adapter: Adapter | None, ground: Ground, on_end: Callable[[Rider], None]
    ) -> None:
        # A flight's own fields, without the books of telemetry and the queue of a client.
        self.request, self.adapter, self.span = request, adapter, INVALID_SPAN
        self.number = self.num_stalls = self.num_instance_errors = 0
        self.instance, self.heading, self.becomes = None, None, None
        self.hops: list[Hop] = []
        self.evicted_by, self.on_left, self.finish_reason = None, None, None
        self.moving = False
        self.arrived, self.arrived_s = _NEVER, None
        self.first_s: float | None = None
        self.error: Exception | None = None
        self._ground, self._on_end = ground, on_end
        self._seat: Seat | None = None
        self._landed = self._rang = False
        self._num_before = 0
        self._sequence: Counted | None = None
        self._left: anyio.Event | None = None
        self._loading: anyio.CancelScope | None = None

    # ------------------------------------------------------------------ as a flight

    @property
    def landed(self) -> bool:
        return self._landed

    @property
    def num_generated(self) -> int:
        if self._sequence is None or self.instance is None:
            return self._num_before
        return _engine(self.instance).position(self._sequence)

    @property
    def journal(self) -> tuple[int, ...]:
        return (0,) * self.num_generated

    @property
    def remaining(self) -> Request:
        return self.request.continued(self.journal)

    def cut(self) -> None:
        if self._loading is not None:
            self._loading.cancel()
        elif self._sequence is not None and not self._sequence.closed and self.instance is not None:
            self._num_before = self.num_generated
            _engine(self.instance).unseat(self._sequence)
            asyncio.get_running_loop().call_soon(self._leave, None)

    # ------------------------------------------------------------------ as the bell of a seat

    def set(self) -> None:
        """Take the answer, in the next turn."""
        self._rang = True
        asyncio.get_running_loop().call_soon(self._take)

    def is_set(self) -> bool:
        """Whether there is one."""
        return self._rang

    async def wait(self) -> None:
        """Never called: nobody waits in a task."""
        raise NotImplementedError

    # ------------------------------------------------------------------ as a passenger

    def first_token(self) -> None:
        """Note when the first token of a hop came, and that the next stall begins anew."""
        now_s = asyncio.get_running_loop().time()
        self.num_stalls = self.num_instance_errors = 0
        if self.heading is None and not self.arrived.is_set():
            self.arrived_s = now_s
            self.arrived.set()
        if self.first_s is None:
            self.first_s = now_s

    def left(self, error: Exception | None) -> None:
        """Leave the instance, which has ended the sequence, in the next turn."""
        asyncio.get_running_loop().call_soon(self._gone, error)

    # ------------------------------------------------------------------ its way

    def _gone(self, error: Exception | None) -> None:
        if self._sequence is not None:
            self._num_before = self._sequence.position
            self._landed = error is None
            self._leave(error)

    def start(self) -> None:
        """Ask for a place; one that was found is taken in the next turn."""
        if (heading := self.turn_back()) is not None:
            self._hop(heading)
            return
        self._rang = False
        self._seat = self._ground.room.enter(self.remaining if self._num_before else self.request, bell=self)

    def _take(self) -> None:
        seat, self._seat = self._seat, None  # whose bell it is: nothing is left of a rider that has ended
        assert seat is not None
        try:
            instance = self._ground.room.take(seat)
        except Exception as exc:  # a router's fault, or a model that cannot be loaded
            self._end(exc)
            return
        self._hop(instance)

    def _hop(self, instance: Instance) -> None:
        self.board(instance)
        self.hops.append(Hop(instance=instance.id, first_index=self._num_before))
        if self.adapter is None:
            self._left = None
            self._sit(instance)
        else:
            self._left = anyio.Event()
            self._ground.tasks.start_soon(self._with_adapter, instance, self.adapter, self._left)

    async def _with_adapter(self, instance: Instance, adapter: Adapter, left: anyio.Event) -> None:
        try:
            with anyio.CancelScope() as self._loading:
                async with self._ground.shelves.held(adapter, self.request.id, instance, self.span):
                    self._loading = None
                    if self._sit(instance, leave=False):
                        await left.wait()
        except Exception as exc:
            self.error = exc
        self._loading = None
        error, self.error = self.error, None
        self._settle(instance, error)

    def _sit(self, instance: Instance, *, leave: bool = True) -> bool:
        try:
            self._sequence = _engine(instance).seat(
                self.remaining if self._num_before else self.request, self
            )
        except Exception as exc:
            if not leave:
                raise
            self._settle(instance, exc)
            return False
        return True

    def _leave(self, error: Exception | None) -> None:
        self._sequence = None
        if self._left is None:
            assert self.instance is not None
            self._settle(self.instance, error)
        else:  # the task gives the adapter back first
            self.error = error
            self._left.set()

    def _settle(self, instance: Instance, error: Exception | None) -> None:
        """End a hop, and go on from there."""
        match error:
            case None:
                pass
            case RequestEvicted():
                self.divert(instance.swap_context)
            case InstanceLost():
                self.divert(None)
                self._ground.on_lost()
            case InstanceError():
                self.divert(None)
                self.num_instance_errors += 1
                if self.num_instance_errors >= MAX_INSTANCE_ERRORS:
                    self.error = error
            case _:
                self.error = error
        self.alight(instance)
        if self.on_left is not None:
            self.on_left()
        self._ground.release(self.request, instance)
        self.turn()
        if self._landed or self.error is not None:
            self._end(self.error)
        elif self.num_stalls > 1:
            pause_s = min(FIRST_PAUSE_S * 2 ** (self.num_stalls - 2), LONGEST_PAUSE_S)
            asyncio.get_running_loop().call_later(pause_s, self.start)
        else:
            self.start()

    def _end(self, error: Exception | None) -> None:
        self.error, self._landed = error, True
        if (heading := self.turn_back()) is not None:
            self._ground.release(self.request, heading)
        self.arrived.set()
        self._ground.on_end(self)
        self._on_end(self)

    def __repr__(self) -> str:
        where = self.instance.id if self.instance is not None else "waiting"
        return f"<Rider {self.request.id} {self.request.model} at {where} [{self.num_generated} tokens]>"


class _Never(anyio.Event):
    """An event for which nobody waits."""

    def __new__(cls) -> _Never:
        return object.__new__(cls)

    def set(self) -> None:
        return

    def is_set(self) -> bool:
        return True


_NEVER = _Never()


def _engine(instance: Instance) -> EventEngine:
    assert isinstance(instance.engine, EventEngine), "an event fleet has no other"
    return instance.engine
