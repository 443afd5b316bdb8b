"""Routing in turn."""

from __future__ import annotations

from dataclasses import dataclass

from hotswap.lookup import CountRank
from hotswap.policies.routers.candidates import first
from hotswap.request import Request
from hotswap.router import Router
from hotswap.view import FleetView, InstanceId, InstanceView

__all__ = ["RoundRobinRouter"]


@dataclass(frozen=True, slots=True)
class RoundRobinRouter(Router):
    """Sends a request to the open replica of its model whose last request came longest ago; else `None`.

    A baseline, blind to load. **Reading:** a router keeps no counter, so its turn is in the view. Where the
    replicas stay the same this is the cycle that a counter would make, beginning with the smallest id; one
    that joins has the next turn, and then one in as many as there are. A request that comes by a move or
    after an eviction is a turn like others.
    """

    def route(self, request: Request, fleet: FleetView) -> InstanceId | None:
        instance = first(request, fleet, _by_turn)
        return instance.id if instance else None


class _ByTurn(CountRank):
    """Ranks open instances by when they were last sent a request, which no load changes."""

    def __call__(self, instance: InstanceView) -> tuple[bool, int, InstanceId] | None:
        return self.count(instance) if instance.open else None

    def count(self, instance: InstanceView) -> tuple[bool, int, InstanceId]:
        return instance.swapping, instance.last_assigned, instance.id


_by_turn = _ByTurn()
