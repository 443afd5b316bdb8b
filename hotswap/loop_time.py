"""The time of the running event loop, on which hotswap's times are, and waiting for it.

As anyio's, which find out first which kind of event loop runs: a simulation sleeps millions of times.
"""

from __future__ import annotations

from asyncio import get_running_loop, sleep

__all__ = ["current_time", "sleep", "sleep_until"]


def current_time() -> float:
    """Return the time of the running event loop, in seconds; a fleet asks ten times a request."""
    return get_running_loop().time()


async def sleep_until(time_s: float) -> None:
    """Wait until that time; return at the loop's next turn if it has passed."""
    await sleep(max(time_s - current_time(), 0.0))
