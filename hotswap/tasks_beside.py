"""`tasks_beside`: tasks that run beside a block, whose errors are raised as they are."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import anyio
from anyio.abc import TaskGroup

__all__ = ["tasks_beside"]


@asynccontextmanager
async def tasks_beside() -> AsyncGenerator[TaskGroup]:
    """Tasks that are cancelled when a block ends. The block's error is raised as it is, theirs in a group."""
    error: Exception | None = None
    async with anyio.create_task_group() as tasks:
        try:
            yield tasks
        except Exception as exc:  # which the group would wrap
            error = exc
        tasks.cancel_scope.cancel()
    if error is not None:
        try:
            raise error
        finally:
            error = None  # or it and this frame keep each other
