"""Which model has which instances, as one plan changes it."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from math import inf, ldexp, sqrt
from typing import Any, Generic, TypeAlias, TypeVar, overload

from hotswap.action import Swap
from hotswap.request import ModelId
from hotswap.view import FleetView, InstanceId, InstanceState, InstanceView, ModelView

__all__ = ["Allocation", "Spare", "turns_away", "used_s"]

Key = TypeVar("Key", bound=tuple[Any, ...])

Spare: TypeAlias = tuple[float, float, ModelId, float]
"""Of a model that can spare a replica: its load, its load without it, its id, and its load's deviation."""

# A model that failed on two instances has itself to blame, not an instance.
_DOUBTFUL = 2


class Allocation:
    """Replicas, loads and free instances, read from a view once and then kept up to date by `take`.

    It lives for one `plan` and is as good as asking `assume` for a new view after every swap, but a swap
    costs no walk over the fleet. *p*, *w* and *r* are those of `hotswap.policies.swap`.
    """

    def __init__(self, fleet: FleetView) -> None:
        self.models = {model.id: model for model in fleet.models}
        self._now_s = fleet.now_s
        self._num_replicas: Counter[ModelId | None] = Counter()
        self._resting: set[ModelId] = set()
        self._free: dict[ModelId | None, dict[InstanceId, InstanceView]] = {}
        self._homes: dict[InstanceId, ModelId | None] = {}  # of the free instances
        replicas, free, homes, serving = self._num_replicas, self._free, self._homes, InstanceState.SERVING
        for instance in fleet.instances:
            state, model = instance.state, instance.model
            settled = not instance.swapping and not instance.draining
            if settled and state is serving:  # the usual case, without a call
                replicas[model] += 1
                free.setdefault(model, {})[instance.id] = instance
                homes[instance.id] = model
            else:
                replicas[_becomes(instance)] += 1
                if settled and state is InstanceState.EMPTY:
                    free.setdefault(None, {})[instance.id] = instance
                    homes[instance.id] = None
            if instance.resting:
                self._resting.update(instance.resting)
        self._oldest_s: dict[ModelId, float] = {}
        for request in fleet.waiting:
            since_s = min(request.waiting_since_s, self._oldest_s.get(request.model, inf))
            self._oldest_s[request.model] = since_s
        self._donors: dict[bool, _Order[Spare]] = {}
        self._overloaded: dict[float, _Order[tuple[float, float, float, ModelId]]] = {}
        self._below: _Order[tuple[int, float, float, ModelId]] | None = None
        self._empty: list[InstanceView] | None = None  # the smallest last
        self._staged: list[InstanceView] = []

    def num_replicas(self, model: ModelView) -> int:
        """Return *r*: replicas that serve or load, as `FleetView.replicas` counts them."""
        return self._num_replicas[model.id]

    def load(self, model: ModelView, *, more: int = 0) -> float:
        """Return the load per replica *p w / r*, with `more` replicas than now (or fewer, if negative).

        Without a replica it is infinite while there is any work, else 0.
        """
        work = model.num_requests * model.slowness
        replicas = self._num_replicas[model.id] + more
        if replicas > 0:
            return work / replicas
        return inf if work else 0.0

    def waited_s(self, model: ModelView, *, since_turn: bool = True) -> float:
        """Return how long its oldest request has waited since its last turn, halved for each failed load.

        A turn ends when a replica is given up: else a model with a long queue would come before others again
        and again. Without `since_turn` it is the whole wait, for who takes no turns. A model that cannot be
        loaded falls behind those that can, and is still tried again. Failures count since the last load that
        succeeded.
        """
        since_s = self._oldest_s.get(model.id, self._now_s)
        if since_turn and model.left_s is not None:
            since_s = max(since_s, model.left_s)
        return ldexp(max(self._now_s - since_s, 0.0), -model.num_failed_loads)

    def empty(self, model: ModelView) -> InstanceView | None:
        """Return an EMPTY instance for the model: the smallest that holds it, so large ones stay free.

        One that has it preloaded comes before others.
        """
        free = self._free.get(None)
        if not free:
            return None
        if self._empty is None:
            self._empty = sorted(free.values(), key=lambda i: (i.memory_bytes, i.id), reverse=True)
            self._staged = [i for i in self._empty if i.preloaded is not None]
        while self._empty[-1].id not in free:
            self._empty.pop()
        staged = (i for i in reversed(self._staged) if i.preloaded == model.id)
        fitting = (i for i in chain(staged, reversed(self._empty)) if i.id in free and _takes(model, i))
        return next(fitting, None)

    def overloaded(self, t1: float) -> Sequence[ModelView]:
        """Return the models with a load over `t1`, the most loaded first.

        Of equal loads the one that has waited longer comes first, then the one with more work.
        """
        order = self._overloaded.get(t1)
        if order is None:
            order = self._overloaded[t1] = _Order(self.models, partial(self._urgency, t1))
        return order.models()

    def _urgency(self, t1: float, model: ModelView) -> tuple[float, float, float, ModelId] | None:
        load = self.load(model)
        if load <= t1:
            return None
        return -load, -self.waited_s(model), -model.num_requests * model.slowness, model.id

    def replica(self, donor: ModelView, model: ModelView, *, served_s: float = 0.0) -> InstanceView | None:
        """Return the replica of `donor` best given to `model`, of those that served `served_s` or longer.

        Best is one that has the model preloaded, then one with the fewest requests to evict.
        """
        fitting = [
            i
            for i in self._free.get(donor.id, {}).values()
            if _takes(model, i) and (i.serving_since_s is None or self._now_s - i.serving_since_s >= served_s)
        ]
        return min(fitting, key=lambda i: (i.preloaded != model.id, i.num_requests, i.id), default=None)

    def donors(
        self, model: ModelView, *, served_s: float = 0.0, keeping: bool = False
    ) -> Iterator[tuple[ModelView, InstanceView]]:
        """Yield the other models that may give up a replica, least loaded first, with the one to give.

        With `keeping`, only those that keep a replica for their work, or have none.
        Those at or below their floor may not. Of two equal loads the one that rises less goes first. Nobody
        gives to a model that failed to load twice in a row and rests from it on any instance: it would leave
        EMPTY one instance after the other, and may use those that are so.
        """
        for _, name in self.spare(model, keeping=keeping):
            donor = self.models[name]
            if donor.id != model.id and (instance := self.replica(donor, model, served_s=served_s)):
                yield donor, instance

    def spare(
        self, model: ModelView, *, keeping: bool = False, among: Iterable[ModelId] | None = None
    ) -> Sequence[tuple[Spare, ModelId]]:
        """Return the `donors` without looking for a replica that fits, the model itself perhaps among them.

        Those of some models, or of all, as they stand now: good until the next `take`.
        """
        if self._doubtful(model):
            return ()
        order = self._spare(keeping=keeping)
        return order.standing() if among is None else order.among(among)

    def deviation(self, model: ModelView) -> float:
        """Return by how much chance moves the load: independent arrivals make a count vary by its root."""
        replicas = self._num_replicas[model.id]
        return model.slowness * sqrt(model.num_requests) / replicas if replicas else 0.0

    def _spare(self, *, keeping: bool) -> _Order[Spare]:
        """The models that may give up a replica, least loaded first."""
        order = self._donors.get(keeping)
        if order is None:
            order = self._donors[keeping] = _Order(self.models, partial(self._ease, keeping))
        return order

    def _ease(self, keeping: bool, model: ModelView) -> Spare | None:
        after = self.load(model, more=-1)
        if self.num_spare(model) <= 0 or not self._free.get(model.id) or (keeping and after == inf):
            return None
        return self.load(model), after, model.id, self.deviation(model)

    def least_harm(self, model: ModelView, *, served_s: float = 0.0) -> tuple[ModelView, InstanceView] | None:
        """Return the least loaded donor, of those that keep a replica for their work if there are any."""
        keeps = next(self.donors(model, served_s=served_s, keeping=True), None)
        return keeps or next(self.donors(model, served_s=served_s), None)

    def take(self, swap: Swap) -> ModelId | None:
        """Count the swap's instance to its new model, and no longer as free; return whose it was."""
        if swap.instance not in self._homes:
            return None
        model = self._homes.pop(swap.instance)
        del self._free[model][swap.instance]
        self._num_replicas[swap.model] += 1
        self._note(swap.model)
        if model is not None:
            self._num_replicas[model] -= 1
            self._note(model)
        return model

    def below_floors(self) -> Sequence[ModelView]:
        """Return the models that lack replicas, in the order in which they are to get one.

        Those that failed to load come last, and of the others those first that have the least share of it.
        """
        if self._below is None:
            self._below = _Order(self.models, self._lack)
        return self._below.models()

    def _lack(self, model: ModelView) -> tuple[int, float, float, ModelId] | None:
        replicas = self.num_replicas(model)
        if replicas >= model.min_replicas:
            return None
        work = model.num_requests * model.slowness
        return model.num_failed_loads, replicas / model.min_replicas, -work, model.id

    def _note(self, name: ModelId) -> None:
        """Put a model where it belongs now in each order."""
        model = self.models.get(name)
        if model is None:
            return
        for t1, overloaded in self._overloaded.items():
            overloaded.put(name, self._urgency(t1, model))
        for keeping, donors in self._donors.items():
            donors.put(name, self._ease(keeping, model))
        if self._below is not None:
            self._below.put(name, self._lack(model))

    def num_spare(self, model: ModelView) -> int:
        """Return how many replicas the model has beyond its floor; below zero where it lacks some."""
        return self.num_replicas(model) - model.min_replicas

    def takeable(self, model: ModelView) -> list[InstanceView]:
        """Return the instances that may be turned to the model, by id: EMPTY ones, and what others can spare.

        Whom `donors` lets give nothing, gives nothing here.
        """
        return sorted(self.turnable(model), key=lambda i: i.id)

    def turnable(self, model: ModelView) -> Iterator[InstanceView]:
        """Yield the same in no order, which is sooner; nothing may be taken meanwhile."""
        doubtful = self._doubtful(model)
        for held, instances in self._free.items():
            if held is None or (not doubtful and self._gives(held, model)):
                yield from (instance for instance in instances.values() if _takes(model, instance))

    def may_turn(self, instance: InstanceView, model: ModelView) -> bool:
        """Whether the instance is among those that are `takeable` for the model."""
        held = None if instance.state is InstanceState.EMPTY else instance.model
        if instance.id not in self._free.get(held, {}) or not _takes(model, instance):
            return False
        return held is None or (self._gives(held, model) and not self._doubtful(model))

    def _gives(self, held: ModelId, model: ModelView) -> bool:
        """Whether the model that an instance has can spare one for another."""
        donor = self.models.get(held)
        return donor is not None and donor.id != model.id and self.num_spare(donor) > 0

    def free_replicas(self, model: ModelView) -> tuple[InstanceView, ...]:
        """Return the model's replicas that could be turned or unloaded now."""
        return tuple(self._free.get(model.id, {}).values())

    def drop(self, instance: InstanceView) -> None:
        """Count a replica that is unloaded to no model, and no longer as free."""
        if instance.model is not None and self._free[instance.model].pop(instance.id, None) is not None:
            del self._homes[instance.id]
            self._num_replicas[instance.model] -= 1
            self._note(instance.model)

    def _doubtful(self, model: ModelView) -> bool:
        return model.num_failed_loads >= _DOUBTFUL and model.id in self._resting


