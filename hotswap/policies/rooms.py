"""Where the requests of an instance that turns to another model could go."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from hotswap.policies.allocation import turns_away
from hotswap.request import ModelId
from hotswap.view import FleetView, InstanceId, InstanceState, InstanceView

__all__ = ["Rooms"]


class Rooms:
    """How many more requests each replica that stays could take of its model, while a plan promises them.

    Room is counted in whole requests, each as large as its model's largest. What runs on a model's instances
    is looked at when somebody first asks about the model.

    Args:
        fleet: The view that is planned for.
        instances: Its instances, by id.
    """

    def __init__(self, fleet: FleetView, instances: Iterable[InstanceView]) -> None:
        self._fleet = fleet
        self._replicas: defaultdict[ModelId, list[InstanceView]] = defaultdict(list)
        self._leaving: defaultdict[ModelId, list[InstanceView]] = defaultdict(list)
        self._known: dict[ModelId, _Places] = {}
        for instance in instances:
            if instance.model is None:
                continue
            stays = instance.state is InstanceState.SERVING and not turns_away(instance)
            (self._replicas if stays else self._leaving)[instance.model].append(instance)

    def replicas(self, model: ModelId) -> Sequence[InstanceView]:
        """The replicas that stay, by id, also those that a plan has closed."""
        return self._replicas.get(model, ())

    def at(self, instance: InstanceView) -> int:
        """How many more an instance could take."""
        return 0 if instance.model is None else self._places(instance.model).each.get(instance.id, 0)

    def total(self, model: ModelId) -> int:
        """How many more all replicas of a model could take."""
        return self._places(model).total

    def promise(self, model: ModelId) -> InstanceId | None:
        """Promise a place at the replica that has the most, of equal ones the smallest id; `None` of none."""
        places = self._places(model)
        open_ones = ((-count, instance) for instance, count in places.each.items() if count > 0)
        _, instance = min(open_ones, default=(0, None))
        if instance is not None:
            places.each[instance] -= 1
            places.total -= 1
        return instance

    def close(self, instance: InstanceView) -> None:
        """Count an instance no longer: it turns to another model."""
        if instance.model is not None:
            places = self._places(instance.model)
            places.total -= places.each.pop(instance.id, 0)

    def _places(self, model: ModelId) -> _Places:
        places = self._known.get(model)
        if places is None:
            replicas = self._replicas.get(model, [])
            holders = (*replicas, *self._leaving.get(model, ()))
            runs = [run for holder in holders for run in self._fleet.running_on(holder.id)]
            largest = max((run.num_tokens for run in runs), default=0)
            longest = max((run.num_tokens + run.num_remaining for run in runs), default=0)
            places = self._known[model] = _Places({i.id: _room_at(i, largest, longest) for i in replicas})
        return places


class _Places:
    """Of one model: how many at each replica, and the sum."""

    __slots__ = ("each", "total")

    def __init__(self, each: dict[InstanceId, int]) -> None:
        self.each, self.total = each, sum(each.values())


def _room_at(instance: InstanceView, largest: int, longest: int) -> int:
    """How many of its model's requests an instance could take, each as large as the largest of them."""
    if not instance.open:
        return 0
    places = instance.max_requests - instance.num_requests
    if instance.max_tokens is None:
        return places
    if longest > instance.max_tokens:
        return 0
    return min(places, instance.num_free_kv_blocks // (largest // instance.kv_block_tokens + 1))
