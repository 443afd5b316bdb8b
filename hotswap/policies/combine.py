"""Policies made of policies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from hotswap.action import Action
from hotswap.errors import ConfigError
from hotswap.policies.predict import accepted, assume
from hotswap.request import Request
from hotswap.router import Router
from hotswap.scheduler import Scheduler
from hotswap.view import FleetView, InstanceId, InstanceView

__all__ = ["Cooldown", "FirstOf", "FirstOfRouters", "InOrder"]


class InOrder(Scheduler):
    """Does what the first scheduler wants, then what the next wants of what is left, and so on.

    Each is shown the fleet as it will be once the actions of those before it have begun, so none counts a
    replica twice or takes an instance that is spoken for.
    """

    def __init__(self, *schedulers: Scheduler) -> None:
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
    """Does what the first scheduler wants that wants anything the fleet would begin; asks no further."""

    def __init__(self, *schedulers: Scheduler) -> None:
        self._schedulers = schedulers

    def plan(self, fleet: FleetView) -> Sequence[Action]:
        plans = (accepted(fleet, scheduler.plan(fleet)) for scheduler in self._schedulers)
        return next((plan for plan in plans if plan), ())

    def __repr__(self) -> str:
        return _call(self, self._schedulers)


class FirstOfRouters(Router):
    """Sends a request where the first router that has an answer sends it; asks no further.

    An answer that the fleet would take for `None` (an instance that is not open, or serves another model) is
    no answer.
    """

    def __init__(self, *routers: Router) -> None:
        self._routers = routers

    def route(self, request: Request, fleet: FleetView) -> InstanceId | None:
        serving = {instance.id for instance in fleet.serving(request.model)}
        answers = (router.route(request, fleet) for router in self._routers)
        return next((answer for answer in answers if answer in serving), None)

    def __repr__(self) -> str:
        return _call(self, self._routers)


@dataclass(frozen=True, slots=True)
class Cooldown(Scheduler):
    """Leaves an instance alone for `cooldown_s` seconds after it began to serve its model.

    The wrapped scheduler is shown such an instance as busy turning to the model it has: a replica that counts
    and cannot be taken, so it plans round it instead of having its plan cut. EMPTY instances never cool down.
    Floors would wait as well; put them outside: `InOrder(RestoreFloors(), Cooldown(...))`.
    """

    scheduler: Scheduler
    cooldown_s: float

    def __post_init__(self) -> None:
        if not self.cooldown_s >= 0:
            raise ConfigError(f"cooldown_s is {self.cooldown_s!r}; give 0 or more seconds.")

    def plan(self, fleet: FleetView) -> Sequence[Action]:
        instances = tuple(self._held(i) if self._cooling(i, fleet.now_s) else i for i in fleet.instances)
        held = replace(fleet, instances=instances)
        return accepted(held, self.scheduler.plan(held))

    def _cooling(self, instance: InstanceView, now_s: float) -> bool:
        since_s = instance.serving_since_s
        return instance.free and since_s is not None and now_s - since_s < self.cooldown_s

    def _held(self, instance: InstanceView) -> InstanceView:
        return replace(instance, swapping=True, target=instance.model)


def _call(policy: object, parts: Sequence[object]) -> str:
    return f"{type(policy).__name__}({', '.join(map(repr, parts))})"
