"""Keeping the promised number of replicas."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hotswap.action import Action, Swap
from hotswap.errors import ConfigError
from hotswap.policies.schedulers.allocation import Allocation
from hotswap.scheduler import Scheduler
from hotswap.view import FleetView

__all__ = ["RestoreMinReplicas", "restore_min_replicas"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreMinReplicas(Scheduler):
    """Brings every model back to its `min_replicas`, and does nothing else.

    It fills EMPTY instances first, then takes replicas from the least loaded model above its own floor, one
    that keeps a replica for its work if there is any. A replica that is loading counts. Models are served in
    turn, lowest share of the floor first; one whose loads fail goes behind the others. Floors that sum to
    more than the fleet holds are met as far as they can be, and nothing moves back and forth between them.
    """

    deadline_s: float = 0.0

    def __post_init__(self) -> None:
        if not self.deadline_s >= 0:
            raise ConfigError(f"deadline_s is {self.deadline_s!r}; give 0 (evict at once) or more seconds.")

    def plan(self, fleet: FleetView) -> Sequence[Action]:
        return tuple(restore_min_replicas(Allocation(fleet), deadline_s=self.deadline_s))


def restore_min_replicas(allocation: Allocation, *, deadline_s: float) -> Iterator[Swap]:
    """Yield the swaps that restore the floors, each already taken from `allocation`."""
    while swap := _next(allocation, deadline_s):
        allocation.swap(swap)
        yield swap


def _next(allocation: Allocation, deadline_s: float) -> Swap | None:
    for model in allocation.below_min_replicas():
        reason = f"{model.id} has {allocation.num_replicas(model)} of at least {model.min_replicas} replicas"
        if empty := allocation.empty(model):
            return Swap(instance=empty.id, model=model.id, reason=reason)
        if harmed := allocation.best_donor(model):
            donor, instance = harmed
            reason += f"; {donor.id} can spare one"
            return Swap(instance=instance.id, model=model.id, deadline_s=deadline_s, reason=reason)
    return None
