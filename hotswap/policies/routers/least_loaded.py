"""Routing by the number of requests."""

from __future__ import annotations

from dataclasses import dataclass

from hotswap.policies.routers.candidates import best_candidate
from hotswap.request import Request
from hotswap.router import Router
from hotswap.view import CountRank, FleetView, InstanceId, InstanceView

__all__ = ["LeastLoadedRouter", "by_load"]


@dataclass(frozen=True, slots=True)
class LeastLoadedRouter(Router):
    """Sends a request to the open replica of its model with the fewest requests; `None` if there is none.

    Ties go to the larger share of free KV blocks, then to the smaller id.
    """

    def route(self, request: Request, fleet: FleetView) -> InstanceId | None:
        instance = best_candidate(request, fleet, by_load)
        return instance.id if instance else None


@dataclass(frozen=True, slots=True)
class _ByLoad(CountRank):
    """Ranks open instances by their number of requests, then by free KV blocks."""

    def count(self, instance: InstanceView) -> tuple[bool, int] | None:
        return (instance.swapping, instance.num_requests) if instance.open else None

    def load(self, instance: InstanceView) -> tuple[float, InstanceId]:
        return -instance.num_free_kv_blocks / max(instance.num_kv_blocks, 1), instance.id


by_load = _ByLoad()
