"""The latest events of a fleet, and those that read them."""

from __future__ import annotations

from collections import deque
from itertools import islice

import anyio

from hotswap.action import DrainRecord, MigrationRecord, SwapRecord
from hotswap.checks import check_counts
from hotswap.errors import ConfigError
from hotswap.event import EventKind, FleetEvent
from hotswap.loop_time import current_time
from hotswap.phase_view import PhaseView
from hotswap.request import AdapterId, ModelId
from hotswap.runtime.lifetime import Lifetime
from hotswap.view import InstanceId

__all__ = ["EventLog", "EventStream"]

MAX_EVENTS = 4096


class EventLog:
    """Keeps the last 4096 events, numbered from 1, and wakes those that wait for the next.

    A reader is a number, that of the last event which it has seen: it holds nothing, however slow it is.
    """

    def __init__(self) -> None:
        self._events: deque[FleetEvent] = deque(maxlen=MAX_EVENTS)
        self._changed: anyio.Event | None = None
        self._is_open = False
        self.last = 0

    @property
    def is_awaited(self) -> bool:
        """Whether a reader waits for the next event."""
        return self._changed is not None

    def open(self) -> None:
        """Let readers wait: the fleet is open."""
        self._is_open = True

    def close(self) -> None:
        """End those that read."""
        self._is_open = False
        self._wake()

    def note(
        self,
        kind: EventKind,
        *,
        instance: InstanceId | None = None,
        model: ModelId | None = None,
        adapter: AdapterId | None = None,
        phase: PhaseView | None = None,
        reason: str = "",
        record: SwapRecord | MigrationRecord | DrainRecord | None = None,
    ) -> None:
        """Add an event that has just happened, unless the fleet is closed.

        The arguments are fields of `FleetEvent`.
        """
        if not self._is_open:
            return
        self.last += 1
        self._events.append(
            FleetEvent(
                number=self.last,
                at_s=current_time(),
                kind=kind,
                instance=instance,
                model=model,
                adapter=adapter,
                phase=phase,
                reason=reason,
                record=record,
            )
        )
        self._wake()

    def since(self, number: int) -> list[FleetEvent]:
        """Return the events after a number, behind a `"gap"` if some are not kept or it is of no event."""
        before_first = self.last - len(self._events)
        if before_first <= number <= self.last:
            return list(islice(self._events, number - before_first, None))
        gap = FleetEvent(number=before_first, at_s=current_time(), kind="gap")
        return [gap, *self._events]

    async def next(self, number: int) -> list[FleetEvent]:
        """Return the events after a number, waiting for one if need be; none once the log is closed."""
        while not (events := self.since(number)) and self._is_open:
            self._changed = self._changed or anyio.Event()
            await self._changed.wait()
        return events

    def _wake(self) -> None:
        if self._changed is not None:
            self._changed.set()
            self._changed = None

    def __repr__(self) -> str:
        return f"<EventLog [{len(self._events)} of {self.last} events kept]>"


class EventStream:
    """What happens in a fleet, as it happens; ends with the fleet.

    Iterate it, or `take` all that has happened at once. The fleet keeps the last 4096 events and waits for no
    reader: one that has missed some gets a `FleetEvent` of kind `"gap"` in their place, and goes on with
    those that are kept. Cancelling an iteration loses no event.

    Raises while iterating: `WrongLoop` on another event loop than the fleet's.
    """

    def __init__(self, log: EventLog, lifetime: Lifetime, after: int | None) -> None:
        if after is not None:
            check_counts(ConfigError, 0, after=after)
        self._log, self._lifetime = log, lifetime
        self._number = log.last if after is None else after
        self._unread: deque[FleetEvent] = deque()

    def __aiter__(self) -> EventStream:
        return self

    async def __anext__(self) -> FleetEvent:
        if not self._unread:
            self._unread.extend(await self._next())
        if not self._unread:
            raise StopAsyncIteration
        return self._unread.popleft()

    async def take(self) -> list[FleetEvent]:
        """Wait for an event, and return all that have happened; none once the fleet has closed."""
        events = list(self._unread) or await self._next()
        self._unread.clear()
        return events

    async def _next(self) -> list[FleetEvent]:
        self._lifetime.check_loop()
        events = await self._log.next(self._number)
        if events:
            self._number = events[-1].number
        return events

    def __repr__(self) -> str:
        return f"<EventStream [after event {self._number} of {self._log.last}]>"
