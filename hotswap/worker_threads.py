"""hotswap's worker threads, apart from anyio's default ones, all of which handlers of a program may hold."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, TypeVarTuple

from anyio import CapacityLimiter, to_thread
from anyio.lowlevel import RunVar

__all__ = ["run_in_thread"]

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
