"""How work that can wait leaves memory and processors to the steps of other engines in the process.

What copies gigabytes at full speed beside a step takes the memory's speed from it: a step took 1.6 times as
long. In pieces of a fraction of a millisecond, with rests between, it takes a tenth more.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager

__all__ = ["PIECE_BYTES", "engine_thread", "rest", "steps"]

PIECE_BYTES = 1 << 18
"""To be read between two rests."""

_RESTS = 9  # times as long as was worked
_LONGEST_S = 0.01

_sleep = time.sleep  # noqa: TID251 - in threads, which have no event loop
_stepping: set[int] = set()  # threads
_wanted: dict[int, Callable[[], bool]] = {}


@contextmanager
def engine_thread(is_wanted: Callable[[], bool]) -> Generator[None]:
    """The calling thread steps for an engine in the block, and does not rest while it is wanted."""
    me = threading.get_ident()
    _wanted[me] = is_wanted
    try:
        yield
    finally:
        del _wanted[me]
        _stepping.discard(me)


def steps(now: bool) -> None:
    """Say whether the calling thread has requests to step for."""
    me = threading.get_ident()
    if now:
        _stepping.add(me)
    else:
        _stepping.discard(me)


def rest(worked_s: float) -> None:
    """Rest after a piece of work of so many seconds, if others step and nobody waits for this thread.

    A thread that steps itself has no rest: its own requests would wait for it.
    """
    me = threading.get_ident()
    if not _stepping or me in _stepping or _wanted.get(me, _never)():
        return
    _sleep(min(_RESTS * worked_s, _LONGEST_S))


def _never() -> bool:
    return False
