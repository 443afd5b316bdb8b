"""Round-robin routing, without a counter."""

from __future__ import annotations

from dataclasses import dataclass

from hotswap.policies.routers.candidates import best_candidate
from hotswap.request import Request
from hotswap.router import Router
from hotswap.view import CountRank, FleetView, InstanceId, InstanceView

__all__ = ["RoundRobinRouter"]


@dataclass(frozen=True, slots=True)
class RoundRobinRouter(Router):
    """Sends a request to the open replica of its model whose last request came longest ago; else `None`.

    A baseline that ignores load. **Reading:** a router keeps no counter, so the turn is read from the view.
    While the replicas stay the same, this is the cycle that a counter would give, from the smallest id on. A
    new replica has the next turn, and then one of every *n*. A request that comes by a move or after an
    eviction counts as a turn.
    """

    def route(self, request: Request, fleet: FleetView) -> InstanceId | None:
        instance = best_candidate(request, fleet, _by_turn)
        return instance.id if instance else None


class _ByTurn(CountRank):
    """Ranks open instances by their latest assignment, on which the engine's load has no influence."""

    def count(self, instance: InstanceView) -> tuple[bool, int] | None:
        return (instance.swapping, instance.last_assigned) if instance.open else None


_by_turn = _ByTurn()
