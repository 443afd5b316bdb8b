"""Instances that have a model in common, in the orders that routers have asked for."""

from __future__ import annotations

import bisect
import heapq
import itertools
from collections.abc import Callable, Hashable, Iterable, Iterator
from itertools import chain
from typing import Any, TypeVar

from hotswap.view import Count, InstanceId, InstanceView, Rank

__all__ = ["Group"]

# Ranks that a group keeps sorted; routers have one each, and one for each adapter in use.
_MAX_RANKS = 64

_Key = TypeVar("_Key", bound=Hashable)
_Kept = TypeVar("_Kept")


class Group:
    """Instances that have a model in common.

    Attributes:
        members: Their latest views.
        open: Those that take requests.
        without_adapters: Those that can hold no adapter.
    """

    __slots__ = (
        "_adapting",
        "_all",
        "_heaps",
        "_ids",
        "_orders",
        "_sorted",
        "_sums",
        "members",
        "open",
        "without_adapters",
    )

    def __init__(self) -> None:
        self.members: dict[InstanceId, InstanceView] = {}
        self.open: set[InstanceId] = set()
        self.without_adapters: set[InstanceId] = set()
        self._adapting: Group | None = None
        self._sorted = True
        self._all: tuple[InstanceView, ...] | None = None
        self._ids: frozenset[InstanceId] | None = None
        self._heaps: dict[Rank, _Heap] = {}
        self._orders: dict[Rank, _Order] = {}
        self._sums: dict[Count, _Sum] = {}

    def put(self, view: InstanceView) -> None:
        """Take an instance in, or note how it is now."""
        if view.id not in self.members:
            self._sorted, self._ids = False, None
        self.members[view.id] = view
        self._all = None
        (self.open.add if view.open else self.open.discard)(view.id)
        for kept in self._kept():
            kept.changed[view.id] = None
        if not view.max_adapters or self.without_adapters:
            self._sort_by_adapters(view)

    def _sort_by_adapters(self, view: InstanceView) -> None:
        (self.without_adapters.discard if view.max_adapters else self.without_adapters.add)(view.id)
        if not self.without_adapters:
            self._adapting = None
        if self._adapting is None:
            return
        if view.max_adapters:
            self._adapting.put(view)
        elif view.id in self._adapting.members:
            self._adapting.remove(view.id)

    def remove(self, instance: InstanceId) -> None:
        """Forget a member."""
        del self.members[instance]
        self.open.discard(instance)
        self.without_adapters.discard(instance)
        self._all = self._ids = None
        for kept in self._kept():
            kept.remove(instance)
        if self._adapting is not None and instance in self._adapting.members:
            self._adapting.remove(instance)

    def adapting(self) -> Group:
        """Return those that can hold adapters."""
        if not self.without_adapters:
            return self
        if self._adapting is None:
            self._adapting = Group()
            for view in self.members.values():
                if view.max_adapters:
                    self._adapting.put(view)
        return self._adapting

    def all(self, places: dict[InstanceId, int]) -> tuple[InstanceView, ...]:
        """Return the members in the order of their places."""
        if not self._sorted:
            self.members = {key: self.members[key] for key in sorted(self.members, key=places.__getitem__)}
            self._sorted = True
        if self._all is None:
            self._all = tuple(self.members.values())
        return self._all

    def ids(self) -> frozenset[InstanceId]:
        """Return their ids; the same object until one comes or goes."""
        if self._ids is None:
            self._ids = frozenset(self.members)
        return self._ids

    def heap(self, rank: Rank) -> _Heap:
        """Return the members in a heap by a rank."""
        return _kept(self._heaps, rank, _Heap, self.members)

    def order(self, rank: Rank) -> _Order:
        """Return the members sorted by a rank."""
        return _kept(self._orders, rank, _Order, self.members)

    def sum(self, count: Count) -> _Sum:
        """Return the sum of a number of the members."""
        return _kept(self._sums, count, _Sum, self.members)

    def _kept(self) -> Iterable[_Heap | _Order | _Sum]:
        return chain(self._heaps.values(), self._orders.values(), self._sums.values())


def _kept(
    kept: dict[_Key, _Kept],
    key: _Key,
    make: Callable[[Iterable[InstanceId]], _Kept],
    members: Iterable[InstanceId],
) -> _Kept:
    """Return what is kept for a key, made anew if need be; the one that was asked for last is last."""
    found = kept.pop(key, None)
    if found is None:
        if len(kept) >= _MAX_RANKS:
            del kept[next(iter(kept))]
        found = make(members)
    kept[key] = found
    return found


class _Heap:
    """A group's members in a heap by one rank; entries that a change has made stale stay until met."""

    __slots__ = ("_heap", "_keys", "_numbers", "changed")

    def __init__(self, members: Iterable[InstanceId]) -> None:
        self.changed = dict.fromkeys(members)
        self._keys: dict[InstanceId, Any] = {}
        self._heap: list[tuple[Any, int, InstanceId]] = []
        self._numbers = itertools.count()

    def remove(self, instance: InstanceId) -> None:
        self.changed.pop(instance, None)
        self._keys.pop(instance, None)

    def first(self, rank: Rank, members: dict[InstanceId, InstanceView]) -> InstanceView | None:
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

    def remove(self, instance: InstanceId) -> None:
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


class _Sum:
    """The sum of a number of a group's members."""

    __slots__ = ("_numbers", "_sum", "changed")

    def __init__(self, members: Iterable[InstanceId]) -> None:
        self.changed = dict.fromkeys(members)
        self._numbers: dict[InstanceId, int] = {}
        self._sum = 0

    def remove(self, instance: InstanceId) -> None:
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
