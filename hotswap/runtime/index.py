"""The instances of a fleet by the model that they host, so that a decision costs what has changed.

The index keeps the latest view of each instance. It asks an instance again only after that has told of a
change, and only when a question needs the answer.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable, Iterator
from typing import Protocol

from hotswap.engine import StatusListener
from hotswap.request import ModelId
from hotswap.runtime.group import Group
from hotswap.view import Count, InstanceId, InstanceState, InstanceView, Rank

__all__ = ["Index", "Indexed"]

log = logging.getLogger("hotswap")

# To ask an engine at once costs less than to rank it twice, but in a small group it may never be asked.
_MANY = 32
_SETTLED = (InstanceState.SERVING, InstanceState.EMPTY)


class Indexed(Protocol):
    """What an index keeps views of."""

    def view(self) -> InstanceView:
        """Return it as it is now."""
        ...

    def last_view(self) -> InstanceView | None:
        """Return it with what its engine has told last; `None` if that has told nothing."""
        ...

    def counted(self, view: InstanceView) -> InstanceView:
        """Return an earlier view of it with the fleet's counts as they are now, which costs less."""
        ...


class Index:
    """The instances of a fleet, by id, by the model that they host, and by the one that they swap to.

    A change is noted by `load_changed`, `counts_changed` or `state_changed`. The views of the last kind, and
    of polled instances, are renewed by `refresh`; the others when a question needs them.

    Attributes:
        unsettled: Instances that are neither SERVING nor EMPTY, though no swap has them.
    """

    def __init__(self) -> None:
        self._instances: dict[InstanceId, Indexed] = {}
        self._views: dict[InstanceId, InstanceView] = {}
        self._places: dict[InstanceId, int] = {}
        self._numbers = itertools.count()
        # By the model that they host; those that host none are a group as well.
        self._hosts: dict[ModelId | None, Group] = {}
        self._group_of: dict[InstanceId, Group] = {}
        self._none = Group(None)
        self._replicas: dict[ModelId, dict[InstanceId, None]] = {}
        self._ids: frozenset[InstanceId] | None = None
        self._all: tuple[InstanceView, ...] | None = None
        self._state_changed: dict[InstanceId, None] = {}
        self._polled: dict[InstanceId, None] = {}
        self._silent: set[InstanceId] = set()
        self.unsettled: dict[InstanceId, None] = {}

    # ------------------------------------------------------------------ changes

    def add(self, instance: InstanceId, indexed: Indexed) -> None:
        """Take an instance in; its view is asked for by the next `refresh`."""
        self._instances[instance] = indexed
        self._state_changed[instance] = None

    def remove(self, instance: InstanceId) -> None:
        """Forget an instance."""
        del self._instances[instance]
        self._silent.discard(instance)
        self._state_changed.pop(instance, None)
        self._polled.pop(instance, None)
        self.unsettled.pop(instance, None)
        view = self._views.pop(instance, None)
        if view is not None:
            del self._places[instance]
            self._ids = self._all = None
            self._leave_group(self._group_of.pop(instance), instance)
            self._leave_replicas(instance, view.next_model)

    def poll(self, instance: InstanceId, polled: bool) -> None:
        """Ask an instance for its view at every `refresh`, or no longer."""
        if polled:
            self._polled[instance] = None
        else:
            self._polled.pop(instance, None)

    def counts_changed(self, instance: InstanceId) -> None:
        """Note that what the fleet counts of an instance has changed."""
        if (group := self._group_of.get(instance)) is not None:
            group.counts_changed.add(instance)
            self._all = None

    def load_changed(self, instance: InstanceId) -> None:
        """Note that the load which its engine tells has changed."""
        group = self._group_of.get(instance)
        if group is not None and instance not in group.load_changed:
            group.note_load(instance)
            self._all = None

    def state_changed(self, instance: InstanceId) -> None:
        """Note that more than that may have changed."""
        if instance in self._instances:
            self._state_changed[instance] = None

    def listener(self, instance: InstanceId) -> StatusListener:
        """Return what an engine may tell its changes."""
        return _Listener(self, instance)

    def refresh(self) -> None:
        """Renew the views of instances that have changed state, and of those that are polled."""
        for instance in tuple(self._state_changed):
            if self._look(instance):
                self._state_changed.pop(instance, None)
        for instance in tuple(self._polled):
            self._look(instance)

    # ------------------------------------------------------------------ questions

    @property
    def ids(self) -> frozenset[InstanceId]:
        """The ids of all instances; the same object until one comes or goes."""
        if self._ids is None:
            self._ids = frozenset(self._views)
        return self._ids

    def instances(self) -> tuple[InstanceView, ...]:
        """Return all of them, in the fleet's order."""
        if self._all is None:
            for group in tuple(self._hosts.values()):
                self._renew(group, group.load_changed)
            views = tuple(self._views.values())
            if any(group.load_changed for group in self._hosts.values()):
                return views
            self._all = views
        return self._all

    def instance(self, instance: InstanceId) -> InstanceView:
        """Return one; `KeyError` if there is none of that id."""
        group = self._group_of[instance]
        if instance in group.load_changed:
            self._look(instance)
        return self._counted(instance, group)

    def counted(self, instance: InstanceId) -> InstanceView | None:
        """Return one as it is but for the load that its engine tells; `None` if there is none."""
        group = self._group_of.get(instance)
        return None if group is None else self._counted(instance, group)

    def seen(self) -> Iterable[InstanceView]:
        """Return all as they were last seen: for what never changes, such as memory."""
        return self._views.values()

    def hosted(self) -> tuple[ModelId, ...]:
        """Return the models that instances are SERVING."""
        return tuple(model for model in self._hosts if model is not None)

    def has_host(self, model: ModelId) -> bool:
        """Return whether an instance is SERVING the model."""
        return model in self._hosts

    def has_open(self, model: ModelId, *, adapters: bool = False) -> bool:
        """Return whether an instance takes a request of the model now, if need be with an adapter."""
        group = self._group(model, adapters)
        if not group.counts_changed:
            return bool(group.open)
        return not group.open <= group.counts_changed or bool(self._renewed(model, adapters).open)

    def open_among(self, models: Iterable[ModelId]) -> Iterator[ModelId]:
        """Return those of the models that an instance takes a request of now."""
        return (model for model in models if model in self._hosts and self.has_open(model))

    def all_adapt(self, model: ModelId) -> bool:
        """Return whether every host of the model can hold adapters."""
        return not self._hosts.get(model, self._none).without_adapters

    def hosts(self, model: ModelId, *, adapters: bool = False) -> tuple[InstanceView, ...]:
        """Return those that are SERVING the model, in the fleet's order; with `adapters` that hold such."""
        return self._renewed(model, adapters, loads=True).all(self._places)

    def has_replica(self, model: ModelId) -> bool:
        """Return whether an instance serves the model or swaps to it."""
        return model in self._replicas

    def replicas(self, model: ModelId) -> tuple[InstanceView, ...]:
        """Return those that serve the model or swap to it, in the fleet's order."""
        replicas = sorted(self._replicas.get(model, ()), key=self._places.__getitem__)
        return tuple(self.instance(instance) for instance in replicas)

    def min_by(self, model: ModelId, rank: Rank, *, adapters: bool = False) -> InstanceView | None:
        """Return the host of the model that the rank puts first; `None` if it ranks none."""
        group = self._group(model, adapters)
        heap = group.heap(rank)
        if heap.by_count is None:
            self._renew(group, group.load_changed)
            return heap.first(group)
        # Of a large group those that a request came to or left are about to be asked anyway.
        many = len(group.members) > _MANY
        self._renew(group, group.load_changed & group.counts_changed if many else ())
        looked_at: set[InstanceId] = set()
        while True:
            best = heap.first(group, looked_at)
            if best is None or best.id not in group.load_changed or best.id in looked_at:
                break
            looked_at.add(best.id)
            self._look(best.id)
        for instance in looked_at & group.load_changed:
            group.note_load(instance)  # an engine that computes may tell of its next load at once
        return best

    def ranked(self, model: ModelId, rank: Rank, *, adapters: bool = False) -> Iterator[InstanceView]:
        """Return the hosts of the model that the rank ranks, the first first; costs what is taken of them.

        Valid until the next question by the same rank, or until something changes.
        """
        group = self._renewed(model, adapters, loads=True)
        return group.order(rank).ranked(group.members)

    def total(self, model: ModelId, count: Count, *, adapters: bool = False) -> tuple[int, int]:
        """Return how many hosts of the model are counted, and the sum of their numbers."""
        group = self._renewed(model, adapters)
        return group.sum(count).total(group.members)

    def host_ids(self, model: ModelId, *, adapters: bool = False) -> frozenset[InstanceId]:
        """Return the ids of the hosts of the model; the same object until one comes or goes."""
        return self._group(model, adapters).ids()

    # ------------------------------------------------------------------ private

    def _group(self, model: ModelId, adapters: bool) -> Group:
        group = self._hosts.get(model, self._none)
        return group.adapting() if adapters else group

    def _renewed(self, model: ModelId, adapters: bool, *, loads: bool = False) -> Group:
        """Return the hosts of a model with their counts, and if need be their loads, as they are now."""
        group = self._group(model, adapters)
        self._renew(group, group.load_changed if loads else ())
        return group

    def _renew(self, group: Group, loads: Iterable[InstanceId]) -> None:
        """Bring the views of a group up to date, but for loads that are not among these."""
        members = group.members  # `loads` may be those of a larger group
        for instance in tuple(loads):
            if instance in members:
                self._look(instance)
        for instance in tuple(group.counts_changed):
            if instance in members:
                self._counted(instance, group)

    def _counted(self, instance: InstanceId, group: Group) -> InstanceView:
        """Return the view of a member with its counts as they are now."""
        view = self._views[instance]
        if instance in group.counts_changed:
            group.counts_changed.remove(instance)
            view = self._views[instance] = self._instances[instance].counted(view)
            self._group_of[instance].put(view)
        return view

    def _look(self, instance: InstanceId) -> bool:
        """Ask an instance for its view; one that cannot tell its status keeps the last and is asked again."""
        group = self._group_of.get(instance)
        if group is not None:  # before: an engine that computes may tell of its next load at once
            group.counts_changed.discard(instance)
            group.load_changed.discard(instance)
        try:
            view = self._instances[instance].view()
        except Exception:  # of an engine
            if (last := self._instances[instance].last_view()) is not None:
                self._put(last)
                self._group_of[instance].note_load(instance)
            if instance not in self._silent:
                self._silent.add(instance)
                log.exception(
                    "Instance %r cannot tell its status; its last one is shown until it can.", instance
                )
            return False
        self._silent.discard(instance)
        self._put(view)
        return True

    def _put(self, view: InstanceView) -> None:
        before = self._views.get(view.id)
        self._views[view.id] = view
        self._all = None
        if before is None or _moves(before, view):
            self._move(view, before)
        self._group_of[view.id].put(view)

    def _move(self, view: InstanceView, before: InstanceView | None) -> None:
        """Note an instance under its state and models, which are others than before."""
        if before is None:
            self._places[view.id] = next(self._numbers)
            self._ids = None
        else:
            self._leave_replicas(view.id, before.next_model)
        if view.swapping or view.state in _SETTLED:
            self.unsettled.pop(view.id, None)
        else:
            self.unsettled[view.id] = None
        if before is None or before.hosted != view.hosted:
            self._join_group(view)
        if view.next_model is not None:
            self._replicas.setdefault(view.next_model, {})[view.id] = None

    def _join_group(self, view: InstanceView) -> None:
        before = self._group_of.get(view.id)
        group = self._hosts.get(view.hosted)
        if group is None:
            group = self._hosts[view.hosted] = Group(view.hosted)
        self._group_of[view.id] = group
        if before is not None:
            if view.id in before.load_changed:  # told while the engine was looked at
                group.load_changed.add(view.id)
            self._leave_group(before, view.id)

    def _leave_group(self, group: Group, instance: InstanceId) -> None:
        group.remove(instance)
        group.counts_changed.discard(instance)
        group.load_changed.discard(instance)
        if not group.members:
            del self._hosts[group.model]

    def _leave_replicas(self, instance: InstanceId, model: ModelId | None) -> None:
        if model is not None:
            del self._replicas[model][instance]
            if not self._replicas[model]:
                del self._replicas[model]

    def __repr__(self) -> str:
        return f"<Index [{len(self._views)} instances]>"


def _moves(before: InstanceView, view: InstanceView) -> bool:
    """Return whether an index has an instance under other models now."""
    return (
        before.state is not view.state
        or before.model != view.model
        or before.swapping != view.swapping
        or before.target != view.target
        or before.draining != view.draining
    )


class _Listener(StatusListener):
    """What one engine tells its changes; those of an engine that has left are dropped."""

    def __init__(self, index: Index, instance: InstanceId) -> None:
        self._index, self._instance = index, instance

    def load_changed(self) -> None:
        self._index.load_changed(self._instance)

    def state_changed(self) -> None:
        self._index.state_changed(self._instance)
