"""What a view answers at once: which instances host a model, and the best of them by some measure.

A lookup is kept by whoever makes views, and costs what has changed since the last question, not what there
is. A view that was made by hand makes its own when it is first asked.
"""

from __future__ import annotations

import heapq
import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from hotswap.request import ModelId
    from hotswap.view import InstanceId, InstanceView

__all__ = ["CountRank", "Lookup", "Rank"]

# Ranks that a group keeps sorted; routers have one each, and one for each adapter in use.
_MOST_RANKS = 64


# Orders instances: the least is best, `None` is out of the question, and an id at the end forbids ties. It is
# pure and hashable, and asked about an instance again only when that one has changed.
Rank: TypeAlias = "Callable[[InstanceView], Any]"


class CountRank(ABC):
    """A rank whose keys begin with what the fleet itself counts, so that engines need not all be looked at.

    An engine that computes has another load at every moment. Only where counts are equal does it decide.
    """

    @abstractmethod
    def __call__(self, instance: InstanceView) -> Any:
        """Return the whole key, `None` for one that is out of the question."""

    @abstractmethod
    def count(self, instance: InstanceView) -> Any:
        """Return its beginning; of one with a key. It and that there is a key may depend on no load."""


class Lookup:
    """The instances of a fleet, by id, by the model that they host, and by the one that they are turning to.

    Args:
        instances: Those that there are, in the fleet's order.
        pull: Returns an instance as it is now; asked only about those that `touch` or `stir` named.
    """

    def __init__(
        self,
        instances: Iterable[InstanceView] = (),
        pull: Callable[[InstanceId], InstanceView] | None = None,
    ) -> None:
        self._views: dict[InstanceId, InstanceView] = {}
        self._places: dict[InstanceId, int] = {}
        self._numbers = itertools.count()
        self._hosts: dict[ModelId, _Group] = {}
        self._replicas: dict[ModelId, _Group] = {}
        self._ids: frozenset[InstanceId] | None = None
        self._all: tuple[InstanceView, ...] | None = None
        self._touched: set[InstanceId] = set()
        self._stirred: set[InstanceId] = set()
        self._pull = pull
        for instance in instances:
            self.put(instance)

    # ------------------------------------------------------------------ questions

    @property
    def ids(self) -> frozenset[InstanceId]:
        """Of all instances; the same object until one comes or goes."""
        if self._ids is None:
            self._ids = frozenset(self._views)
        return self._ids

    def instances(self) -> tuple[InstanceView, ...]:
        """Return all of them, in the fleet's order."""
        if self._touched or self._stirred:
            self._refresh(self._touched | self._stirred)
        if self._all is None:
            self._all = tuple(self._views.values())
        return self._all

    def instance(self, instance: InstanceId) -> InstanceView:
        """Return one; `KeyError` if there is none of that id."""
        if instance in self._touched or instance in self._stirred:
            self._refresh((instance,))
        return self._views[instance]

    def counted(self, instance: InstanceId) -> InstanceView | None:
        """Return one as it is but for the load that its engine tells of; `None` if there is none."""
        if instance in self._touched:
            self._refresh((instance,))
        return self._views.get(instance)

    def seen(self) -> Iterable[InstanceView]:
        """Return all as they were when they were last looked at: for what never changes, such as memory."""
        return self._views.values()

    def hosts(self, model: ModelId) -> tuple[InstanceView, ...]:
        """Return those that are SERVING the model, in the fleet's order."""
        return self._of(self._hosts, model)

    def is_hosted(self, model: ModelId) -> bool:
        """Whether there is any."""
        return model in self._hosts

    def replicas(self, model: ModelId) -> tuple[InstanceView, ...]:
        """Return those that serve the model or are turning to it, likewise."""
        return self._of(self._replicas, model)

    def least(self, model: ModelId, rank: Rank) -> InstanceView | None:
        """Return the host of the model whose rank is least; `None` if none has any."""
        group = self._hosts.get(model)
        if group is None:
            return None
        if not isinstance(rank, CountRank):
            self._refresh_group(group)
            return group.least(rank)
        if touched := self._touched & group.members.keys():
            self._refresh(touched)
        best = group.least(rank)
        if best is None or not (stirred := self._stirred & group.members.keys()):
            return best
        count = rank.count(best)
        ranked = ((i, group.members[i]) for i in stirred)
        self._refresh([i for i, view in ranked if rank(view) is not None and rank.count(view) == count])
        return group.least(rank)

    # ------------------------------------------------------------------ changes

    def put(self, view: InstanceView) -> None:
        """Take an instance in, or note how it is now."""
        before = self._views.get(view.id)
        if before is None:
            self._places[view.id] = next(self._numbers)
            self._ids = None
        self._views[view.id] = view
        self._all = None
        self._move(self._hosts, before.hosted if before else None, view.hosted, view)
        self._move(self._replicas, before.becomes if before else None, view.becomes, view)

    def drop(self, instance: InstanceId) -> None:
        """Forget an instance, if it was ever taken in."""
        self._touched.discard(instance)
        self._stirred.discard(instance)
        view = self._views.pop(instance, None)
        if view is None:
            return
        del self._places[instance]
        self._ids = self._all = None
        self._move(self._hosts, view.hosted, None, view)
        self._move(self._replicas, view.becomes, None, view)

    def touch(self, instance: InstanceId) -> None:
        """Note that its counts have changed: it is looked at when somebody asks. Other things need `put`."""
        self._touched.add(instance)

    def stir(self, instance: InstanceId) -> None:
        """Note that only the load that its engine tells of has."""
        self._stirred.add(instance)

    # ------------------------------------------------------------------ private

    def _of(self, groups: dict[ModelId, _Group], model: ModelId) -> tuple[InstanceView, ...]:
        group = groups.get(model)
        if group is None:
            return ()
        self._refresh_group(group)
        return group.all(self._places)

    def _refresh_group(self, group: _Group) -> None:
        members = group.members.keys()
        if changed := (self._touched & members) | (self._stirred & members):
            self._refresh(changed)

    def _refresh(self, instances: Iterable[InstanceId]) -> None:
        assert self._pull is not None
        for instance in instances:
            self._touched.discard(instance)
            self._stirred.discard(instance)  # before: one that computes is stirred again by being looked at
            try:
                self.put(self._pull(instance))
            except BaseException:
                self._touched.add(instance)
                raise

    def _move(
        self, groups: dict[ModelId, _Group], old: ModelId | None, new: ModelId | None, view: InstanceView
    ) -> None:
        if old is not None and old != new:
            groups[old].leave(view.id)
            if not groups[old].members:
                del groups[old]
        if new is not None:
            group = groups.get(new)
            if group is None:
                group = groups[new] = _Group()
            group.put(view)

    def __repr__(self) -> str:
        return f"<Lookup [{len(self._views)} instances, {len(self._hosts)} models hosted]>"


