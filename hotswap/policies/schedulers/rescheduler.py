"""Llumnix's rescheduling: requests move from where memory runs out to where there is most."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from math import isfinite

from hotswap.action import Action, Migrate, MigrationWay
from hotswap.errors import ConfigError
from hotswap.policies.freeness import Freeness, is_terminating
from hotswap.request import ModelId
from hotswap.scheduler import Scheduler
from hotswap.view import FleetView, InstanceState, InstanceView, RunningView

__all__ = ["VirtualUsageRescheduler", "arrived", "left"]


@dataclass(frozen=True, slots=True)
class VirtualUsageRescheduler(Scheduler):
    """Moves a request from each instance that is too little free to one that is free enough.

    Source: Sun et al., Llumnix, OSDI 2024, section 4.4.3. Among the instances of a model, those with a
    freeness (see `Freeness`) below `low` are sources, those above `high` are destinations; the least free
    source is paired with the freest destination, the next with the next, and each pair moves one request.
    Queues are dissolved, memory is gathered for long prompts, room is made round requests of high priority
    and instances are emptied, all by the virtual usages that freeness is made of: an instance that
    terminates (drained, unloaded or swapped away) is always a source and never a destination, so its
    requests leave by the same moves as others.

    **Readings**, by that of `freeness`.

    - `"paper"`: of a source the request of the lowest priority moves, of these the shortest.
    - `"artifact"`: the one that came last, of those of normal priority. A source is also an instance where a
      request was preempted and waits, whatever its freeness. Nobody moves to where one waits. There is one
      threshold, 3, and 10 for its mixes M-M and S-L.

    In both, an instance takes part in one move at a time, and only requests that run move, none that wait;
    but from an instance that terminates any. How often is the fleet's `interval_s`; in the artifact it is
    every fourth report of an instance, one a step.

    **Ours, in neither:**

    - An instance that takes part in a move, or has no request to move, is left out before pairs are made, so
      that nobody is paired in vain.
    - The request must fit in the destination's free blocks, less what waits there and is kept free. If the
      first in order does not, the next is looked at.
    - `guard` forbids a move after which the destination would be no better off than the source was: no freer,
      or lacking no fewer blocks where both lack some. It would only move the pain, and be undone. Every
      place is better than one that terminates. Turn it off to repeat the artifact, which has no such rule.
    - What has no KV blocks, as it has not begun or was preempted, leaves a terminating instance as tokens.
    - `way` says how others go. Left open, the fleet decides, and sends as tokens what finds no room for its
      blocks; in the artifact, which knows no other way, `"kv"`, such a request stays.

    Ties go to the smaller id.
    """

    freeness: Freeness = field(default=Freeness())
    _: KW_ONLY
    low: float = 3.0
    high: float = 3.0
    guard: bool = True
    way: MigrationWay | None = None

    def __post_init__(self) -> None:
        if not (isfinite(self.low) and isfinite(self.high) and self.low <= self.high):
            raise ConfigError(
                f"low is {self.low!r} and high is {self.high!r}; give finite KV blocks per request, and "
                "low at most high, or an instance could be source and destination."
            )

    def plan(self, fleet: FleetView) -> Sequence[Action]:
        members: dict[ModelId, list[InstanceView]] = {}
        for instance in fleet.instances:
            if instance.model is not None and instance.state in _HOLDING:
                members.setdefault(instance.model, []).append(instance)
        return tuple(move for model in sorted(members) for move in self._moves(members[model], fleet))

    def _moves(self, members: Sequence[InstanceView], fleet: FleetView) -> Iterator[Migrate]:
        sources: list[tuple[float, InstanceView, list[RunningView]]] = []
        destinations: list[tuple[float, InstanceView]] = []
        for instance in members:
            if instance.num_moves:
                continue
            free = self.freeness.of(instance)
            if free < self.low or (instance.preempted and self.freeness.reading == "artifact"):
                here = fleet.running_on(instance.id)
                if not any(request.moving for request in here):
                    sources.append((free, instance, self._in_order(instance, here)))
            elif free > self.high and instance.open and self._takes(instance):
                destinations.append((free, instance))
        sources = [source for source in sources if source[2]]
        sources.sort(key=lambda entry: (entry[0], entry[1].id))
        destinations.sort(key=lambda entry: (-entry[0], entry[1].id))
        for (_, source, movable), (_, destination) in zip(sources, destinations, strict=False):
            yield from self._move(source, movable, destination)

    def _move(
        self, source: InstanceView, movable: Sequence[RunningView], destination: InstanceView
    ) -> Iterator[Migrate]:
        before = self._standing(source)
        for request in movable:
            if not self._fits(request, source, destination):
                continue
            after = arrived(destination, request)
            if not self.guard or self._standing(after) > before:
                ends = (source, destination)
                reason = ", ".join(f"F({end.id})={self.freeness.of(end):.3g}" for end in ends)
                way = self.way if _has_blocks(request, source) else "tokens"
                yield Migrate(request=request.id, destination=destination.id, way=way, reason=reason)
                return

    def _standing(self, instance: InstanceView) -> float:
        """How well off an instance is: its freeness, or in debt the blocks that it lacks, below 0."""
        free = self.freeness.of(instance)
        return free if free >= 0 else free * max(self.freeness.batch(instance), 1)

    def _in_order(self, instance: InstanceView, here: Sequence[RunningView]) -> list[RunningView]:
        """The requests that may move, the one that should first."""
        terminating = is_terminating(instance)
        movable = [request for request in here if terminating or _has_blocks(request, instance)]
        if self.freeness.reading == "paper":
            return sorted(movable, key=lambda r: (r.priority, r.num_tokens, r.id))
        normal = [request for request in movable if request.priority <= 0 or terminating]
        return sorted(normal, key=lambda r: (-r.arrived_s, r.id))

    def _takes(self, instance: InstanceView) -> bool:
        return self.freeness.reading == "paper" or not instance.num_waiting

    def _fits(self, request: RunningView, source: InstanceView, destination: InstanceView) -> bool:
        """Whether a destination has blocks for a request now, and could hold it to its end as the source."""
        kept = destination.num_next_kv_blocks + self.freeness.reserve(destination)
        if _num_blocks(request, destination) > destination.num_free_kv_blocks - kept:
            return False
        most, ours = source.max_tokens, destination.max_tokens
        if most is None or ours is None or ours >= most:
            return True
        return request.num_tokens + request.num_remaining <= ours


def arrived(instance: InstanceView, request: RunningView) -> InstanceView:
    """Return an instance as it would be with one more request."""
    return _changed(instance, request, 1)


def left(instance: InstanceView, request: RunningView) -> InstanceView:
    """Return an instance as it would be without one of its requests that runs."""
    return _changed(instance, request, -1)


_HOLDING = (InstanceState.SERVING, InstanceState.DRAINING)


def _changed(instance: InstanceView, request: RunningView, sign: int) -> InstanceView:
    return replace(
        instance,
        num_requests=instance.num_requests + sign,
        num_running=instance.num_running + sign,
        num_high_priority=instance.num_high_priority + sign * (request.priority > 0),
        num_free_kv_blocks=instance.num_free_kv_blocks - sign * _num_blocks(request, instance),
    )


def _has_blocks(request: RunningView, instance: InstanceView) -> bool:
    """Whether there is something of a request to be moved but its tokens."""
    return request.begun and request.id not in instance.preempted


def _num_blocks(request: RunningView, instance: InstanceView) -> int:
    """KV blocks for what a request has and its next token."""
    return -(-(request.num_tokens + 1) // instance.kv_block_tokens)
