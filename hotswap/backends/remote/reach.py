"""`Reach`: which other hosts a host turned out not to reach, and when it is to try them again."""

from __future__ import annotations

from typing import Generic, TypeVar
from weakref import WeakKeyDictionary

from anyio import current_time

__all__ = ["Reach"]

_LinkT = TypeVar("_LinkT")

# After a first failure nothing is tried for so long, after each further one for twice as long.
_FIRST_PAUSE_S, _MOST_PAUSE_S = 60.0, 3600.0


class Reach(Generic[_LinkT]):
    """What a host has found of others, by the links to them; a new link is tried at once."""

    def __init__(self) -> None:
        self._failed: WeakKeyDictionary[_LinkT, tuple[float, float]] = WeakKeyDictionary()  # pause, until

    def may_try(self, link: _LinkT) -> bool:
        """Whether the host is to try now."""
        return current_time() >= self._failed.get(link, (0.0, 0.0))[1]

    def failed(self, link: _LinkT) -> float:
        """Note that it could not connect, and return the seconds until it is to try again.

        Several tries at once count as one.
        """
        if self.may_try(link):
            before_s, _ = self._failed.get(link, (_FIRST_PAUSE_S / 2, 0.0))
            pause_s = min(2 * before_s, _MOST_PAUSE_S)
            self._failed[link] = pause_s, current_time() + pause_s
        return self._failed[link][1] - current_time()

    def worked(self, link: _LinkT) -> None:
        """Note that it could."""
        self._failed.pop(link, None)
