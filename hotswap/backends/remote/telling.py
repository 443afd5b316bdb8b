"""`HostOutbox`: what a host says, with the status of its engine beside it."""

from __future__ import annotations

import logging

import anyio

from hotswap.backends.remote.abilities import abilities_of
from hotswap.backends.remote.outbox import Outbox
from hotswap.backends.remote.values import status_changes
from hotswap.backends.transports.silence import silence_fields
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
        self._load_changed = self._state_changed = self._is_due = False
        self._is_untold = anyio.Event()  # a change of the load that went with no token
        self._is_polled = not engine.watch(self)

    def welcome(self, silence_s: float) -> None:
        """Say what the engine is and can do, and after how long a silence this end ends the link."""
        self._told = status = self._engine.status()
        about = {"abilities": abilities_of(self._engine), "status": status_changes(None, status)}
        self.say("welcome", **about, **silence_fields(silence_s))

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

    async def run(self) -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._tell_load)
            await super().run()

    async def _tell_load(self) -> None:
        """Have a changed load told that goes with no token."""
        while True:
            if not self._is_polled:
                await self._is_untold.wait()
            await anyio.sleep(_LOAD_S)
            self._is_untold = anyio.Event()
            if self._load_changed or self._is_polled:
                self._is_due = True
                self.wake()

    def say_status(self) -> None:
        """Say how the status has changed, if it has."""
        self._load_changed = self._state_changed = self._is_due = False
        try:
            status = self._engine.status()
        except Exception:  # the controller keeps what it was told
            log.exception("Engine %r cannot tell its status.", self._engine.id)
            return
        told = self._told
        if told is None or status.__dict__ != told.__dict__:  # in a tenth of the time of `!=`
            self.say("status", **status_changes(told, status))
            self._told = status

    def prepare(self) -> None:
        if self._state_changed or self._is_due or (self.has_rows and (self._load_changed or self._is_polled)):
            self.say_status()
        elif self._load_changed:
            self._is_untold.set()
