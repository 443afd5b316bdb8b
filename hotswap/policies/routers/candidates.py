"""Which replicas a request may be sent to; every router here chooses among these."""

from __future__ import annotations

from collections.abc import Sequence

from hotswap.lookup import Rank
from hotswap.request import Request
from hotswap.view import FleetView, InstanceView

__all__ = ["candidates", "first", "holds", "is_candidate"]


def candidates(request: Request, fleet: FleetView) -> Sequence[InstanceView]:
    """Return the open replicas of the request's model that are worth sending it to.

    Those that are about to turn to another model, from where it would be evicted, count only where no other
    is open. Those that could never hold its tokens count only where no replica could, also none that is full
    now: the engine then says so to the client, who would otherwise wait for ever.
    """
    replicas = fleet.hosts(request.model)
    able = [i for i in replicas if holds(i, request)] or replicas
    serving = [i for i in able if i.open]
    return [i for i in serving if not i.swapping] or serving


def first(request: Request, fleet: FleetView, rank: Rank) -> InstanceView | None:
    """Return the best of the `candidates` by a rank that leaves out who is not open; `None` of none.

    The rank puts those that are about to turn to another model last, as `by_load` does. It is asked about
    who has changed, not about all, unless the best is too small for the request.
    """
    best = fleet.min_by(request.model, rank)
    if best is None or holds(best, request):
        return best
    ranked = (instance for instance in candidates(request, fleet) if rank(instance) is not None)
    return min(ranked, key=rank, default=None)


def is_candidate(instance: InstanceView, request: Request, *, like: InstanceView) -> bool:
    """Return whether an instance is one of the `candidates`, given one of them that is steady if any is."""
    steady = like.swapping or not instance.swapping
    return instance.open and steady and (holds(instance, request) or not holds(like, request))


def holds(instance: InstanceView, request: Request) -> bool:
    """Return whether an instance could ever hold the tokens of a request."""
    return instance.max_tokens is None or request.num_tokens < instance.max_tokens
