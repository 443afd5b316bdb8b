"""The instances of a fleet by the model that they host, so that a decision costs what has changed.

The index keeps the latest view of each instance. It asks an instance again only after that has told of a
change, and only when a question needs the answer.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable, Iterator, Set
from typing import Protocol

from hotswap.engine import StatusListener
from hotswap.request import ModelId
from hotswap.runtime.group import Group
from hotswap.view import Count, CountRank, InstanceId, InstanceState, InstanceView, Rank

__all__ = ["Index", "Indexed"]

log = logging.getLogger("hotswap")

_SETTLED = (InstanceState.SERVING, InstanceState.EMPTY)


class Indexed(Protocol):
    """What an index keeps views of."""

    def view(self) -> InstanceView:
        """Return it as it is now."""
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
        self._hosts: dict[ModelId, Group] = {}
        self._replicas: dict[ModelId, Group] = {}
        self._ids: frozenset[InstanceId] | None = None
        self._all: tuple[InstanceView, ...] | None = None
        self._counts_changed: set[InstanceId] = set()
        self._load_changed: set[InstanceId] = set()
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
        for changed in (self._counts_changed, self._load_changed, self._silent):
            changed.discard(instance)
        self._state_changed.pop(instance, None)
        self._polled.pop(instance, None)
        self.unsettled.pop(instance, None)
        view = self._views.pop(instance, None)
        if view is not None:
            del self._places[instance]
            self._ids = self._all = None
            self._move(self._hosts, view.hosted, None, view)
            self._move(self._replicas, view.next_model, None, view)

    def poll(self, instance: InstanceId, polled: bool) -> None:
        """Ask an instance for its view at every `refresh`, or no longer."""
        if polled:
            self._polled[instance] = None
        else:
            self._polled.pop(instance, None)

    def __contains__(self, instance: object) -> bool:
        return instance in self._instances

    def counts_changed(self, instance: InstanceId) -> None:
        """Note that what the fleet counts of an instance has changed."""
        self._counts_changed.add(instance)

    def load_changed(self, instance: InstanceId) -> None:
        """Note that the load which its engine tells has changed."""
        self._load_changed.add(instance)

    def state_changed(self, instance: InstanceId) -> None:
        """Note that more than that may have changed."""
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
        if self._counts_changed or self._load_changed:
            self._renew(self._counts_changed | self._load_changed)
        if self._all is None:
            self._all = tuple(self._views.values())
        return self._all

    def instance(self, instance: InstanceId) -> InstanceView:
        """Return one; `KeyError` if there is none of that id."""
        if instance in self._counts_changed or instance in self._load_changed:
            self._renew((instance,))
        return self._views[instance]

    def counted(self, instance: InstanceId) -> InstanceView | None:
        """Return one as it is but for the load that its engine tells; `None` if there is none."""
        if instance in self._counts_changed:
            self._renew((instance,), loads=False)
        return self._views.get(instance)

    def seen(self) -> Iterable[InstanceView]:
        """Return all as they were last seen: for what never changes, such as memory."""
        return self._views.values()

    @property
    def hosted(self) -> Set[ModelId]:
        """The models that an instance is SERVING; valid until something changes."""
        return self._hosts.keys()

    def has_open(self, model: ModelId, *, adapters: bool = False) -> bool:
        """Return whether an instance takes a request of the model now, if need be with an adapter."""
        group = self._group(model, adapters)
        if group is None:
            return False
        self._renew_counts(group)
        return bool(group.open)

    def all_adapt(self, model: ModelId) -> bool:
        """Return whether every host of the model can hold adapters."""
        group = self._hosts.get(model)
        return group is None or not group.without_adapters

    def hosts(self, model: ModelId, *, adapters: bool = False) -> tuple[InstanceView, ...]:
        """Return those that are SERVING the model, in the fleet's order; with `adapters` that hold such."""
        return self._of(self._group(model, adapters))

    def replicas(self, model: ModelId) -> tuple[InstanceView, ...]:
        """Return those that serve the model or swap to it, in the fleet's order."""
        return self._of(self._replicas.get(model))

    def min_by(self, model: ModelId, rank: Rank, *, adapters: bool = False) -> InstanceView | None:
        """Return the host of the model that the rank puts first; `None` if it ranks none."""
        group = self._group(model, adapters)
        if group is None:
            return None
        if not isinstance(rank, CountRank):
            self._renew_group(group)
            return group.heap(rank).first(rank, group.members)
        self._renew_counts(group)
        heap = group.heap(rank)
        best = heap.first(rank, group.members)
        if best is None or not (loads := self._load_changed & group.members.keys()):
            return best
        count = rank.count(best)
        ranked = ((i, group.members[i]) for i in loads)
        self._renew([i for i, view in ranked if rank(view) is not None and rank.count(view) == count])
        return heap.first(rank, group.members)

    def ranked(self, model: ModelId, rank: Rank, *, adapters: bool = False) -> Iterator[InstanceView]:
        """Return the hosts of the model that the rank ranks, the first first; costs what is taken of them.

        Valid until the next question by the same rank, or until something changes.
        """
        group = self._group(model, adapters)
        if group is None:
            return iter(())
        self._renew_group(group)
        return group.order(rank).ranked(rank, group.members)

    def total(self, model: ModelId, count: Count, *, adapters: bool = False) -> tuple[int, int]:
        """Return how many hosts of the model are counted, and the sum of their numbers."""
        group = self._group(model, adapters)
        if group is None:
            return 0, 0
        self._renew_counts(group)
        return group.sum(count).total(count, group.members)

    def host_ids(self, model: ModelId, *, adapters: bool = False) -> frozenset[InstanceId]:
        """Return the ids of the hosts of the model; the same object until one comes or goes."""
        group = self._group(model, adapters)
        return frozenset() if group is None else group.ids()

    # ------------------------------------------------------------------ private

    def _group(self, model: ModelId, adapters: bool) -> Group | None:
        group = self._hosts.get(model)
        return group if group is None or not adapters else group.adapting()

    def _of(self, group: Group | None) -> tuple[InstanceView, ...]:
        if group is None:
            return ()
        self._renew_group(group)
        return group.all(self._places)

    def _renew_group(self, group: Group) -> None:
        members = group.members.keys()
        if changed := (self._counts_changed & members) | (self._load_changed & members):
            self._renew(changed)

    def _renew_counts(self, group: Group) -> None:
        if changed := self._counts_changed & group.members.keys():
            self._renew(changed, loads=False)

    def _renew(self, instances: Iterable[InstanceId], *, loads: bool = True) -> None:
        """Bring views up to date; without `loads` only their counts."""
        for instance in instances:
            indexed, view = self._instances[instance], self._views.get(instance)
            self._counts_changed.discard(instance)
            if view is not None and not (loads and instance in self._load_changed):
                self._put(indexed.counted(view))
                continue
            self._load_changed.discard(
                instance
            )  # before: an engine that computes may tell of the next at once
            if not self._look(instance):
                self._counts_changed.add(instance)
                self._load_changed.add(instance)

    def _look(self, instance: InstanceId) -> bool:
        """Ask an instance for its view; one that cannot tell it keeps its last one, and is asked again."""
        try:
            view = self._instances[instance].view()
        except Exception:  # of an engine
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
        if before is None:
            self._places[view.id] = next(self._numbers)
            self._ids = None
        self._views[view.id] = view
        self._all = None
        if view.swapping or view.state in _SETTLED:
            self.unsettled.pop(view.id, None)
        else:
            self.unsettled[view.id] = None
        self._move(self._hosts, before.hosted if before else None, view.hosted, view)
        self._move(self._replicas, before.next_model if before else None, view.next_model, view)

    def _move(
        self, groups: dict[ModelId, Group], old: ModelId | None, new: ModelId | None, view: InstanceView
    ) -> None:
        if old is not None and old != new:
            groups[old].remove(view.id)
            if not groups[old].members:
                del groups[old]
        if new is not None:
            group = groups.get(new)
            if group is None:
                group = groups[new] = Group()
            group.put(view)

    def __repr__(self) -> str:
        return f"<Index [{len(self._views)} instances, {len(self._hosts)} models hosted]>"


class _Listener(StatusListener):
    """What one engine tells its changes; those of an engine that has left are dropped."""

    def __init__(self, index: Index, instance: InstanceId) -> None:
        self._index, self._instance = index, instance

    def load_changed(self) -> None:
        if self._instance in self._index:
            self._index.load_changed(self._instance)

    def state_changed(self) -> None:
        if self._instance in self._index:
            self._index.state_changed(self._instance)
