"""`HostOutbox`: what a host says, with the status of its engine beside it."""

from __future__ import annotations

import logging

import anyio

from hotswap.backends.remote.abilities import abilities_of
from hotswap.backends.remote.outbox import Outbox
from hotswap.backends.remote.values import status_changes
from hotswap.engine import Engine
from hotswap.transport import Channel
from hotswap.view import EngineStatus

__all__ = ["HostOutbox"]

log = logging.getLogger("hotswap")

_LOAD_S = 0.1  # so often a changed load is told that goes with no token


class HostOutbox(Outbox):
    """Tells how the engine's status changes: its load with tokens and every 0.1 s, anything else at once.

    It is the listener of the engine (`StatusListener`) while its link lasts. An engine that tells no changes
    is asked every 0.1 s.
    """

    def __init__(self, engine: Engine, channel: Channel, silence_s: float) -> None:
        super().__init__(channel, silence_s)
        self._engine = engine
        self._told: EngineStatus | None = None
        self._told_s = anyio.current_time()
        self._load_changed = self._state_changed = False
        self._is_polled = not engine.watch(self)

    def welcome(self) -> None:
        """Say what the engine is and can do."""
        self._told = status = self._engine.status()
        self.say("welcome", abilities=abilities_of(self._engine), status=status_changes(None, status))

    def load_changed(self) -> None:
        """See `StatusListener`."""
        if not self._load_changed:
            self._load_changed = True
            self.wake()

    def state_changed(self) -> None:
        """See `StatusListener`."""
        if not self._state_changed:
            self._state_changed = True
            self.wake()

    def say_status(self) -> None:
        """Say how the status has changed, if it has."""
        self._load_changed = self._state_changed = False
        self._told_s = anyio.current_time()
        try:
            status = self._engine.status()
        except Exception:  # the controller keeps what it was told
            log.exception("Engine %r cannot tell its status.", self._engine.id)
            return
        if status != self._told:
            self.say("status", **status_changes(self._told, status))
            self._told = status

    def prepare(self) -> None:
        is_due = (self._load_changed or self._is_polled) and self._load_pause_s() <= 0
        if self._state_changed or is_due or self.has_rows:
            self.say_status()

    def pause_s(self) -> float:
        waits = self._load_changed or self._is_polled
        return min(super().pause_s(), self._load_pause_s()) if waits else super().pause_s()

    def _load_pause_s(self) -> float:
        return self._told_s + _LOAD_S - anyio.current_time()
