"""How work that can wait leaves memory and processors to the steps of other engines in the process.

What copies gigabytes at full speed beside a step takes the memory's speed from it: the slowest steps in a
hundred took 1.6 to 1.8 times as long. In pieces of a fraction of a millisecond, with rests between, they take
1.05 to 1.17 times, and without any packing 1.1 (`python -m benchmarks beside`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager

__all__ = ["PIECE_BYTES", "engine_thread", "others_step", "rest", "steps"]

PIECE_BYTES = 1 << 18
"""To be read between two rests."""

_RESTS = 19  # times as long as was worked
_LONGEST_S = 0.01

_stepping: set[int] = set()  # threads
_waits: dict[int, Callable[[float], bool]] = {}


@contextmanager
def engine_thread(wait: Callable[[float], bool]) -> Generator[None]:
    """The calling thread steps for an engine in the block.

    Args:
        wait: Returns after so many seconds, or at once when the thread is wanted, and says whether it is.
    """
    me = threading.get_ident()
    _waits[me] = wait
    try:
        yield
    finally:
        del _waits[me]
        _stepping.discard(me)


def steps(now: bool) -> None:
    """Say whether the calling thread has requests to step for."""
    me = threading.get_ident()
    if now:
        _stepping.add(me)
    else:
        _stepping.discard(me)


def others_step(thread: int | None) -> bool:
    """Whether threads but this one have requests to step for."""
    return any(other != thread for other in tuple(_stepping))


def rest(worked_s: float) -> bool:
    """Let an engine's idle thread rest after a piece of work, if others step.

    A thread that steps itself, or is no engine's, does not rest: somebody waits for its work.

    Args:
        worked_s: How long the piece took; infinity asks for the longest rest.

    Returns:
        Whether to go on; false if the thread is wanted, and should leave its work to a later time.
    """
    me = threading.get_ident()
    if me in _stepping or me not in _waits or not others_step(me):
        return True
    return not _waits[me](min(_RESTS * worked_s, _LONGEST_S))
