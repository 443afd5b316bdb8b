"""A fleet of dedicated engines: each instance keeps one model. A baseline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from hotswap.action import Action, Swap
from hotswap.argument_kinds import check_arguments
from hotswap.errors import ConfigError
from hotswap.policies.schedulers.allocation import Allocation
from hotswap.request import ModelId
from hotswap.scheduler import Scheduler
from hotswap.view import FleetView

__all__ = ["StaticPinning"]


@check_arguments
@dataclass(frozen=True, slots=True)
class StaticPinning(Scheduler):
    """Loads onto each instance the model that it is pinned to, and no other.

    The baseline that any swapping has to beat: `StaticPinning({"e0": "llama-8b", "e1": "qwen-4b"})`. Models
    are loaded before the first request, and stay without requests. A model that is pinned to no instance is
    never served. Instances that are not named are left alone.

    An instance that serves another model than its own, for example after a swap by hand, is swapped back,
    unless the other model would fall below its `min_replicas`. Its running requests get `deadline_s` to
    finish. Ids that the fleet does not have are ignored, since instances may come and go.
    """

    pins: Mapping[str, str] = field(hash=False)
    deadline_s: float = 0.0

    def __post_init__(self) -> None:
        if not self.pins:
            raise ConfigError("pins is empty; give the model of at least one instance, by their ids.")
        if not self.deadline_s >= 0:
            raise ConfigError(f"deadline_s is {self.deadline_s!r}; give 0 (evict at once) or more seconds.")
        object.__setattr__(self, "pins", dict(self.pins))  # a copy: the caller may change theirs

    def plan(self, fleet: FleetView) -> Sequence[Action]:
        allocation = Allocation(fleet)
        plan: list[Swap] = []
        for instance in sorted(fleet.instances, key=lambda i: i.id):
            model = allocation.models.get(ModelId(self.pins.get(instance.id, "")))
            if model is not None and allocation.can_swap(instance, model):
                deadline_s = self.deadline_s if instance.num_requests else 0.0
                reason = f"{model.id} is pinned to {instance.id}"
                swap = Swap(instance=instance.id, model=model.id, deadline_s=deadline_s, reason=reason)
                allocation.swap(swap)
                plan.append(swap)
        return tuple(plan)
