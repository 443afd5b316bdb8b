"""How a command tells its result and ends: with a status, and with no traceback for what a user can mend."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

from hotswap.errors import HotswapError

__all__ = ["finish", "say"]

FAILED, INTERRUPTED, CLOSED_PIPE = 2, 130, 141


class _Unwritten(Exception):
    """Standard output could not be written; the cause is the `OSError`."""


def say(text: str) -> None:
    """Write a result to standard output, at once."""
    try:
        sys.stdout.write(f"{text}\n")
        sys.stdout.flush()
    except OSError as exc:
        # Python flushes once more as it exits, and would complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise _Unwritten from exc


def finish(command: Callable[[], int]) -> int:
    """Run a command and return its status: 2 after an error message, else what a shell gives for a signal.

    A reader of its output that leaves, as `head` does, ends it silently, by 141.
    """
    try:
        return command()
    except HotswapError as exc:
        sys.stderr.write(f"hotswap: {exc}\n")
    except _Unwritten as exc:
        if isinstance(exc.__cause__, BrokenPipeError):
            return CLOSED_PIPE
        sys.stderr.write(f"hotswap: The output could not be written: {exc.__cause__}.\n")
    except KeyboardInterrupt:
        return INTERRUPTED
    return FAILED
