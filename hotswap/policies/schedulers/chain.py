"""Schedulers made of other schedulers, and the one that plans nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from hotswap.action import Action
from hotswap.argument_kinds import check_arguments
from hotswap.checks import check_kind
from hotswap.errors import ConfigError
from hotswap.policies.prediction import accepted, assume
from hotswap.scheduler import Scheduler
from hotswap.view import FleetView, InstanceView

__all__ = ["Chain", "Cooldown", "FirstOf", "KeepAsIs"]


class Chain(Scheduler):
    """Plans with several schedulers, one after another, and returns the actions of all.

    Each scheduler sees the view as it will be once the earlier actions have begun, so no replica is counted
    twice and no instance gets two actions.
    """

    def __init__(self, *schedulers: Scheduler) -> None:
        if not schedulers:
            raise ConfigError("Chain() has no scheduler; give one or more, or KeepAsIs() to plan nothing.")
        _check_schedulers(schedulers)
        self._schedulers = schedulers

    def plan(self, fleet: FleetView) -> Sequence[Action]:
        plan: list[Action] = []
        for scheduler in self._schedulers:
            actions = accepted(fleet, scheduler.plan(fleet))
            plan += actions
            fleet = assume(fleet, actions)
        return tuple(plan)

    def __repr__(self) -> str:
        return _call(self, self._schedulers)


class FirstOf(Scheduler):
    """Asks schedulers in order and returns the first plan with an action that the fleet would begin."""

    def __init__(self, *schedulers: Scheduler) -> None:
        _check_schedulers(schedulers)
        self._schedulers = schedulers

    def plan(self, fleet: FleetView) -> Sequence[Action]:
        plans = (accepted(fleet, scheduler.plan(fleet)) for scheduler in self._schedulers)
        return next((plan for plan in plans if plan), ())

    def __repr__(self) -> str:
        return _call(self, self._schedulers)


@dataclass(frozen=True, slots=True)
class KeepAsIs(Scheduler):
    """Plans nothing: every instance keeps the model it has until a swap is made by hand.

    Not even `min_replicas` are kept; use `RestoreMinReplicas` for a fleet that keeps these and no more.
    """

    def plan(self, fleet: FleetView) -> Sequence[Action]:
        return ()


@check_arguments
@dataclass(frozen=True, slots=True)
class Cooldown(Scheduler):
    """Protects an instance from swaps for `cooldown_s` seconds after it began to serve its model.

    The wrapped scheduler sees such an instance as swapping to the model that it has: a replica that counts
    and cannot be taken, so the scheduler chooses another instead of losing an action. EMPTY instances never
    cool down. `min_replicas` would have to wait as well, so restore them outside:
    `Chain(RestoreMinReplicas(), Cooldown(...))`.
    """

    scheduler: Scheduler
    cooldown_s: float

    def __post_init__(self) -> None:
        if not self.cooldown_s >= 0:
            raise ConfigError(f"cooldown_s is {self.cooldown_s!r}; give 0 or more seconds.")

    def plan(self, fleet: FleetView) -> Sequence[Action]:
        instances = tuple(self._protected(i) if self._cooling(i, fleet.now_s) else i for i in fleet.instances)
        shown = replace(fleet, instances=instances)
        return accepted(shown, self.scheduler.plan(shown))

    def _cooling(self, instance: InstanceView, now_s: float) -> bool:
        since_s = instance.serving_since_s
        return instance.free and since_s is not None and now_s - since_s < self.cooldown_s

    def _protected(self, instance: InstanceView) -> InstanceView:
        return replace(instance, swapping=True, target=instance.model)


def _check_schedulers(schedulers: Sequence[Scheduler]) -> None:
    for number, scheduler in enumerate(schedulers, start=1):
        check_kind(ConfigError, f"Scheduler {number}", scheduler, Scheduler)


def _call(policy: object, parts: Sequence[object]) -> str:
    return f"{type(policy).__name__}({', '.join(map(repr, parts))})"
