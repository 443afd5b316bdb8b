"""The `Scheduler` interface: which instance should serve which model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from hotswap.action import Action
from hotswap.view import FleetView

__all__ = ["Scheduler"]


class Scheduler(ABC):
    """Turns a view of the fleet into actions.

    Pure: must not await, block, or read a clock or random numbers of its own.
    """

    @abstractmethod
    def plan(self, fleet: FleetView) -> Sequence[Action]:
        """Return what should be done now, most urgent first; empty for nothing.

        Asked every `interval_s`, and at once when a request waits for a model that no instance serves. The
        same view must give the same actions. An action on an instance that is not free is dropped, so it may
        be asked for again.
        """
