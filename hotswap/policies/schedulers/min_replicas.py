"""Restoring `min_replicas`: as a scheduler of its own, and as the first step of others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hotswap.action import Action, Swap
from hotswap.argument_kinds import check_arguments
from hotswap.errors import ConfigError
from hotswap.policies.schedulers.allocation import Allocation
from hotswap.scheduler import Scheduler
from hotswap.view import FleetView

__all__ = ["RestoreMinReplicas", "restore_min_replicas"]


@check_arguments
@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreMinReplicas(Scheduler):
    """Brings every model back to its `min_replicas`, and plans nothing else.

    It takes EMPTY instances first, then replicas of the least loaded model that has more than its own
    `min_replicas`, if possible one that keeps a replica for its requests. A loading replica counts. The model
    with the smallest share of its `min_replicas` goes first, and one whose loads failed goes last. If all
    `min_replicas` together exceed the fleet, they are met as far as possible, without swaps back and forth.
    """

    deadline_s: float = 0.0

    def __post_init__(self) -> None:
        if not self.deadline_s >= 0:
            raise ConfigError(f"deadline_s is {self.deadline_s!r}; give 0 (evict at once) or more seconds.")

    def plan(self, fleet: FleetView) -> Sequence[Action]:
        return tuple(restore_min_replicas(Allocation(fleet), deadline_s=self.deadline_s))


def restore_min_replicas(allocation: Allocation, *, deadline_s: float) -> Iterator[Swap]:
    """Yield the swaps that restore `min_replicas`, each already applied to `allocation`."""
    while swap := _next(allocation, deadline_s):
        allocation.swap(swap)
        yield swap


def _next(allocation: Allocation, deadline_s: float) -> Swap | None:
    for model in allocation.below_min_replicas():
        reason = f"{model.id} has {allocation.num_replicas(model)} of at least {model.min_replicas} replicas"
        if empty := allocation.empty(model):
            return Swap(instance=empty.id, model=model.id, reason=reason)
        if found := allocation.best_donor(model):
            donor, instance = found
            reason += f"; {donor.id} can spare one"
            return Swap(instance=instance.id, model=model.id, deadline_s=deadline_s, reason=reason)
    return None
