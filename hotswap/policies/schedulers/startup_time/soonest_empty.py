"""Busy instances in the order in which they would be empty, without a look at every request of a fleet."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from heapq import heapify, heappop, heapreplace

from hotswap.policies.schedulers.instances import used_s
from hotswap.view import FleetView, InstanceId, InstanceState, InstanceView, RunningView

__all__ = ["SoonestEmpty", "disruption", "lru_key"]


class SoonestEmpty:
    """Busy instances, the one that would be empty first in front; ties go to the least `disruption`.

    The order is worked out lazily, since a plan wants few of thousands. One request of an instance leaves no
    later than all of its requests. So only one request of each instance is read at first, and the others only
    when that request puts the instance in front.

    Args:
        fleet: The view that is planned for.
        instances: The busy instances of the view that are to be ordered.
        leave_s: The seconds until the given requests have left an instance, never less for more requests.
    """

    def __init__(
        self,
        fleet: FleetView,
        instances: Iterable[InstanceView],
        leave_s: Callable[[Sequence[RunningView]], float],
    ) -> None:
        self._fleet, self._leave_s = fleet, leave_s
        self._in_order: list[InstanceView] = []
        # (at least so many seconds, False, 0, id); with all requests read, (seconds, True, disruption, id).
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
        """Append the next instances to the order, equal ones together; return whether there were any."""
        while self._rest and not self._rest[0][1]:
            instance = self._fleet.instance(self._rest[0][3])
            seconds = self._leave_s(self._fleet.running_on(instance.id))
            heapreplace(self._rest, (seconds, True, disruption(instance), instance.id))
        if not self._rest:
            return False
        first = self._rest[0][:3]
        equals: list[InstanceView] = []
        while self._rest and self._rest[0][:3] == first:
            equals.append(self._fleet.instance(heappop(self._rest)[3]))
        self._in_order += sorted(equals, key=lru_key)
        return True


def disruption(instance: InstanceView) -> int:
    """Return how much a swap of the instance disrupts: 0 if it is EMPTY, else 1 and 1 for each request."""
    return 0 if instance.state is InstanceState.EMPTY else 1 + instance.num_requests


def lru_key(instance: InstanceView) -> tuple[float, int, InstanceId]:
    """Return a sort key: EMPTY instances first, small before large; then the least recently used."""
    return used_s(instance), instance.memory_bytes, instance.id
