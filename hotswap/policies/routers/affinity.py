"""Routing to a replica that holds the adapter of a request."""

from __future__ import annotations

from dataclasses import dataclass

from hotswap.argument_kinds import check_arguments
from hotswap.policies.routers.candidates import best_candidate
from hotswap.policies.routers.imbalance import check_thresholds, imbalanced
from hotswap.policies.routers.least_loaded import by_load
from hotswap.request import AdapterId, Request
from hotswap.router import Router
from hotswap.view import FleetView, InstanceId, InstanceView

__all__ = ["AffinityRouter"]


@check_arguments
@dataclass(frozen=True, slots=True, kw_only=True)
class AffinityRouter(Router):
    """Prefers replicas that hold the request's adapter, until they are much busier than the others.

    The order is that of the multi-model post: model and adapter resident (no switch), then model resident
    (an adapter switch, about 15 ms there), then model in a warm tier (2.5 s), then anywhere (23 s, cold). The
    last two are swaps, which a router cannot make: it returns `None`, the request waits, and the scheduler is
    asked at once for an instance. Within a step the least loaded replica wins.

    The guard is that of SGLang's cache-aware router. The least loaded holder of the adapter is passed over
    when it has over `abs_threshold` requests more than the least loaded replica *and* over `rel_threshold`
    times as many, so that a popular adapter spreads over more replicas. An infinite threshold turns the guard
    off.
    """

    abs_threshold: float = 8
    rel_threshold: float = 1.5

    def __post_init__(self) -> None:
        check_thresholds(self.abs_threshold, self.rel_threshold)

    def route(self, request: Request, fleet: FleetView) -> InstanceId | None:
        idlest = best_candidate(request, fleet, by_load)
        if idlest is None:
            return None
        if request.adapter is None:
            return idlest.id
        holder = best_candidate(request, fleet, _HoldersOf(request.adapter))
        if holder is None or (holder.swapping and not idlest.swapping) or self._imbalanced(holder, idlest):
            return idlest.id
        return holder.id

    def _imbalanced(self, busy: InstanceView, idle: InstanceView) -> bool:
        return imbalanced(
            busy.num_requests,
            idle.num_requests,
            abs_threshold=self.abs_threshold,
            rel_threshold=self.rel_threshold,
        )


@dataclass(frozen=True, slots=True)
class _HoldersOf:
    """Ranks the holders of an adapter by load."""

    adapter: AdapterId

    def __call__(self, instance: InstanceView) -> tuple[bool, int, float, InstanceId] | None:
        return by_load(instance) if self.adapter in instance.adapters else None
