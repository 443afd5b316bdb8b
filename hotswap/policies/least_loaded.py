"""Routing by load alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hotswap.request import Request
from hotswap.router import Router
from hotswap.view import FleetView, InstanceId, InstanceView

__all__ = ["LeastLoadedRouter", "candidates", "least_loaded"]


@dataclass(frozen=True, slots=True)
class LeastLoadedRouter(Router):
    """Sends a request to the open replica of its model with the fewest requests; `None` if there is none.

    Ties go to the larger share of free KV blocks, then to the smaller id.
    """

    def route(self, request: Request, fleet: FleetView) -> InstanceId | None:
        instance = least_loaded(candidates(request, fleet))
        return instance.id if instance else None


def candidates(request: Request, fleet: FleetView) -> Sequence[InstanceView]:
    """Return the open replicas of the request's model that are worth sending it to.

    Those that are about to turn to another model, from where it would be evicted, count only where no other
    is open. Those that could never hold its tokens count only where none could: the engine then says so to
    the client, who would otherwise wait for ever.
    """
    serving = fleet.serving(request.model)
    roomy = [i for i in serving if _holds(i, request)] or serving
    return [i for i in roomy if not i.swapping] or roomy


def least_loaded(instances: Sequence[InstanceView]) -> InstanceView | None:
    """Return the instance with the fewest requests, `None` of none."""
    return min(instances, key=_load, default=None)


def _load(instance: InstanceView) -> tuple[int, float, InstanceId]:
    free = instance.num_free_kv_blocks / max(instance.num_kv_blocks, 1)
    return instance.num_requests, -free, instance.id


def _holds(instance: InstanceView, request: Request) -> bool:
    return instance.max_tokens is None or request.num_tokens < instance.max_tokens