class _Order(Generic[Key]):
    """Models sorted by a key, each put where it belongs again after it has changed."""

    def __init__(self, models: Mapping[ModelId, ModelView], key: Callable[[ModelView], Key | None]) -> None:
        self._models = models
        self._keys = {name: at for name, model in models.items() if (at := key(model)) is not None}
        self._sorted = sorted((at, name) for name, at in self._keys.items())

    def models(self) -> Sequence[ModelView]:
        """Return those that have a key, as they stand now."""
        return _Standing(self._sorted, self._models)

    def standing(self) -> Sequence[tuple[Key, ModelId]]:
        """Return the same as keys and names; it changes with the order."""
        return self._sorted

    def among(self, models: Iterable[ModelId]) -> Sequence[tuple[Key, ModelId]]:
        """Return those of some models alone."""
        return sorted((self._keys[name], name) for name in set(models) if name in self._keys)

    def put(self, model: ModelId, key: Key | None) -> None:
        """Put a model where its key belongs, or leave it out."""
        if (old := self._keys.pop(model, None)) is not None:
            del self._sorted[bisect_left(self._sorted, (old, model))]
        if key is not None:
            self._keys[model] = key
            insort(self._sorted, (key, model))


class _Standing(Sequence[ModelView]):
    """The models of an order, without a list of them."""

    def __init__(self, order: Sequence[tuple[object, ModelId]], models: Mapping[ModelId, ModelView]) -> None:
        self._order, self._models = order, models

    @overload
    def __getitem__(self, at: int) -> ModelView: ...
    @overload
    def __getitem__(self, at: slice) -> list[ModelView]: ...
    def __getitem__(self, at: int | slice) -> ModelView | list[ModelView]:
        if isinstance(at, slice):
            return [self._models[name] for _, name in self._order[at]]
        return self._models[self._order[at][1]]

    def __len__(self) -> int:
        return len(self._order)


def turns_away(instance: InstanceView) -> bool:
    """Return whether an instance is on its way to another model than it has, or to none.

    One that is shown as busy turning to its own model, as `Cooldown` does, goes on serving it.
    """
    return instance.swapping and instance.target != instance.model


def used_s(instance: InstanceView) -> float:
    """Return the loop time at which an instance was last of use: loaded, given a request or done with one.

    Minus infinity if it is EMPTY, or nobody knows.
    """
    if instance.state is InstanceState.EMPTY:
        return -inf
    since_s, last_s = instance.serving_since_s, instance.last_used_s
    return max(-inf if since_s is None else since_s, -inf if last_s is None else last_s)


def _becomes(instance: InstanceView) -> ModelId | None:
    """The model that `FleetView.replicas` counts the instance to."""
    if instance.swapping:
        return instance.target
    alive = instance.state in (InstanceState.SERVING, InstanceState.LOADING)
    return instance.model if alive else None


def _takes(model: ModelView, instance: InstanceView) -> bool:
    """Whether the weights fit, as far as is known, and did not fail to load here a moment ago."""
    fits = not instance.memory_bytes or model.weight_bytes <= instance.memory_bytes
    return fits and model.id not in instance.resting
