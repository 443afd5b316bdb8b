"""The candidates of a request: the replicas that every router here chooses among."""

from __future__ import annotations

from collections.abc import Sequence

from hotswap.request import Request
from hotswap.view import FleetView, InstanceView, Rank

__all__ = ["best_candidate", "can_hold", "candidates", "is_candidate"]


def candidates(request: Request, fleet: FleetView) -> Sequence[InstanceView]:
    """Return the open replicas of the request's model that it may be sent to.

    A replica that is about to swap to another model would evict the request, so it counts only if no other
    replica is open. A replica that could never hold the request's tokens counts only if no replica of the
    model could, full ones included: the engine then refuses the request, which would otherwise wait for ever.
    """
    replicas = fleet.hosts(request.model)
    able = [i for i in replicas if can_hold(i, request)] or replicas
    serving = [i for i in able if i.open]
    return [i for i in serving if not i.swapping] or serving


def best_candidate(request: Request, fleet: FleetView, rank: Rank) -> InstanceView | None:
    """Return the first of the `candidates` by a rank that leaves out closed instances, or `None`.

    The rank puts instances that are about to swap last, as `by_load` does. It is computed only for instances
    that changed, unless the best instance is too small for the request.
    """
    best = fleet.min_by(request.model, rank)
    if best is None or can_hold(best, request):
        return best
    ranked = (instance for instance in candidates(request, fleet) if rank(instance) is not None)
    return min(ranked, key=rank, default=None)


def is_candidate(instance: InstanceView, request: Request, *, like: InstanceView) -> bool:
    """Return whether an instance is one of the `candidates`, given one that is not swapping if any is not."""
    keeps = like.swapping or not instance.swapping
    return instance.open and keeps and (can_hold(instance, request) or not can_hold(like, request))


def can_hold(instance: InstanceView, request: Request) -> bool:
    """Return whether an instance could ever hold the tokens of a request."""
    return instance.max_tokens is None or request.num_tokens < instance.max_tokens
