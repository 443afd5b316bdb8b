"""Which requests decode together, by what is read for them.

Requests of a group are read as wide as its longest: a group costs something fixed, and for each of its
members its width. Which groups are best is not found anew in each step, since whoever changes groups is
gathered again. Who comes goes where least more is read; and one change is made after the other, of those that
are soon paid back, as long as there are any: some leave a group for one of their own, or join another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import attrgetter
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

__all__ = ["Group", "Grouping", "Member", "Move"]

# What it costs to move a request, in what is read for it in a step, and steps in which that is to come back:
# estimates.
_MOVE, _STEPS = 4, 16


class Member(Protocol):
    """A request.

    Attributes:
        need: Its blocks.
        settled: Whether it was gathered for the group that it is in.
    """

    @property
    def need(self) -> int: ...
    @property
    def settled(self) -> bool: ...


M = TypeVar("M", bound=Member)


class Group(Generic[M]):
    """Requests that decode together.

    Attributes:
        members: These, in any order.
        capacity: Blocks that are read of each at least.
    """

    def __init__(self) -> None:
        self.members: list[M] = []
        self.capacity = 0

    @property
    def longest(self) -> int:
        """Blocks of the longest."""
        return max((member.need for member in self.members), default=0)

    @property
    def width(self) -> int:
        """Blocks that are read of each."""
        return max(self.capacity, self.longest)


G = TypeVar("G", bound=Group[Any])


class _Size(NamedTuple):
    """What a group has and costs, in blocks."""

    num: int
    longest: int
    width: int
    cost: float

    @classmethod
    def of(cls, group: Group[Any]) -> _Size:
        longest = group.longest
        width = max(longest, group.capacity)
        return cls(len(group.members), longest, width, sum(map(_cost, group.members)))


@dataclass(frozen=True, slots=True)
class Move(Generic[G]):
    """Some members of a group are to change to another; `target` is `None` for a new one."""

    members: Sequence[Any]
    source: G
    target: G | None


@dataclass(frozen=True, slots=True)
class Grouping:
    """What groups cost, in blocks that are read of one request.

    Attributes:
        fixed: What each costs beside what is read.
        most: Blocks that a group may take, where it has more than one member.
        opened: The width of a new group whose longest member has so many blocks.
    """

    fixed: float
    most: int
    opened: Callable[[int], int]

    def place(self, member: Member, groups: Iterable[G]) -> G | None:
        """Return the group where least more is read for a newcomer; `None` if that is one of its own."""
        best: G | None = None
        least = self.fixed + self.opened(member.need)
        for group in groups:
            count, before = len(group.members), group.width
            width = before if member.need <= before else self.opened(member.need)
            more = (count + 1) * width - count * before
            if more < least and (count + 1) * width <= self.most:
                best, least = group, more
        return best

    def change(self, groups: Sequence[G]) -> Move[G] | None:
        """Return the change that saves most, of those that are soon paid back."""
        moves = [self._split(group) for group in groups]
        sizes = [_Size.of(group) for group in groups]
        for source, it in zip(groups, sizes, strict=True):
            for target, other in zip(groups, sizes, strict=True):
                if source is not target and (saved := self._saved_by_merge(it, other)) > 0:
                    moves.append((saved, Move(source.members, source, target)))
        nothing: tuple[float, Move[G] | None] = 0.0, None
        saved, move = max(moves, key=_saved, default=nothing)
        return move if saved > 0 else None

    def _split(self, group: G) -> tuple[float, Move[G] | None]:
        """The best that the shorter, or the longer ones of a group can do in one of their own."""
        members = sorted(group.members, key=attrgetter("need"))
        count, width = len(members), group.width
        crowded = count > 1 and count * width > self.most
        if crowded:  # it has grown beyond what may be read at once
            return float("inf"), Move(members[: count // 2], group, None)
        best: tuple[float, Move[G] | None] = 0.0, None
        costs = [0.0, *accumulate(map(_cost, members))]
        for at in range(1, count + 1):
            rest = count - at
            short = at * (width - self.opened(members[at - 1].need)) - (self.fixed if rest else 0)
            found = short - costs[at] - self._doubt, Move(members[:at], group, None)
            best = max(best, found, key=_saved)
            if rest and not group.capacity:  # then it is only the shorter ones that are left
                long = at * (width - members[at - 1].need) - self.fixed
                found = long - (costs[-1] - costs[at]) - self._doubt, Move(members[at:], group, None)
                best = max(best, found, key=_saved)
        return best

    def _saved_by_merge(self, source: _Size, target: _Size) -> float:
        """What it saves if all of a group join another."""
        count = source.num + target.num
        width = target.width if source.longest <= target.width else self.opened(source.longest)
        if count * width > self.most:
            return 0.0
        apart = self.fixed + source.num * source.width + target.num * target.width
        return apart - count * width - source.cost - self._doubt

    @property
    def _doubt(self) -> float:
        """What a change must save at least, so that none is soon taken back."""
        return self.fixed / 4


def _saved(found: tuple[float, object]) -> float:
    return found[0]


def _cost(member: Member) -> float:
    """What it costs to move one that is settled."""
    return member.need * _MOVE / _STEPS if member.settled else 0.0
