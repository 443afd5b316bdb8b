"""Explores all reachable states of a transition system, and reports the steps to the first bad one."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass
from typing import Generic, NamedTuple, Protocol, TypeVar

__all__ = ["PROGRESS", "Found", "Step", "System", "explore"]

S = TypeVar("S", bound=Hashable)

PROGRESS = "progress: left alone, it comes to its end"


class Step(NamedTuple, Generic[S]):
    """A possible transition.

    Attributes:
        label: In words.
        own: Whether the system does it by itself, sooner or later; the rest may happen or not.
        state: What is then.
    """

    label: str
    own: bool
    state: S


class System(Protocol[S]):
    """A transition system that can be explored."""

    def initial(self) -> S:
        """Return the initial state."""
        ...

    def successors(self, state: S) -> Iterable[Step[S]]:
        """Return all possible transitions."""
        ...

    def may_end(self, state: S) -> bool:
        """Whether the state is a valid end, if the system has no step of its own in it."""
        ...

    def broken(self, state: S, *, is_end: bool) -> str | None:
        """Return the invariant that does not hold, if there is one."""
        ...


@dataclass(frozen=True, slots=True)
class Found:
    """The result of an exploration.

    Attributes:
        num_states: How many were looked at.
        num_ends: How many of them were ends.
        labels: All that happened anywhere.
        broken: The invariant that does not always hold, if there is one.
        trace: The fewest steps that break it.
    """

    num_states: int
    num_ends: int
    labels: frozenset[str] = frozenset()
    broken: str | None = None
    trace: tuple[str, ...] = ()

    def __str__(self) -> str:
        if self.broken is None:
            return f"{self.num_states:,} states, {self.num_ends:,} of them ends: every invariant holds."
        steps = "".join(f"\n  {number:2}. {label}" for number, label in enumerate(self.trace, start=1))
        return f"{self.broken!r} does not hold after{steps}"


def explore(system: System[S]) -> Found:
    """Visit all states until an invariant breaks.

    The last invariant needs them all: from every state an end can be reached by the system's own steps.
    """
    seen = _Seen(system.initial())
    for number, state in seen.unvisited():
        steps = list(system.successors(state))
        is_end = system.may_end(state) and not any(step.own for step in steps)
        if (broken := system.broken(state, is_end=is_end)) is not None:
            return seen.found(broken, number)
        if is_end:
            seen.ends.append(number)
            continue
        for step in steps:
            seen.add(number, step)
    cut_off = seen.cut_off()
    return seen.found() if cut_off is None else seen.found(PROGRESS, cut_off)


class _Seen(Generic[S]):
    """The states found so far, numbered in order of discovery, and the steps between them."""

    def __init__(self, first: S) -> None:
        self.ends: list[int] = []
        self._numbers: dict[S, int] = {first: 0}
        self._queue = deque([first])
        self._came: list[tuple[int, str]] = [(0, "")]
        self._before: list[list[int]] = [[]]  # by steps of the system's own
        self._labels: set[str] = set()

    def unvisited(self) -> Iterator[tuple[int, S]]:
        """Yield each state once, in breadth-first order."""
        number = 0
        while self._queue:
            yield number, self._queue.popleft()
            number += 1

    def add(self, origin: int, step: Step[S]) -> None:
        """Add a step and its successor."""
        label, own, state = step
        number = self._numbers.setdefault(state, len(self._came))
        if number == len(self._came):
            self._queue.append(state)
            self._came.append((origin, label))
            self._before.append([])
        if own:
            self._before[number].append(origin)
        self._labels.add(label)

    def cut_off(self) -> int | None:
        """Return the first state from which no end can be reached."""
        reaching, stack = set(self.ends), list(self.ends)
        while stack:
            for number in self._before[stack.pop()]:
                if number not in reaching:
                    reaching.add(number)
                    stack.append(number)
        return next((number for number in range(len(self._came)) if number not in reaching), None)

    def found(self, broken: str | None = None, number: int = 0) -> Found:
        """Return the result, with a broken invariant in a state."""
        trace: list[str] = []
        while number:
            number, label = self._came[number]
            trace.append(label)
        return Found(len(self._came), len(self.ends), frozenset(self._labels), broken, tuple(reversed(trace)))
