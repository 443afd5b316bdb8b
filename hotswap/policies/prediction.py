"""The view of a fleet after it has begun a plan, and which actions of the plan it would begin."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from hotswap.action import Action, Swap, Unload
from hotswap.request import ModelId
from hotswap.view import FleetView, InstanceId, InstanceState, InstanceView

__all__ = ["accepted", "assume"]


def accepted(fleet: FleetView, actions: Iterable[Action]) -> tuple[Action, ...]:
    """Return the actions that the fleet would begin if it were handed them in this order.

    The fleet drops a swap or unload of an instance that is unknown, not free, or named by an earlier action.
    It drops a swap to a model that is not registered, is there already, or failed to load there a moment ago,
    and an unload of an EMPTY instance. All other actions stay.
    """
    free = {i.id: i for i in fleet.instances if i.free}
    models = {model.id for model in fleet.models}
    kept: list[Action] = []
    for action in actions:
        if isinstance(action, Swap | Unload):
            instance = free.get(action.instance)
            if instance is None or not _changes(instance, action, models):
                continue
            del free[action.instance]
        kept.append(action)
    return tuple(kept)


def assume(fleet: FleetView, actions: Iterable[Action]) -> FleetView:
    """Return the view in which the accepted ones of `actions` have just begun.

    Their instances are `swapping` to their targets: each is a replica of the new model and no longer of the
    old, and is not free. Requests and residency stay as they are, since no byte has moved yet.
    """
    targets: dict[InstanceId, ModelId | None] = {}
    for action in accepted(fleet, actions):
        match action:
            case Swap():
                targets[action.instance] = action.model
            case Unload():
                targets[action.instance] = None
            case _:
                pass
    if not targets:
        return fleet
    return replace(
        fleet,
        instances=tuple(
            replace(i, swapping=True, target=targets[i.id]) if i.id in targets else i for i in fleet.instances
        ),
    )


def _changes(instance: InstanceView, action: Swap | Unload, models: set[ModelId]) -> bool:
    if isinstance(action, Unload):
        return instance.state is not InstanceState.EMPTY
    return (
        action.model in models
        and action.model != instance.model
        and action.model not in instance.cooling_down
    )
