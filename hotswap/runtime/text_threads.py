"""`TextThreads`: where a fleet reads and writes texts, while its streams go on."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TypeVar

import anyio
from anyio import CapacityLimiter

from hotswap.errors import FleetClosed
from hotswap.runtime.lifetime import Lifetime
from hotswap.worker_threads import run_in_thread

__all__ = ["TextThreads"]

_NUM_THREADS = 4
# Texts from so many characters on are encoded for more than some tens of milliseconds.
_LONG_CHARACTERS = 100_000

T = TypeVar("T")


class TextThreads:
    """The worker threads for all texts of a fleet, of its own: callers may hold all of the default ones.

    Long texts use at most half of the processors, so that some are left for streams and the event loop, and
    they have threads apart, so that short texts do not wait for them.

    Args:
        lifetime: Of the fleet, whose tasks await the threads.
    """

    def __init__(self, lifetime: Lifetime) -> None:
        self._lifetime = lifetime
        self._short = CapacityLimiter(_NUM_THREADS)
        self._long = CapacityLimiter(max(1, min(_NUM_THREADS, (os.cpu_count() or 1) // 2)))

    async def run(self, work: Callable[[], T], *, num_characters: int) -> T:
        """Run work on a text of that length in a thread.

        A cancelled call returns at once. Work that has begun goes on and keeps its thread to its end, so that
        callers that come and go have no more threads than others; work that has not begun is dropped.

        Raises:
            FleetClosed: the fleet closed meanwhile.
        """
        limiter = self._long if num_characters >= _LONG_CHARACTERS else self._short
        scope, ended = anyio.CancelScope(), anyio.Event()
        results, errors = list[T](), list[Exception]()

        async def call() -> None:
            try:
                with scope:
                    results.append(await run_in_thread(work, limiter=limiter))
            except Exception as exc:
                errors.append(exc)
            finally:
                ended.set()

        self._lifetime.tasks.start_soon(call, name="hotswap text")
        try:
            await ended.wait()
        finally:
            scope.cancel()
        if errors:
            raise errors.pop()
        if not results:
            raise FleetClosed("The fleet closed while a text was read; ask another fleet.")
        return results[0]
