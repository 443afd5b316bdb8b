"""Routing by load alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hotswap.lookup import CountRank, Rank
from hotswap.request import Request
from hotswap.router import Router
from hotswap.view import FleetView, InstanceId, InstanceView

__all__ = ["LeastLoadedRouter", "by_load", "candidates", "first", "least_loaded"]


@dataclass(frozen=True, slots=True)
class LeastLoadedRouter(Router):
    """Sends a request to the open replica of its model with the fewest requests; `None` if there is none.

    Ties go to the larger share of free KV blocks, then to the smaller id.
    """

    def route(self, request: Request, fleet: FleetView) -> InstanceId | None:
        instance = first(request, fleet, by_load)
        return instance.id if instance else None


def candidates(request: Request, fleet: FleetView) -> Sequence[InstanceView]:
    """Return the open replicas of the request's model that are worth sending it to.

    Those that are about to turn to another model, from where it would be evicted, count only where no other
    is open. Those that could never hold its tokens count only where no replica could, also none that is full
    now: the engine then says so to the client, who would otherwise wait for ever.
    """
    replicas = fleet.hosts(request.model)
    able = [i for i in replicas if _holds(i, request)] or replicas
    serving = [i for i in able if i.open]
    return [i for i in serving if not i.swapping] or serving


def first(request: Request, fleet: FleetView, rank: Rank) -> InstanceView | None:
    """Return the best of the `candidates` by a rank that leaves out who is not open; `None` of none.

    The rank puts those that are about to turn to another model last, as `by_load` does. It is asked about
    who has changed, not about all, unless the best is too small for the request.
    """
    best = fleet.least(request.model, rank)
    if best is None or _holds(best, request):
        return best
    ranked = (instance for instance in candidates(request, fleet) if rank(instance) is not None)
    return min(ranked, key=rank, default=None)


@dataclass(frozen=True, slots=True)
class _ByLoad(CountRank):
    """Ranks open instances by their number of requests, then by free KV blocks."""

    def __call__(self, instance: InstanceView) -> tuple[bool, int, float, InstanceId] | None:
        return (instance.swapping, *_load(instance)) if instance.open else None

    def count(self, instance: InstanceView) -> tuple[bool, int]:
        return instance.swapping, instance.num_requests


by_load = _ByLoad()


def least_loaded(instances: Sequence[InstanceView]) -> InstanceView | None:
    """Return the instance with the fewest requests, `None` of none."""
    return min(instances, key=_load, default=None)


def _load(instance: InstanceView) -> tuple[int, float, InstanceId]:
    free = instance.num_free_kv_blocks / max(instance.num_kv_blocks, 1)
    return instance.num_requests, -free, instance.id


def _holds(instance: InstanceView, request: Request) -> bool:
    return instance.max_tokens is None or request.num_tokens < instance.max_tokens
