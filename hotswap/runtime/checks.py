"""What callers give a fleet beside its parts: checked where it enters."""

from __future__ import annotations

import math
import sys
from typing import TypeGuard

from hotswap.errors import HotswapError

__all__ = ["check_counts", "check_positive_seconds", "check_priority", "check_seconds"]


def check_seconds(error: type[HotswapError], **seconds: object) -> None:
    """Raise an error that names the argument unless each is `None`, or a number of seconds from 0 on."""
    for name, value in seconds.items():
        if value is not None and not (_is_number(value) and value >= 0):
            raise error(f"{name} is {_shown(value)}; give seconds from 0 on, or None for no limit.")


def check_positive_seconds(error: type[HotswapError], **seconds: object) -> None:
    """Raise an error that names the argument unless each is a number of seconds over 0."""
    for name, value in seconds.items():
        if not (_is_number(value) and value > 0):
            raise error(f"{name} is {_shown(value)}; give seconds over 0 (inf is no limit).")


def check_counts(error: type[HotswapError], least: int, **counts: object) -> None:
    """Raise an error that names the argument unless each is a whole number from `least` on."""
    for name, value in counts.items():
        if not (isinstance(value, int) and _is_number(value) and value >= least):
            raise error(f"{name} is {_shown(value)}; give a whole number from {least} on.")


def check_priority(error: type[HotswapError], priority: object) -> None:
    """Raise an error unless a priority is a whole number between -1,000 and 1,000."""
    if not (isinstance(priority, int) and _is_number(priority) and -1000 <= priority <= 1000):
        raise error(f"priority is {_shown(priority)}; give a whole number between -1000 and 1000.")


def _is_number(value: object) -> TypeGuard[int | float]:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return abs(value) <= sys.float_info.max or value == math.inf


def _shown(value: object) -> str:
    try:
        text = repr(value)
    except ValueError:  # a number of too many digits
        text = "a very large number"
    return text if len(text) <= 80 else f"{text[:80]}..."