class _Group:
    """Instances that have a model in common."""

    __slots__ = ("_all", "_sorted", "_standings", "members")

    def __init__(self) -> None:
        self.members: dict[InstanceId, InstanceView] = {}
        self._sorted = True
        self._all: tuple[InstanceView, ...] | None = None
        self._standings: dict[Rank, _Standing] = {}

    def put(self, view: InstanceView) -> None:
        if view.id not in self.members:
            self._sorted = False
        self.members[view.id] = view
        self._all = None
        for standing in self._standings.values():
            standing.changed[view.id] = None

    def leave(self, instance: InstanceId) -> None:
        del self.members[instance]
        self._all = None
        for standing in self._standings.values():
            standing.changed.pop(instance, None)

    def all(self, places: dict[InstanceId, int]) -> tuple[InstanceView, ...]:
        if not self._sorted:
            self.members = {key: self.members[key] for key in sorted(self.members, key=places.__getitem__)}
            self._sorted = True
        if self._all is None:
            self._all = tuple(self.members.values())
        return self._all

    def least(self, rank: Rank) -> InstanceView | None:
        standing = self._standings.pop(rank, None)
        if standing is None:
            if len(self._standings) >= _MOST_RANKS:
                del self._standings[next(iter(self._standings))]
            standing = _Standing(self.members)
        self._standings[rank] = standing  # last, as the one that was asked for last
        return standing.least(rank, self.members)


class _Standing:
    """A heap of a group's members by one rank; entries that a change has overtaken stay until met."""

    __slots__ = ("_heap", "_numbers", "changed")

    def __init__(self, members: Iterable[InstanceId]) -> None:
        self.changed = dict.fromkeys(members)
        self._heap: list[tuple[Any, int, InstanceView]] = []
        self._numbers = itertools.count()

    def least(self, rank: Rank, members: dict[InstanceId, InstanceView]) -> InstanceView | None:
        if len(self.changed) + len(self._heap) > 4 * len(members) + 64:
            self._heap.clear()
            self.changed = dict.fromkeys(members)
        for instance in self.changed:
            view = members.get(instance)
            if view is not None and (key := rank(view)) is not None:
                heapq.heappush(self._heap, (key, next(self._numbers), view))
        self.changed.clear()
        while self._heap:
            best: InstanceView = self._heap[0][2]
            if members.get(best.id) is best:
                return best
            heapq.heappop(self._heap)
        return None
