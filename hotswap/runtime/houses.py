"""Engines that come while a fleet is open, and may go again: each is kept started by a task of its own."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Self

import anyio
from anyio import AsyncContextManagerMixin

from hotswap.runtime.instance import Instance
from hotswap.view import InstanceId

if TYPE_CHECKING:
    from anyio.abc import TaskGroup, TaskStatus

__all__ = ["Houses"]


class Houses(AsyncContextManagerMixin):
    """Starts and stops engines at any time; leaving it stops those that are left.

    A task of its own for each, because whoever starts an engine must be who stops it.
    """

    def __init__(self) -> None:
        self._guests: dict[InstanceId, tuple[anyio.Event, anyio.Event]] = {}  # told to leave, has left
        self._tasks: TaskGroup | None = None

    @asynccontextmanager
    async def __asynccontextmanager__(self) -> AsyncGenerator[Self]:
        async with anyio.create_task_group() as self._tasks:
            try:
                yield self
            finally:
                for leaving, _ in self._guests.values():
                    leaving.set()

    async def move_in(self, instance: Instance) -> None:
        """Start an engine; what it raises then is raised here."""
        assert self._tasks is not None, "only a fleet that is open takes engines in"
        await self._tasks.start(self._keep, instance, name=f"engine {instance.id}")

    async def move_out(self, instance: Instance) -> None:
        """Stop an engine that moved in; others stay as they are."""
        if (guest := self._guests.get(instance.id)) is not None:
            leaving, left = guest
            leaving.set()
            await left.wait()

    async def _keep(self, instance: Instance, *, task_status: TaskStatus[None]) -> None:
        leaving, left = anyio.Event(), anyio.Event()
        try:
            async with instance.engine:
                self._guests[instance.id] = leaving, left
                task_status.started()
                with anyio.CancelScope(shield=True):  # requests end first, whatever ends the fleet
                    await leaving.wait()
        finally:
            self._guests.pop(instance.id, None)
            left.set()
