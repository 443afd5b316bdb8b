"""Instances that have a model in common, in the orders that routers have asked for."""

from __future__ import annotations

import bisect
import heapq
import itertools
from collections.abc import Container, Iterable, Iterator
from typing import Any, TypeVar

from hotswap.request import ModelId
from hotswap.view import Count, CountRank, InstanceId, InstanceView, Rank

__all__ = ["Group"]

# Ranks and counts that a group keeps; routers have one each, and one for each adapter in use.
_MAX_KEPT = 64

_K = TypeVar("_K", bound="_Kept")


class Group:
    """Instances that have a model in common.

    Attributes:
        model: The model; `None` of those that host none.
        members: Their latest views.
        counts_changed: Those whose view lacks a change of what the fleet counts.
        load_changed: Those whose view lacks a change of the load that their engine tells.
        open: Those that take requests.
        without_adapters: Those that can hold no adapter.
    """

    def __init__(self, model: ModelId | None) -> None:
        self.model = model
        self.members: dict[InstanceId, InstanceView] = {}
        self.counts_changed: set[InstanceId] = set()
        self.load_changed: set[InstanceId] = set()
        self.open: set[InstanceId] = set()
        self.without_adapters: set[InstanceId] = set()
        self._adapting: Group | None = None
        self._sorted = True
        self._all: tuple[InstanceView, ...] | None = None
        self._ids: frozenset[InstanceId] | None = None
        self._kept: dict[Any, Any] = {}

    def put(self, view: InstanceView) -> None:
        """Take an instance in, or note how it is now."""
        instance = view.id
        if instance not in self.members:
            self._sorted, self._ids = False, None
        self.members[instance] = view
        self._all = None
        (self.open.add if view.open else self.open.discard)(instance)
        for kept in self._kept.values():
            kept.changed[instance] = None
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

    def note_load(self, instance: InstanceId) -> None:
        """Note that the load of a member has changed, so that it may rank otherwise."""
        self.load_changed.add(instance)
        for kept in self._kept.values():
            kept.changed[instance] = None
        if self._adapting is not None and instance in self._adapting.members:
            self._adapting.note_load(instance)

    def remove(self, instance: InstanceId) -> None:
        """Forget a member."""
        del self.members[instance]
        self.open.discard(instance)
        self.without_adapters.discard(instance)
        self._all = self._ids = None
        for kept in self._kept.values():
            kept.remove(instance)
        if self._adapting is not None and instance in self._adapting.members:
            self._adapting.remove(instance)

    def adapting(self) -> Group:
        """Return those that can hold adapters."""
        if not self.without_adapters:
            return self
        if self._adapting is None:
            self._adapting = Group(self.model)
            self._adapting.counts_changed, self._adapting.load_changed = (
                self.counts_changed,
                self.load_changed,
            )
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
        return self._keep(_Heap, rank)

    def order(self, rank: Rank) -> _Order:
        """Return the members sorted by a rank."""
        return self._keep(_Order, rank)

    def sum(self, count: Count) -> _Sum:
        """Return the sum of a number of the members."""
        return self._keep(_Sum, count)

    def _keep(self, kind: type[_K], rank: Any) -> _K:
        """Return what is kept for a rank, made anew if need be; the one that was asked for last is last."""
        key = kind, rank
        found: _K | None = self._kept.pop(key, None)
        if found is None:
            if len(self._kept) >= _MAX_KEPT:
                del self._kept[next(iter(self._kept))]
            found = kind(rank, self.members)
        self._kept[key] = found
        return found


class _Kept:
    """What is kept of a group's members for one rank or count; `changed` are to be ranked again."""

    def __init__(self, rank: Any, members: Iterable[InstanceId]) -> None:
        self.changed = dict.fromkeys(members)
        self._rank = rank
        self._keys: dict[InstanceId, Any] = {}

    def remove(self, instance: InstanceId) -> None:
        self.changed.pop(instance, None)
        self._take_out(instance)

    def _take_out(self, instance: InstanceId) -> None:
        self._keys.pop(instance, None)


class _Heap(_Kept):
    """A group's members in a heap by one rank; entries that a change has made stale stay until met.

    For a `CountRank` the keys are `(count, whether the load is known, load)`: a member whose load has changed
    stands before all others of its count until it has been looked at.
    """

    def __init__(self, rank: Rank, members: Iterable[InstanceId]) -> None:
        super().__init__(rank, members)
        self.by_count = rank if isinstance(rank, CountRank) else None
        self._heap: list[tuple[Any, int, InstanceId]] = []
        self._numbers = itertools.count()

    def first(self, group: Group, looked_at: Container[InstanceId] = ()) -> InstanceView | None:
        """Return the first member; the load of one that has been looked at counts as known."""
        keys, heap, members = self._keys, self._heap, group.members
        if len(self.changed) + len(heap) > 4 * len(members) + 64:
            heap.clear()
            keys.clear()
            self.changed = dict.fromkeys(members)
        if self.changed:
            self._rank_changed(group, looked_at)
        while heap:
            key, _, instance = heap[0]
            if keys.get(instance) is key:
                return members[instance]
            heapq.heappop(heap)
        return None

    def _rank_changed(self, group: Group, looked_at: Container[InstanceId]) -> None:
        by_count, keys, members, unknown = self.by_count, self._keys, group.members, group.load_changed
        for instance in self.changed:
            view = members[instance]
            key = self._rank(view) if by_count is None else by_count.count(view)
            if key is None:
                keys.pop(instance, None)
                continue
            if by_count is not None:
                known = instance not in unknown or instance in looked_at
                key = key, known, by_count.load(view) if known else None
            if key != keys.get(instance):
                keys[instance] = key
                heapq.heappush(self._heap, (key, next(self._numbers), instance))
        self.changed.clear()


class _Order(_Kept):
    """A group's members in the order of one rank."""

    def __init__(self, rank: Rank, members: Iterable[InstanceId]) -> None:
        super().__init__(rank, members)
        self._sorted: list[tuple[Any, InstanceId]] = []

    def ranked(self, members: dict[InstanceId, InstanceView]) -> Iterator[InstanceView]:
        rank = self._rank
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


class _Sum(_Kept):
    """The sum of a number of a group's members."""

    _sum = 0

    def total(self, members: dict[InstanceId, InstanceView]) -> tuple[int, int]:
        for instance in self.changed:
            self._take_out(instance)
            if (number := self._rank(members[instance])) is not None:
                self._keys[instance] = number
                self._sum += number
        self.changed.clear()
        return len(self._keys), self._sum

    def _take_out(self, instance: InstanceId) -> None:
        self._sum -= self._keys.pop(instance, 0)
