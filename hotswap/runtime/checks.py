"""What callers give a fleet beside its parts: checked where it enters."""

from __future__ import annotations

from hotswap.errors import HotswapError

__all__ = ["check_priority", "check_seconds"]


def check_seconds(error: type[HotswapError], **seconds: object) -> None:
    """Raise an error that names the argument unless each is `None`, or a number of seconds from 0 on."""
    for name, value in seconds.items():
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
            raise error(f"{name} is {value!r}; give seconds from 0 on, or None for no limit.")


def check_priority(error: type[HotswapError], priority: object) -> None:
    """Raise an error unless a priority is a whole number between -1,000 and 1,000."""
    if not isinstance(priority, int) or isinstance(priority, bool) or not -1000 <= priority <= 1000:
        raise error(f"priority is {priority!r}; give a whole number between -1000 and 1000.")
