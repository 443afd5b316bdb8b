"""The time of the running event loop, on which hotswap's times are."""

from __future__ import annotations

from asyncio import get_running_loop

__all__ = ["current_time"]


def current_time() -> float:
    """Return the time of the running event loop, in seconds.

    It is that of `anyio.current_time`, which finds out first which kind of event loop runs: a fleet asks ten
    times a request.
    """
    return get_running_loop().time()
