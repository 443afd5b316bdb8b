"""Closing a fleet gracefully: it admits no more requests, ends when those under way have, and saves."""

from __future__ import annotations

import logging
import math

import anyio

from hotswap.checks import check_seconds
from hotswap.errors import ConfigError, FleetClosed
from hotswap.runtime.lifetime import Lifetime
from hotswap.runtime.offload import Offload
from hotswap.runtime.state import FleetState

__all__ = ["Closing"]

log = logging.getLogger("hotswap")


class Closing:
    """Whether a fleet still admits requests, the wait for the last of them, and what they leave.

    Args:
        state: Of the fleet.
        lifetime: Of the fleet.
        offload: Saves to the fleet's KV store; `None` without one.
    """

    def __init__(self, state: FleetState, lifetime: Lifetime, offload: Offload | None) -> None:
        self._state, self._lifetime, self._offload = state, lifetime, offload
        self._num_callers = 0
        self._is_closed = False

    def begin(self) -> None:
        """Admit requests: the fleet is open, for the first time or again."""
        self._is_closed = False

    @property
    def admits(self) -> bool:
        """Whether the fleet is open and takes new requests."""
        return self._lifetime.is_open and not self._num_callers and not self._is_closed

    def check_admits(self) -> None:
        """Raise `FleetClosed` if a new request comes too late, or too early, and `WrongLoop` as ever."""
        self._lifetime.check_open()
        if self._num_callers or self._is_closed:
            raise FleetClosed("The fleet is closing and takes no new requests; ask another fleet.")

    async def run(self, deadline_s: float | None) -> int:
        """Admit none, wait for those under way, and end at the deadline those that are left.

        Return how many these were. A cancellation of the last caller has requests admitted again.
        """
        check_seconds(ConfigError, deadline_s=deadline_s)
        self._num_callers += 1
        self._state.events.note("fleet_closing")
        try:
            num_requests = len(self._state.entering) + len(self._state.requests)
            log.info("The fleet closes; %d requests are under way.", num_requests)
            with anyio.move_on_after(math.inf if deadline_s is None else deadline_s):
                await self._requests_ended()
            num_ended = self._end_requests(deadline_s)
            await self._requests_ended()
            self._lifetime.check_open()  # its block may have been left, which ends requests too
            await self.save()
            self._is_closed = True
            self._state.events.note("fleet_closed")
        finally:
            self._num_callers -= 1
            if self.admits:
                self._state.events.note("fleet_reopened")
        return num_ended

    async def save(self) -> None:
        """Save what ended requests left for fleets that open the KV store later, unless that is done."""
        if self._offload is not None and not self._is_closed:
            await self._offload.save_common()

    async def _requests_ended(self) -> None:
        while self._state.entering or self._state.requests:
            await self._state.changed(self._state.version)

    def _end_requests(self, deadline_s: float | None) -> int:
        entering, left = tuple(self._state.entering), tuple(self._state.requests.values())
        closed = f"The fleet closed {deadline_s} s after it began to"
        for request in entering:
            request.abort(
                FleetClosed(f"{closed}, before the prompt of a request was read. Ask another fleet.")
            )
        for one in left:
            told = f"request {one.request.id!r} had not finished, and {one.num_generated} tokens were given"
            one.abort(FleetClosed(f"{closed}; {told}. Ask another fleet."))
        if num_ended := len(entering) + len(left):
            log.warning("The fleet closed before %d requests had finished; they ended unfinished.", num_ended)
        return num_ended

    def __repr__(self) -> str:
        return f"<Closing [{'closed' if self._is_closed else 'closing' if self._num_callers else 'open'}]>"
