"""What is told of a fleet's changes, to those that subscribe to its state."""

from __future__ import annotations

from enum import Enum, auto
from typing import Protocol

__all__ = ["Change", "StateListener"]


class Change(Enum):
    """What has changed of a fleet's state, as far as others wait for it."""

    RELEASED = auto()  # an instance has room for a request more
    WAITING = auto()  # a request waits for a model that no instance serves or swaps to
    INSTANCES = auto()  # an instance came, went, or changed its model or state


class StateListener(Protocol):
    """What is told of every change, by the code that makes it; it must not await."""

    def state_changed(self, change: Change) -> None:
        """Act on a change."""
        ...
