"""Starts and stops engines while a fleet is open: a task for each keeps it started."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Self

import anyio
from anyio import AsyncContextManagerMixin

from hotswap.engine import Engine
from hotswap.view import InstanceId

if TYPE_CHECKING:
    from anyio.abc import TaskGroup, TaskStatus

__all__ = ["EngineSupervisor"]


class EngineSupervisor(AsyncContextManagerMixin):
    """Starts and stops engines at any time; leaving it stops those that are left.

    Each engine is entered and left by a task of its own, since one task must do both.
    """

    def __init__(self) -> None:
        self._engines: dict[InstanceId, tuple[anyio.Event, anyio.Event]] = {}  # told to stop, has stopped
        self._tasks: TaskGroup | None = None

    @asynccontextmanager
    async def __asynccontextmanager__(self) -> AsyncGenerator[Self]:
        async with anyio.create_task_group() as self._tasks:
            try:
                yield self
            finally:
                for stop, _ in self._engines.values():
                    stop.set()

    async def start(self, engine: Engine) -> None:
        """Start an engine; what it raises then is raised here."""
        assert self._tasks is not None, "only an open fleet starts engines"
        await self._tasks.start(self._keep, engine, name=f"engine {engine.id}")

    async def stop(self, engine: InstanceId) -> None:
        """Stop an engine that was started here; others stay as they are."""
        if (events := self._engines.get(engine)) is not None:
            stop, stopped = events
            stop.set()
            await stopped.wait()

    async def _keep(self, engine: Engine, *, task_status: TaskStatus[None]) -> None:
        stop, stopped = anyio.Event(), anyio.Event()
        try:
            async with engine:
                self._engines[engine.id] = stop, stopped
                task_status.started()
                with anyio.CancelScope(shield=True):  # requests end first, whatever ends the fleet
                    await stop.wait()
        finally:
            self._engines.pop(engine.id, None)
            stopped.set()
