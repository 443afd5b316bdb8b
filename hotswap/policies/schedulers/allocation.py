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

__all__ = ["Allocation", "Spare"]

Key = TypeVar("Key", bound=tuple[Any, ...])

Spare: TypeAlias = tuple[float, float, ModelId, float]
"""A model that can spare a replica: its load, its load with one less, its id, and its load's deviation."""

# After so many failed loads in a row the model is taken to be the cause, not the instances.
_MAX_FAILED_LOADS = 2


class Allocation:
    """The replicas, loads and free instances of a view, kept up to date while one plan adds its swaps.

    It lives for one `plan`. It answers as a new view from `assume` would after every swap, without a walk
    over the fleet. *p*, *w* and *r* are those of `WeightedLoadSwap`.

    **First tokens are finished.** A replica counts, and no scheduler is offered it, while it has requests
    that its turn began with and that have no token there yet (`InstanceView.num_opening`). So a prompt whose
    prefill takes longer than a turn is computed once, not begun again in every turn. Between two tokens a
    planned swap evicts a request at most once: if it came later in a turn than its beginning. A turn lasts
    longer by the prefill of the requests that it begins with, which fit into the KV blocks together.
    """

    def __init__(self, fleet: FleetView) -> None:
        self.models = {model.id: model for model in fleet.models}
        self._now_s = fleet.now_s
        self._num_replicas: Counter[ModelId | None] = Counter()
        self._cooling_down: set[ModelId] = set()
        self._free: dict[ModelId | None, dict[InstanceId, InstanceView]] = {}
        self._model_of: dict[InstanceId, ModelId | None] = {}  # of the free instances
        replicas, free, model_of = self._num_replicas, self._free, self._model_of
        serving = InstanceState.SERVING
        for instance in fleet.instances:
            state, model = instance.state, instance.model
            settled = not instance.swapping and not instance.draining
            if settled and state is serving:  # the usual case, without a call
                replicas[model] += 1
                if not instance.num_opening:
                    free.setdefault(model, {})[instance.id] = instance
                    model_of[instance.id] = model
            else:
                replicas[_counts_to(instance)] += 1
                if settled and state is InstanceState.EMPTY:
                    free.setdefault(None, {})[instance.id] = instance
                    model_of[instance.id] = None
            if instance.cooling_down:
                self._cooling_down.update(instance.cooling_down)
        self._oldest_s = {name: fleet.oldest_waiting_s(name) for name in self.models}
        self._donors: dict[bool, _SortedModels[Spare]] = {}
        self._overloaded: dict[float, _SortedModels[tuple[float, float, float, ModelId]]] = {}
        self._below: _SortedModels[tuple[int, float, float, ModelId]] | None = None
        self._empty: list[InstanceView] | None = None  # the smallest last
        self._preloaded: list[InstanceView] = []

    # ------------------------------------------------------------------ changes

    def swap(self, swap: Swap) -> ModelId | None:
        """Count the swap's instance as a replica of its new model; return the model that it had.

        The instance is no longer free. Nothing changes if it was not.
        """
        if swap.instance not in self._model_of:
            return None
        model = self._model_of.pop(swap.instance)
        del self._free[model][swap.instance]
        self._num_replicas[swap.model] += 1
        self._update(swap.model)
        if model is not None:
            self._num_replicas[model] -= 1
            self._update(model)
        return model

    def unload(self, instance: InstanceView) -> None:
        """Count a replica that is unloaded no longer, neither as a replica nor as free."""
        if instance.model is not None and self._free[instance.model].pop(instance.id, None) is not None:
            del self._model_of[instance.id]
            self._num_replicas[instance.model] -= 1
            self._update(instance.model)

    def _update(self, name: ModelId) -> None:
        """Sort a model anew in each order."""
        model = self.models.get(name)
        if model is None:
            return
        for t1, overloaded in self._overloaded.items():
            overloaded.put(name, self._overload_key(t1, model))
        for keeping, donors in self._donors.items():
            donors.put(name, self._spare_key(keeping, model))
        if self._below is not None:
            self._below.put(name, self._missing_key(model))

    # ------------------------------------------------------------------ one model

    def num_replicas(self, model: ModelView) -> int:
        """Return *r*: replicas that serve or load, as `FleetView.replicas` counts them."""
        return self._num_replicas[model.id]

    def num_spare(self, model: ModelView) -> int:
        """Return the number of replicas beyond `min_replicas`; below zero where some are missing."""
        return self.num_replicas(model) - model.min_replicas

    def load(self, model: ModelView, *, more: int = 0) -> float:
        """Return the load per replica *p w / r*, with `more` replicas than now (or fewer, if negative).

        Without a replica it is infinite while the model has requests, else 0.
        """
        work = model.num_requests * model.weight
        replicas = self._num_replicas[model.id] + more
        if replicas > 0:
            return work / replicas
        return inf if work else 0.0

    def deviation(self, model: ModelView) -> float:
        """Return the standard deviation of the load: a count of independent arrivals varies by its root."""
        replicas = self._num_replicas[model.id]
        return model.weight * sqrt(model.num_requests) / replicas if replicas else 0.0

    def waited_s(self, model: ModelView, *, since_turn: bool = True) -> float:
        """Return how long its oldest request has waited since its last turn, halved for each failed load.

        A turn ends when a replica is given up. Without that rule a model with a long queue would come before
        the others again and again. With `since_turn=False` it is the whole wait, for schedulers without
        turns. A model that cannot be loaded falls behind those that can, and is still tried again. Failures
        count since the last load that succeeded.
        """
        since_s = self._oldest_s[model.id]
        if since_s is None:
            return 0.0
        if since_turn and model.last_evicted_s is not None:
            since_s = max(since_s, model.last_evicted_s)
        return ldexp(max(self._now_s - since_s, 0.0), -model.num_failed_loads)

    # ------------------------------------------------------------------ models in order

    def overloaded(self, t1: float) -> Sequence[ModelView]:
        """Return the models with a load over `t1` and fewer replicas than requests, the most loaded first.

        Of equal loads the one that has waited longer comes first, then the one with more work.
        """
        order = self._overloaded.get(t1)
        if order is None:
            order = self._overloaded[t1] = _SortedModels(self.models, partial(self._overload_key, t1))
        return order.models()

    def _overload_key(self, t1: float, model: ModelView) -> tuple[float, float, float, ModelId] | None:
        load = self.load(model)
        if load <= t1 or self._num_replicas[model.id] >= model.num_requests:
            return None
        return -load, -self.waited_s(model), -model.num_requests * model.weight, model.id

    def below_min_replicas(self) -> Sequence[ModelView]:
        """Return the models that lack replicas, in the order in which they are to get one.

        Models whose loads failed come last; of the others the one with the smallest share of its
        `min_replicas` comes first.
        """
        if self._below is None:
            self._below = _SortedModels(self.models, self._missing_key)
        return self._below.models()

    def _missing_key(self, model: ModelView) -> tuple[int, float, float, ModelId] | None:
        replicas = self.num_replicas(model)
        if replicas >= model.min_replicas:
            return None
        work = model.num_requests * model.weight
        return model.num_failed_loads, replicas / model.min_replicas, -work, model.id

    def donors(
        self, model: ModelView, *, served_s: float = 0.0, keeping: bool = False
    ) -> Iterator[tuple[ModelView, InstanceView]]:
        """Yield the other models that may give up a replica, least loaded first, each with that replica.

        A model at or below its `min_replicas` may not. With `keeping`, only those that keep a replica for
        their requests, or have no requests. Of two equal loads the one that rises less goes first. There is
        no donor for a model that failed to load twice in a row and is cooling down on any instance: each
        donor would be left EMPTY in turn. Such a model may still use instances that are EMPTY.
        """
        for _, name in self.spare(model, keeping=keeping):
            donor = self.models[name]
            if donor.id != model.id and (instance := self.replica(donor, model, served_s=served_s)):
                yield donor, instance

    def spare(
        self, model: ModelView, *, keeping: bool = False, among: Iterable[ModelId] | None = None
    ) -> Sequence[tuple[Spare, ModelId]]:
        """Return the keys of the `donors`, whether or not a replica fits, perhaps with the model itself.

        All of them, or those `among` some models. Valid until the next change.
        """
        if self._fails_to_load(model):
            return ()
        order = self._donors.get(keeping)
        if order is None:
            order = self._donors[keeping] = _SortedModels(self.models, partial(self._spare_key, keeping))
        return order.keys() if among is None else order.among(among)

    def _spare_key(self, keeping: bool, model: ModelView) -> Spare | None:
        after = self.load(model, more=-1)
        if self.num_spare(model) <= 0 or not self._free.get(model.id) or (keeping and after == inf):
            return None
        return self.load(model), after, model.id, self.deviation(model)

    def best_donor(self, model: ModelView, *, served_s: float = 0.0) -> tuple[ModelView, InstanceView] | None:
        """Return the first of the `donors` that keeps a replica for its requests, else the first of all."""
        keeps = next(self.donors(model, served_s=served_s, keeping=True), None)
        return keeps or next(self.donors(model, served_s=served_s), None)

    # ------------------------------------------------------------------ instances for a model

    def empty(self, model: ModelView) -> InstanceView | None:
        """Return an EMPTY instance for the model: the smallest that holds it, so that large ones stay free.

        An instance that has the model preloaded comes first.
        """
        free = self._free.get(None)
        if not free:
            return None
        if self._empty is None:
            self._empty = sorted(free.values(), key=lambda i: (i.memory_bytes, i.id), reverse=True)
            self._preloaded = [i for i in self._empty if i.preloaded is not None]
        while self._empty[-1].id not in free:
            self._empty.pop()
        preloaded = (i for i in reversed(self._preloaded) if i.preloaded == model.id)
        fitting = (i for i in chain(preloaded, reversed(self._empty)) if i.id in free and _takes(model, i))
        return next(fitting, None)

    def replica(self, donor: ModelView, model: ModelView, *, served_s: float = 0.0) -> InstanceView | None:
        """Return the best replica of `donor` to give to `model`, of those that served `served_s` or longer.

        Best is one that has the model preloaded, then the one with the fewest requests to evict.
        """
        fitting = [
            i
            for i in self._free.get(donor.id, {}).values()
            if _takes(model, i) and (i.serving_since_s is None or self._now_s - i.serving_since_s >= served_s)
        ]
        return min(fitting, key=lambda i: (i.preloaded != model.id, i.num_requests, i.id), default=None)

    def swappable(self, model: ModelView) -> Iterator[InstanceView]:
        """Yield the instances that may swap to the model, unordered: EMPTY ones, and replicas to spare.

        The rules are those of `donors`. Valid until the next change.
        """
        fails = self._fails_to_load(model)
        for held, instances in self._free.items():
            if held is None or (not fails and self._gives(held, model)):
                yield from (instance for instance in instances.values() if _takes(model, instance))

    def can_swap(self, instance: InstanceView, model: ModelView) -> bool:
        """Whether the instance is one of those that are `swappable` to the model."""
        held = None if instance.state is InstanceState.EMPTY else instance.model
        if instance.id not in self._free.get(held, {}) or not _takes(model, instance):
            return False
        return held is None or (self._gives(held, model) and not self._fails_to_load(model))

    def free_replicas(self, model: ModelView) -> tuple[InstanceView, ...]:
        """Return the model's replicas that may be swapped or unloaded now."""
        return tuple(self._free.get(model.id, {}).values())

    def _gives(self, held: ModelId, model: ModelView) -> bool:
        donor = self.models.get(held)
        return donor is not None and donor.id != model.id and self.num_spare(donor) > 0

    def _fails_to_load(self, model: ModelView) -> bool:
        return model.num_failed_loads >= _MAX_FAILED_LOADS and model.id in self._cooling_down


