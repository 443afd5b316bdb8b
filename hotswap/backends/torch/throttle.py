"""Throttles background work of one engine while other engines of the process compute steps.

Copying gigabytes at full speed takes memory bandwidth from concurrent steps: the slowest steps in a hundred
took 1.6 to 1.8 times as long. In pieces of a fraction of a millisecond with pauses between them they take
1.05 to 1.17 times as long, and without any packing 1.1 (`python -m benchmarks beside`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager

__all__ = ["PIECE_BYTES", "engine_thread", "others_are_stepping", "pause", "set_stepping"]

PIECE_BYTES = 1 << 18
"""Bytes to read between two pauses."""

_PAUSES = 19  # the length of a pause relative to the work before it
_LONGEST_S = 0.01

_stepping: set[int] = set()  # threads
_waits: dict[int, Callable[[float], bool]] = {}


@contextmanager
def engine_thread(wait: Callable[[float], bool]) -> Generator[None]:
    """Register the calling thread as an engine's for the length of the block.

    Args:
        wait: Waits for a number of seconds, or until the thread receives a command; returns whether it did.
    """
    me = threading.get_ident()
    _waits[me] = wait
    try:
        yield
    finally:
        del _waits[me]
        _stepping.discard(me)


def set_stepping(stepping: bool) -> None:
    """Record whether the calling thread has requests to compute steps for."""
    me = threading.get_ident()
    if stepping:
        _stepping.add(me)
    else:
        _stepping.discard(me)


def others_are_stepping(thread: int | None) -> bool:
    """Whether other threads than this one have requests to compute steps for."""
    return any(other != thread for other in tuple(_stepping))


def pause(worked_s: float) -> bool:
    """Pause an engine's idle thread after a piece of work, if other threads are stepping.

    A thread that runs steps itself, or is not an engine's, does not pause: requests wait for its work.

    Args:
        worked_s: The time that the piece took, in seconds; infinity requests the longest pause.

    Returns:
        Whether to continue; false if the thread received a command and should postpone its work.
    """
    me = threading.get_ident()
    if me in _stepping or me not in _waits or not others_are_stepping(me):
        return True
    return not _waits[me](min(_PAUSES * worked_s, _LONGEST_S))
