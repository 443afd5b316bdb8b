"""The running event loop, its time, on which hotswap's times are, and waiting for it.

As anyio's, which find out first which kind of event loop runs: a simulation sleeps millions of times.
"""

from __future__ import annotations

from asyncio import AbstractEventLoop, get_running_loop, sleep

from hotswap.errors import ConfigError

__all__ = ["asyncio_loop", "current_time", "sleep", "sleep_until"]


def asyncio_loop(what: str) -> AbstractEventLoop:
    """Return the running event loop, for a part that needs asyncio's.

    Raises:
        ConfigError: another one runs, as trio's; the message names the part.
    """
    try:
        return get_running_loop()
    except RuntimeError as exc:
        raise ConfigError(
            f"{what} runs on asyncio alone, and this event loop is another; start the program by "
            "asyncio.run, or by anyio.run with its default backend."
        ) from exc


def current_time() -> float:
    """Return the time of the running event loop, in seconds; a fleet asks ten times a request."""
    return get_running_loop().time()


async def sleep_until(time_s: float) -> None:
    """Wait until that time; return at the loop's next turn if it has passed."""
    await sleep(max(time_s - current_time(), 0.0))
