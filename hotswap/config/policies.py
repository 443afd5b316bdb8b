"""Policies that may be others while a fleet is open."""

from __future__ import annotations

from collections.abc import Sequence

from hotswap.action import Action
from hotswap.request import Request
from hotswap.router import Router
from hotswap.scheduler import Scheduler
from hotswap.view import FleetView, InstanceId

__all__ = ["ReplaceableRouter", "ReplaceableScheduler"]


class ReplaceableScheduler(Scheduler):
    """Plans as another scheduler does, which `use` exchanges: the next plan is the new one's."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._present = scheduler

    def use(self, scheduler: Scheduler) -> None:
        """Plan as this scheduler does from now on."""
        self._present = scheduler

    def plan(self, fleet: FleetView) -> Sequence[Action]:
        return self._present.plan(fleet)

    def __repr__(self) -> str:
        return repr(self._present)


class ReplaceableRouter(Router):
    """Routes as another router does, which `use` exchanges: the next question goes to the new one."""

    def __init__(self, router: Router) -> None:
        self._present = router

    def use(self, router: Router) -> None:
        """Route as this router does from now on."""
        self._present = router

    def route(self, request: Request, fleet: FleetView) -> InstanceId | None:
        return self._present.route(request, fleet)

    def __repr__(self) -> str:
        return repr(self._present)
