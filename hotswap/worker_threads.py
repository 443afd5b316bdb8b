"""hotswap's worker threads, apart from anyio's default ones, all of which handlers of a program may hold.

`shielded` awaits finish although their task is cancelled, so that a resource acquired by them is not lost. A
shielded `CancelScope` of anyio holds back anyio's cancellations only. asyncio's own (`asyncio.timeout`,
`Task.cancel`) interrupts the task's current await: it abandons a worker thread, and loses what the thread
acquires. A task group waits for its tasks under both kinds.
"""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TypeVar, TypeVarTuple

import anyio
from anyio import CancelScope, CapacityLimiter, to_thread
from anyio.lowlevel import RunVar

__all__ = ["in_thread", "run_in_thread", "shielded"]


# As many as anyio's default. Calls that wait for other threads of hotswap need a limiter of their own.
_NUM_THREADS = 40
_limiter: RunVar[CapacityLimiter] = RunVar("hotswap's worker threads")

_T = TypeVar("_T")
_Ts = TypeVarTuple("_Ts")


async def run_in_thread(
    function: Callable[[*_Ts], _T],
    *args: *_Ts,
    abandon_on_cancel: bool = False,
    limiter: CapacityLimiter | None = None,
) -> _T:
    """Call a function in a worker thread, and return its result or raise its error.

    Without a `limiter` at most 40 such calls run at once on an event loop, and others wait. A function that
    waits for another worker thread must have a limiter of its own, or 40 of them would wait forever.

    A cancelled call waits for the end of the function; with `abandon_on_cancel` it returns at once, and the
    function goes on. asyncio's own cancellation always abandons it.
    """
    if limiter is None:
        limiter = _own_limiter()
    return await to_thread.run_sync(function, *args, abandon_on_cancel=abandon_on_cancel, limiter=limiter)


def _own_limiter() -> CapacityLimiter:
    """The limiter of the running event loop."""
    limiter = _limiter.get(None)
    if limiter is None:
        _limiter.set(limiter := CapacityLimiter(_NUM_THREADS))
    return limiter


async def shielded(work: Callable[[], Awaitable[_T]], *, cancelled: threading.Event | None = None) -> _T:
    """Run `work` to its end in a task of its own, and return its result or raise its error.

    When the caller is cancelled, `work` still starts and finishes, and then the cancellation is raised. The
    result is lost then, so `work` itself must store what it acquires. It may watch `cancelled`, which is set
    when the caller is cancelled, to end soon.
    """
    watch = CancelScope()
    results: list[_T] = []
    failures: list[Exception] = []

    async def run() -> None:
        with CancelScope(shield=True):
            try:
                results.append(await work())
            except Exception as exc:
                failures.append(exc)
        watch.cancel()

    async def tell() -> None:
        with watch:
            try:
                await anyio.sleep_forever()
            except anyio.get_cancelled_exc_class():
                if cancelled is not None and not watch.cancel_called:
                    cancelled.set()
                raise

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(run)
        if cancelled is not None:
            tasks.start_soon(tell)
    if failures:
        raise failures[0]
    return results[0]


async def in_thread(
    call: Callable[[], _T],
    *,
    limiter: CapacityLimiter | None = None,
    cancelled: threading.Event | None = None,
) -> _T:
    """Run `call` by `run_in_thread`, `shielded`."""
    return await shielded(partial(run_in_thread, call, limiter=limiter), cancelled=cancelled)
