"""Work that a cancellation waits for, of either kind, because what it takes would be lost half way.

A shield of anyio holds back anyio's cancellations alone. asyncio's own (`asyncio.timeout`, `Task.cancel`)
goes to whatever the task awaits at the moment: of a worker thread it lets go, and what the thread takes,
nobody knows of. A task group waits for its tasks under both.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import TypeVar

import anyio
from anyio import CancelScope, CapacityLimiter, to_thread

__all__ = ["in_thread", "unbroken"]

_T = TypeVar("_T")


async def unbroken(work: Callable[[], Awaitable[_T]]) -> _T:
    """Run `work` to its end in a task of its own, and return or raise what it does.

    Cancelled, it begins all the same, waits for the end, and raises the cancellation: so `work` itself must
    enter what it takes where somebody finds it.
    """
    results: list[_T] = []
    failures: list[Exception] = []

    async def run() -> None:
        with CancelScope(shield=True):
            try:
                results.append(await work())
            except Exception as exc:
                failures.append(exc)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(run)
    if failures:
        raise failures[0]
    return results[0]


async def in_thread(call: Callable[[], _T], *, limiter: CapacityLimiter | None = None) -> _T:
    """Call in a worker thread, as `unbroken` work."""
    return await unbroken(partial(to_thread.run_sync, call, limiter=limiter))
