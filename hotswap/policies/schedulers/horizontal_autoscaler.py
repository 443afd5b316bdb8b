"""Horizontal autoscaling as in Kubernetes: replicas in proportion to requests, no swaps. A baseline."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil, inf, isfinite

from hotswap.action import Action, Swap, Unload
from hotswap.argument_kinds import check_arguments
from hotswap.errors import ConfigError
from hotswap.policies.schedulers.allocation import Allocation
from hotswap.policies.schedulers.instances import used_s
from hotswap.scheduler import Scheduler
from hotswap.view import FleetView, ModelView

__all__ = ["HorizontalAutoscaler"]


@check_arguments
@dataclass(frozen=True, slots=True, kw_only=True)
class HorizontalAutoscaler(Scheduler):
    """Gives each model EMPTY instances in proportion to its requests, and unloads surplus replicas.

    Source: the rule of Kubernetes' Horizontal Pod Autoscaler, with requests per replica as its metric:

        desired = ceil(replicas * metric / target) = ceil(p / target)

    where *p* is a model's running and waiting requests. Nothing changes while `metric / target` is within
    `tolerance` of 1.

    **Readings.** A pod is an instance. New pods start on new machines; here an EMPTY instance stands for the
    machine, and its load for the cold start, which a simulation can make as long as it likes. Kubernetes
    removes a pod once no higher number was desired for `stabilization_s`. A view has no past, so here a
    surplus replica is unloaded once it has had no request for so long. Kubernetes does not scale from zero;
    here a model without a replica gets one for its first request.

    It takes no instance from another model, however idle, since that would be a swap. `min_replicas` are
    kept, and restored by `RestoreMinReplicas`.

    Attributes:
        target: Requests per replica; below 1 it keeps replicas to spare.
        max_replicas: The most replicas of a model.
        tolerance: The relative error of the metric that is left alone.
        stabilization_s: Seconds for which a surplus replica stays.
    """

    target: float
    max_replicas: int = 1_000_000
    tolerance: float = 0.1
    stabilization_s: float = 300.0

    def __post_init__(self) -> None:
        if not (self.target > 0 and isfinite(self.target)):
            raise ConfigError(f"target is {self.target!r}; give requests per replica over 0, finite.")
        if self.max_replicas < 1:
            raise ConfigError(f"max_replicas is {self.max_replicas!r}; give 1 or more.")
        for name in ("tolerance", "stabilization_s"):
            if not 0 <= getattr(self, name) < inf:
                raise ConfigError(f"{name} is {getattr(self, name)!r}; give 0 or more, finite.")

    def plan(self, fleet: FleetView) -> Sequence[Action]:
        allocation = Allocation(fleet)
        models = sorted(fleet.models, key=lambda m: (-allocation.load(m), m.id))
        return tuple(action for model in models for action in self._scale(model, allocation, fleet.now_s))

    def _scale(self, model: ModelView, allocation: Allocation, now_s: float) -> Iterator[Action]:
        desired, has = min(ceil(model.num_requests / self.target), self.max_replicas), model.num_requests
        replicas = allocation.num_replicas(model)
        if replicas and abs(has / replicas / self.target - 1) <= self.tolerance + 1e-9:
            return
        reason = f"{model.id} has {has} requests on {replicas} replicas, and should have {desired}"
        for _ in range(desired - replicas):
            if (instance := allocation.empty(model)) is None:
                return
            swap = Swap(instance=instance.id, model=model.id, reason=reason)
            allocation.swap(swap)
            yield swap
        idle = [i for i in allocation.free_replicas(model) if not i.num_requests]
        for instance in sorted(idle, key=lambda i: (used_s(i), i.id)):
            spare = allocation.num_replicas(model) > max(desired, model.min_replicas)
            if spare and self.stabilization_s <= now_s - used_s(instance) < inf:
                allocation.unload(instance)
                yield Unload(instance=instance.id, reason=reason)
