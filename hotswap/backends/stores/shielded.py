"""Awaits that finish although their task is cancelled, so that a resource acquired by them is not lost.

A shielded `CancelScope` of anyio holds back anyio's cancellations only. asyncio's own (`asyncio.timeout`,
`Task.cancel`) interrupts the task's current await: it abandons a worker thread, and loses what the thread
acquires. A task group waits for its tasks under both kinds.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import TypeVar

import anyio
from anyio import CancelScope, CapacityLimiter

from hotswap.worker_threads import run_in_thread

__all__ = ["in_thread", "shielded"]

_T = TypeVar("_T")


async def shielded(work: Callable[[], Awaitable[_T]]) -> _T:
    """Run `work` to its end in a task of its own, and return its result or raise its error.

    When the caller is cancelled, `work` still starts and finishes, and then the cancellation is raised. The
    result is lost then, so `work` itself must store what it acquires.
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
    """Run `call` by `run_in_thread`, `shielded`."""
    return await shielded(partial(run_in_thread, call, limiter=limiter))