class _SortedModels(Generic[Key]):
    """Models sorted by a key; a model is sorted anew when its key changes."""

    def __init__(self, models: Mapping[ModelId, ModelView], key: Callable[[ModelView], Key | None]) -> None:
        self._models = models
        self._keys = {name: at for name, model in models.items() if (at := key(model)) is not None}
        self._sorted = sorted((at, name) for name, at in self._keys.items())

    def models(self) -> Sequence[ModelView]:
        """Return the models that have a key; the sequence follows later changes."""
        return _ModelsOf(self._sorted, self._models)

    def keys(self) -> Sequence[tuple[Key, ModelId]]:
        """Return the keys with their models; the sequence follows later changes."""
        return self._sorted

    def among(self, models: Iterable[ModelId]) -> Sequence[tuple[Key, ModelId]]:
        """Return the keys of some models alone."""
        return sorted((self._keys[name], name) for name in set(models) if name in self._keys)

    def put(self, model: ModelId, key: Key | None) -> None:
        """Sort a model in by its new key; without a key it is left out."""
        if (old := self._keys.pop(model, None)) is not None:
            del self._sorted[bisect_left(self._sorted, (old, model))]
        if key is not None:
            self._keys[model] = key
            insort(self._sorted, (key, model))


class _ModelsOf(Sequence[ModelView]):
    """The models of sorted keys, without a list of them."""

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


def _counts_to(instance: InstanceView) -> ModelId | None:
    """The model whose replica `FleetView.replicas` counts the instance as."""
    if instance.swapping:
        return instance.target
    alive = instance.state in (InstanceState.SERVING, InstanceState.LOADING)
    return instance.model if alive and not instance.draining else None


def _takes(model: ModelView, instance: InstanceView) -> bool:
    """Whether the weights fit, as far as is known, and did not fail to load here a moment ago."""
    fits = not instance.memory_bytes or model.weight_bytes <= instance.memory_bytes
    return fits and model.id not in instance.cooling_down
