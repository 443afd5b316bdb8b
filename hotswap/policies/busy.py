"""Which instance would be empty soonest, without looking at every request of a fleet."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from heapq import heapify, heappop, heapreplace

from hotswap.policies.allocation import used_s
from hotswap.view import FleetView, InstanceId, InstanceState, InstanceView, RunningView

__all__ = ["Departures", "harm", "preference"]


class Departures:
    """Busy instances, the one that its requests have left soonest first; of equal ones the least `harm`.

    The order is worked out as far as it is read, since of thousands a few are wanted. One request of an
    instance leaves no later than all of them. So one of each is looked at to begin with, and the others only
    where that puts an instance in front.

    Args:
        fleet: The view that is planned for.
        instances: Those of its instances that are to be put in order.
        leave_s: The seconds until requests have left an instance, never less for more of them.
    """

    def __init__(
        self,
        fleet: FleetView,
        instances: Iterable[InstanceView],
        leave_s: Callable[[Sequence[RunningView]], float],
    ) -> None:
        self._fleet, self._leave_s = fleet, leave_s
        self._in_order: list[InstanceView] = []
        # At least how many seconds; then, once all are looked at, true, the harm; and who it is.
        self._rest: list[tuple[float, bool, int, InstanceId]] = []
        for instance in instances:
            one = fleet.running_on(instance.id)[:1]
            self._rest.append((leave_s(one), False, 0, instance.id))
        heapify(self._rest)

    def __iter__(self) -> Iterator[InstanceView]:
        at = 0
        while at < len(self._in_order) or self._read_on():
            yield self._in_order[at]
            at += 1

    def _read_on(self) -> bool:
        """Put those in order that come next, equal ones together; return whether there are any."""
        while self._rest and not self._rest[0][1]:
            instance = self._fleet.instance(self._rest[0][3])
            seconds = self._leave_s(self._fleet.running_on(instance.id))
            heapreplace(self._rest, (seconds, True, harm(instance), instance.id))
        if not self._rest:
            return False
        first = self._rest[0][:3]
        equals: list[InstanceView] = []
        while self._rest and self._rest[0][:3] == first:
            equals.append(self._fleet.instance(heappop(self._rest)[3]))
        self._in_order += sorted(equals, key=preference)
        return True


def harm(instance: InstanceView) -> int:
    """Return how many lose by a turn, between equal times: nobody, or who uses the model now, or did."""
    return 0 if instance.state is InstanceState.EMPTY else 1 + instance.num_requests


def preference(instance: InstanceView) -> tuple[float, int, InstanceId]:
    """Return a key that puts EMPTY ones first, small ones before large; then those used longest ago."""
    return used_s(instance), instance.memory_bytes, instance.id
