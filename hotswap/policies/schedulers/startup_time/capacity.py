"""How many more requests the other replicas of a model can take from an instance that leaves it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from hotswap.policies.schedulers.instances import is_leaving
from hotswap.request import ModelId
from hotswap.view import FleetView, InstanceId, InstanceState, InstanceView

__all__ = ["SpareCapacity"]


class SpareCapacity:
    """The places for further requests on each replica that keeps its model, less those that a plan reserves.

    A place holds one whole request, as large as the largest of the model. The running requests of a model are
    read when the plan first asks about that model.

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
            stays = instance.state is InstanceState.SERVING and not is_leaving(instance)
            (self._replicas if stays else self._leaving)[instance.model].append(instance)

    def replicas(self, model: ModelId) -> Sequence[InstanceView]:
        """Return the replicas that keep the model in the view, by id; those that a plan removed included."""
        return self._replicas.get(model, ())

    def of(self, instance: InstanceView) -> int:
        """Return the number of free places on an instance."""
        return 0 if instance.model is None else self._places(instance.model).each.get(instance.id, 0)

    def total(self, model: ModelId) -> int:
        """Return the number of free places on all replicas of a model."""
        return self._places(model).total

    def reserve(self, model: ModelId) -> InstanceId | None:
        """Reserve a place on the replica with the most of them; ties go to the smaller id; `None` if full."""
        places = self._places(model)
        with_places = ((-count, instance) for instance, count in places.each.items() if count > 0)
        _, instance = min(with_places, default=(0, None))
        if instance is not None:
            places.each[instance] -= 1
            places.total -= 1
        return instance

    def remove(self, instance: InstanceView) -> None:
        """Take the places of an instance out: it swaps to another model."""
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
            places = self._known[model] = _Places({i.id: _num_places(i, largest, longest) for i in replicas})
        return places


class _Places:
    """The free places of one model: on each replica, and their sum."""

    __slots__ = ("each", "total")

    def __init__(self, each: dict[InstanceId, int]) -> None:
        self.each, self.total = each, sum(each.values())


def _num_places(instance: InstanceView, largest: int, longest: int) -> int:
    """How many requests of `largest` tokens an instance can take; `longest` is what one may grow to."""
    if not instance.open:
        return 0
    places = instance.max_requests - instance.num_requests
    if instance.max_tokens is None:
        return places
    if longest > instance.max_tokens:
        return 0
    return min(places, instance.num_free_kv_blocks // (largest // instance.kv_block_tokens + 1))
