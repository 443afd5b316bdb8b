"""A scheduler for measurements that start every swap themselves."""

from __future__ import annotations

from collections.abc import Sequence

from hotswap import FleetView
from hotswap.abc import Action, Scheduler

__all__ = ["ByHand"]


class ByHand(Scheduler):
    """Plans nothing."""

    def plan(self, fleet: FleetView) -> Sequence[Action]:
        return ()
