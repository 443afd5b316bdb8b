"""What a view answers at once: which instances host a model, and the best of them by some measure.

A lookup is kept by whoever makes views, and costs what has changed since the last question, not what there
is. A view that was made by hand makes its own when it is first asked.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Iterator, Set
from itertools import chain
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

if TYPE_CHECKING:
    from hotswap.request import ModelId
    from hotswap.view import InstanceId, InstanceView

__all__ = ["Count", "CountRank", "Lookup", "Rank"]

# Ranks that a group keeps sorted; routers have one each, and one for each adapter in use.
_MOST_RANKS = 64

_Key = TypeVar("_Key", bound=Hashable)
_Kept = TypeVar("_Kept")


# Orders instances: the least is best, `None` is out of the question, and an id at the end forbids ties. It is
# pure and hashable, and asked about an instance again only when that one has changed.
Rank: TypeAlias = "Callable[[InstanceView], Any]"

# A number of an instance that the fleet itself counts, `None` for one that is not counted; pure and hashable.
Count: TypeAlias = "Callable[[InstanceView], int | None]"


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
        recount: Returns a view with the counts of now, which costs less; `None` to pull what was touched.
    """

    def __init__(
        self,
        instances: Iterable[InstanceView] = (),
        pull: Callable[[InstanceId], InstanceView] | None = None,
        recount: Callable[[InstanceView], InstanceView] | None = None,
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
        self._pull, self._recount = pull, recount
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
            self._refresh((instance,), loads=False)
        return self._views.get(instance)

    def seen(self) -> Iterable[InstanceView]:
        """Return all as they were when they were last looked at: for what never changes, such as memory."""
        return self._views.values()

    def hosts(self, model: ModelId) -> tuple[InstanceView, ...]:
        """Return those that are SERVING the model, in the fleet's order."""
        return self._of(self._hosts, model)

    @property
    def hosted(self) -> Set[ModelId]:
        """The models that have any; valid until something changes."""
        return self._hosts.keys()

    def replicas(self, model: ModelId) -> tuple[InstanceView, ...]:
        """Return those that serve the model or are turning to it, likewise."""
        return self._of(self._replicas, model)

    def min_by(self, model: ModelId, rank: Rank) -> InstanceView | None:
        """Return the host of the model whose rank is least; `None` if none has any."""
        group = self._hosts.get(model)
        if group is None:
            return None
        if not isinstance(rank, CountRank):
            self._refresh_group(group)
            return group.standing(rank).least(rank, group.members)
        if touched := self._touched & group.members.keys():
            self._refresh(touched, loads=False)
        standing = group.standing(rank)
        best = standing.least(rank, group.members)
        if best is None or not (stirred := self._stirred & group.members.keys()):
            return best
        count = rank.count(best)
        ranked = ((i, group.members[i]) for i in stirred)
        self._refresh([i for i, view in ranked if rank(view) is not None and rank.count(view) == count])
        return standing.least(rank, group.members)

    def ranked(self, model: ModelId, rank: Rank) -> Iterator[InstanceView]:
        """Return the hosts of the model that have a rank, the least first; costs what is taken of them.

        Valid until the next question by the same rank, or until something changes.
        """
        group = self._hosts.get(model)
        if group is None:
            return iter(())
        self._refresh_group(group)
        return group.order(rank).ranked(rank, group.members)

    def total(self, model: ModelId, count: Count) -> tuple[int, int]:
        """Return how many hosts of the model are counted, and the sum of their numbers."""
        group = self._hosts.get(model)
        if group is None:
            return 0, 0
        if touched := self._touched & group.members.keys():
            self._refresh(touched, loads=False)
        return group.tally(count).total(count, group.members)

    def host_ids(self, model: ModelId) -> frozenset[InstanceId]:
        """Return the ids of those that are SERVING the model; the same object until one comes or goes."""
        group = self._hosts.get(model)
        return frozenset() if group is None else group.ids()

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
        self._move(self._replicas, before.next_model if before else None, view.next_model, view)

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
        self._move(self._replicas, view.next_model, None, view)

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

    def _refresh(self, instances: Iterable[InstanceId], *, loads: bool = True) -> None:
        """Bring instances up to date; without `loads` only their counts, if that can be had for less."""
        assert self._pull is not None
        for instance in instances:
            view = self._views.get(instance)
            if self._recount is not None and view is not None and not (loads and instance in self._stirred):
                self._touched.discard(instance)
                self.put(self._recount(view))
                continue
            self._touched.discard(instance)
            self._stirred.discard(instance)  # before: one that computes is stirred again by being looked at
            try:
                self.put(self._pull(instance))
            except BaseException:
                self.touch(instance)
                self.stir(instance)
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

    __slots__ = ("_all", "_ids", "_orders", "_sorted", "_standings", "_tallies", "members")

    def __init__(self) -> None:
        self.members: dict[InstanceId, InstanceView] = {}
        self._sorted = True
        self._all: tuple[InstanceView, ...] | None = None
        self._ids: frozenset[InstanceId] | None = None
        self._standings: dict[Rank, _Standing] = {}
        self._orders: dict[Rank, _Order] = {}
        self._tallies: dict[Count, _Tally] = {}

    def put(self, view: InstanceView) -> None:
        if view.id not in self.members:
            self._sorted, self._ids = False, None
        self.members[view.id] = view
        self._all = None
        for kept in self._kept():
            kept.changed[view.id] = None

    def leave(self, instance: InstanceId) -> None:
        del self.members[instance]
        self._all = self._ids = None
        for kept in self._kept():
            kept.leave(instance)

    def all(self, places: dict[InstanceId, int]) -> tuple[InstanceView, ...]:
        if not self._sorted:
            self.members = {key: self.members[key] for key in sorted(self.members, key=places.__getitem__)}
            self._sorted = True
        if self._all is None:
            self._all = tuple(self.members.values())
        return self._all

    def ids(self) -> frozenset[InstanceId]:
        if self._ids is None:
            self._ids = frozenset(self.members)
        return self._ids

    def standing(self, rank: Rank) -> _Standing:
        return _kept(self._standings, rank, lambda: _Standing(self.members))

    def order(self, rank: Rank) -> _Order:
        return _kept(self._orders, rank, lambda: _Order(self.members))

    def tally(self, count: Count) -> _Tally:
        return _kept(self._tallies, count, lambda: _Tally(self.members))

    def _kept(self) -> Iterable[_Standing | _Order | _Tally]:
        return chain(self._standings.values(), self._orders.values(), self._tallies.values())


def _kept(kept: dict[_Key, _Kept], key: _Key, make: Callable[[], _Kept]) -> _Kept:
    """What is kept for a key, made anew if need be; the one that was asked for last is last."""
    found = kept.pop(key, None)
    if found is None:
        if len(kept) >= _MOST_RANKS:
            del kept[next(iter(kept))]
        found = make()
    kept[key] = found
    return found


class _Standing:
    """A heap of a group's members by one rank; entries that a change has overtaken stay until met."""

    __slots__ = ("_heap", "_keys", "_numbers", "changed")

    def __init__(self, members: Iterable[InstanceId]) -> None:
        self.changed = dict.fromkeys(members)
        self._keys: dict[InstanceId, Any] = {}
        self._heap: list[tuple[Any, int, InstanceId]] = []
        self._numbers = itertools.count()

    def leave(self, instance: InstanceId) -> None:
        self.changed.pop(instance, None)
        self._keys.pop(instance, None)

    def least(self, rank: Rank, members: dict[InstanceId, InstanceView]) -> InstanceView | None:
        if len(self.changed) + len(self._heap) > 4 * len(members) + 64:
            self._heap.clear()
            self._keys.clear()
            self.changed = dict.fromkeys(members)
        for instance in self.changed:
            key = rank(members[instance])
            if key is None:
                self._keys.pop(instance, None)
            elif key != self._keys.get(instance):
                self._keys[instance] = key
                heapq.heappush(self._heap, (key, next(self._numbers), instance))
        self.changed.clear()
        while self._heap:
            key, _, instance = self._heap[0]
            if self._keys.get(instance) is key:
                return members[instance]
            heapq.heappop(self._heap)
        return None


class _Order:
    """A group's members in the order of one rank."""

    __slots__ = ("_keys", "_sorted", "changed")

    def __init__(self, members: Iterable[InstanceId]) -> None:
        self.changed = dict.fromkeys(members)
        self._keys: dict[InstanceId, Any] = {}
        self._sorted: list[tuple[Any, InstanceId]] = []

    def leave(self, instance: InstanceId) -> None:
        self.changed.pop(instance, None)
        self._take_out(instance)

    def ranked(self, rank: Rank, members: dict[InstanceId, InstanceView]) -> Iterator[InstanceView]:
        if 4 * len(self.changed) > len(members):
            self._keys = {key: at for key, view in members.items() if (at := rank(view)) is not None}
            self._sorted = sorted((at, instance) for instance, at in self._keys.items())
            self.changed.clear()
        for instance in self.changed:
            key = rank(members[instance])
            if key == self._keys.get(instance):
                continue
            self._take_out(instance)
            if key is not None:
                self._keys[instance] = key
                bisect.insort(self._sorted, (key, instance))
        self.changed.clear()
        return (members[instance] for _, instance in self._sorted)

    def _take_out(self, instance: InstanceId) -> None:
        if (key := self._keys.pop(instance, None)) is not None:
            del self._sorted[bisect.bisect_left(self._sorted, (key, instance))]


class _Tally:
    """The sum of a number of a group's members."""

    __slots__ = ("_numbers", "_sum", "changed")

    def __init__(self, members: Iterable[InstanceId]) -> None:
        self.changed = dict.fromkeys(members)
        self._numbers: dict[InstanceId, int] = {}
        self._sum = 0

    def leave(self, instance: InstanceId) -> None:
        self.changed.pop(instance, None)
        self._sum -= self._numbers.pop(instance, 0)

    def total(self, count: Count, members: dict[InstanceId, InstanceView]) -> tuple[int, int]:
        for instance in self.changed:
            self._sum -= self._numbers.pop(instance, 0)
            number = count(members[instance])
            if number is not None:
                self._numbers[instance] = number
                self._sum += number
        self.changed.clear()
        return len(self._numbers), self._sum
