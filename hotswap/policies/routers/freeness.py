"""Routing to the freest replica, as Llumnix dispatches."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

from hotswap.argument_kinds import check_arguments
from hotswap.policies.freeness import Freeness
from hotswap.policies.routers.candidates import best_candidate
from hotswap.request import Request
from hotswap.router import Router
from hotswap.view import FleetView, InstanceId, InstanceView

__all__ = ["FreenessRouter", "infaas_router"]

_Rank: TypeAlias = tuple[bool, float, int, int, InstanceId]


@check_arguments
@dataclass(frozen=True, slots=True)
class FreenessRouter(Router):
    """Sends a request to the freest open replica of its model; `None` if there is none.

    Source: Llumnix, section 4.4.3: dispatch to the instance of the highest freeness, which `freeness` defines
    in both readings. The fleet's queue already asks about requests of high priority first, then in the order
    of their arrival.

    Ties, as between idle instances, go to the fewest requests, then the most free KV blocks, then the smaller
    id. An instance that is about to swap, or is too small for the request, is a last resort.
    """

    freeness: Freeness = field(default=Freeness())

    def route(self, request: Request, fleet: FleetView) -> InstanceId | None:
        high = request.priority > 0 and self.freeness.reading == "artifact"
        instance = best_candidate(request, fleet, self._for_high if high else self._for_normal)
        return instance.id if instance else None

    def _for_normal(self, instance: InstanceView) -> _Rank | None:
        return self._rank(instance, high=False)

    def _for_high(self, instance: InstanceView) -> _Rank | None:
        return self._rank(instance, high=True)

    def _rank(self, instance: InstanceView, *, high: bool) -> _Rank | None:
        if not instance.open:
            return None
        free = self.freeness.of(instance, dispatch=True, high=high)
        busy, free_blocks = instance.num_requests, instance.num_free_kv_blocks
        return instance.swapping, -free, busy, -free_blocks, instance.id


def infaas_router() -> FreenessRouter:
    """Return INFaaS++, Llumnix's baseline: the artifact's dispatch by freeness, without moves.

    The paper calls it an optimised INFaaS (Romero et al., ATC 2021) whose load includes queued requests; in
    the artifact it is Llumnix with migration turned off. Use no `VirtualUsageRescheduler` with it; its
    scaling is `FreenessAutoscaler`.
    """
    return FreenessRouter(Freeness("artifact"))
