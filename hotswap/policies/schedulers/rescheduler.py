"""Llumnix's rescheduling: requests move from instances of low freeness to instances of high freeness."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from math import isfinite

from hotswap.action import Action, Migrate, MigrationMethod
from hotswap.argument_kinds import check_arguments
from hotswap.errors import ConfigError
from hotswap.policies.freeness import Freeness, is_terminating
from hotswap.request import ModelId
from hotswap.scheduler import Scheduler
from hotswap.view import FleetView, InstanceState, InstanceView, RunningView

__all__ = ["VirtualUsageRescheduler", "arrived", "left"]


@check_arguments
@dataclass(frozen=True, slots=True)
class VirtualUsageRescheduler(Scheduler):
    """Moves one request from each instance of low freeness to one of the same model with high freeness.

    Source: Sun et al., Llumnix, OSDI 2024, section 4.4.3. Among the instances of a model, those with a
    freeness (see `Freeness`) below `low` are sources, those above `high` are destinations; the least free
    source is paired with the freest destination, the next with the next, and each pair moves one request.
    Virtual usage lets this one rule shorten queues, gather memory for long prompts, give headroom to requests
    of high priority and empty instances: an instance that terminates (drained, unloaded or swapped away) is
    always a source and never a destination, so its requests leave by the same moves as others.

    **Readings**, by that of `freeness`.

    - `"paper"`: the request of the lowest priority moves, and of these the shortest.
    - `"artifact"`: the latest request of normal priority moves. An instance where a preempted request waits
      is a source too, whatever its freeness. An instance with a waiting request is no destination. There is
      one threshold, 3, and 10 for its mixes M-M and S-L.

    In both, an instance takes part in one move at a time, and only running requests move; any request may
    leave an instance that terminates. The fleet's `interval_s` is how often moves are planned; in the
    artifact it is every fourth report of an instance, with one report a step.

    **Ours, in neither:**

    - An instance that takes part in a move, or has no request to move, is left out before pairs are made.
    - The request must fit in the destination's free blocks, less those that its head of the queue needs and
      those that are kept free. If the first request in order does not fit, the next one is tried.
    - `guard` forbids a move after which the destination would be no better off than the source was: no freer,
      or lacking no fewer blocks if both lack some. Such a move would only shift the problem, and be undone.
      Every instance is better off than one that terminates. Turn the guard off to repeat the artifact, which
      has no such rule.
    - A request without KV blocks, not yet begun or preempted, leaves a terminating instance as tokens.
    - `method` applies to the other moves. With `None` the fleet decides, and sends a request as tokens if
      the destination has no room for its blocks. With `"kv"`, the artifact's only method, such a request
      stays.

    Ties go to the smaller id.
    """

    freeness: Freeness = field(default=Freeness())
    _: KW_ONLY
    low: float = 3.0
    high: float = 3.0
    guard: bool = True
    method: MigrationMethod | None = None

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
        before = self._rank(source)
        for request in movable:
            if not self._fits(request, source, destination):
                continue
            after = arrived(destination, request)
            if not self.guard or self._rank(after) > before:
                ends = (source, destination)
                reason = ", ".join(f"F({end.id})={self.freeness.of(end):.3g}" for end in ends)
                method = self.method if _has_blocks(request, source) else "tokens"
                yield Migrate(request=request.id, destination=destination.id, method=method, reason=reason)
                return

    def _rank(self, instance: InstanceView) -> float:
        """The freeness of an instance, or if it lacks blocks, minus the number of blocks that it lacks."""
        free = self.freeness.of(instance)
        return free if free >= 0 else free * max(self.freeness.batch(instance), 1)

    def _in_order(self, instance: InstanceView, here: Sequence[RunningView]) -> list[RunningView]:
        """The requests that may move, the best first."""
        terminating = is_terminating(instance)
        movable = [request for request in here if terminating or _has_blocks(request, instance)]
        if self.freeness.reading == "paper":
            return sorted(movable, key=lambda r: (r.priority, r.num_tokens, r.id))
        normal = [request for request in movable if request.priority <= 0 or terminating]
        return sorted(normal, key=lambda r: (-r.arrived_s, r.id))

    def _takes(self, instance: InstanceView) -> bool:
        return self.freeness.reading == "paper" or not instance.num_waiting

    def _fits(self, request: RunningView, source: InstanceView, destination: InstanceView) -> bool:
        """Whether a destination has blocks for a request now, and can hold it as long as the source can."""
        kept = destination.num_next_kv_blocks + self.freeness.reserve(destination)
        if _num_blocks(request, destination) > destination.num_free_kv_blocks - kept:
            return False
        here, there = source.max_tokens, destination.max_tokens
        if here is None or there is None or there >= here:
            return True
        return request.num_tokens + request.num_remaining <= there


def arrived(instance: InstanceView, request: RunningView) -> InstanceView:
    """Return an instance as it would be with one more request."""
    return _changed(instance, request, 1)


def left(instance: InstanceView, request: RunningView) -> InstanceView:
    """Return an instance as it would be without one of its running requests."""
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
    """Whether a request holds KV blocks that could be moved."""
    return request.begun and request.id not in instance.preempted


def _num_blocks(request: RunningView, instance: InstanceView) -> int:
    """The KV blocks for the tokens of a request and its next one."""
    return -(-(request.num_tokens + 1) // instance.kv_block_tokens)
