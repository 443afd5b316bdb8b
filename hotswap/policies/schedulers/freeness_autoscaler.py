"""Llumnix's auto-scaling: instances are added and removed by the average freeness."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field
from math import ceil, inf, isfinite

from hotswap.action import Action, Swap, Unload
from hotswap.argument_kinds import check_arguments
from hotswap.errors import ConfigError
from hotswap.policies.freeness import Freeness, is_terminating
from hotswap.policies.schedulers.allocation import Allocation
from hotswap.scheduler import Scheduler
from hotswap.view import FleetView, InstanceState, InstanceView, ModelView

__all__ = ["FreenessAutoscaler"]


@check_arguments
@dataclass(frozen=True, slots=True)
class FreenessAutoscaler(Scheduler):
    """Adds an EMPTY instance to a model while its average freeness is low, and removes one while it is high.

    Source: Sun et al., Llumnix, OSDI 2024, section 4.4.3. While the average freeness of a model's instances
    (see `Freeness`) is below `low`, the model gets one more. While it is above `high`, the instance with the
    fewest requests terminates. The thresholds are 10 and 60 in the paper, T and T + 50 in the artifact's
    figures. A model keeps between `min_instances`, or its `min_replicas` if that is more, and
    `max_instances`.

    **Up** is a `Swap` of an EMPTY instance, so no request is evicted. The model with the least freeness goes
    first. **Down** is an `Unload` with a deadline of `drain_s`: the instance admits no request, and its
    running ones end there, or are moved by a `VirtualUsageRescheduler`, which treats it as terminating: plan
    with `Chain(FreenessAutoscaler(), VirtualUsageRescheduler())`. It is EMPTY as soon as all have left.

    **Readings.**

    - `"artifact"`, of `freeness`: the average treats all instances as one, with M, V and B each summed. As
      many instances are added at once as bring it to `low`, also while another one terminates. One is removed
      if the average of the others, with all requests, would be above `high`. The rest holds for both
      readings, but for the mean.
    - *Every 10 s*: a policy has no memory and may be asked at any time. So nothing changes while one of the
      model's instances starts or terminates, or until the youngest has served `interval_s`; then one is added
      or removed. None is removed until `interval_s` after any instance became EMPTY.
    - *The average, for normal priority*, is in the paper's reading the mean over the instances that serve and
      stay, as a request of normal priority finds them: headroom counts. `Freeness(target_tokens=None)` leaves
      it out. An instance without a request, whose freeness is infinite, counts as if it had one.

    **Ours, not the paper's:**

    - Requests that are left after `drain_s` are evicted and continue elsewhere, at the cost of one prefill;
      the paper waits for ever. A termination is not undone when load returns, since no action can express it.
    - The fleet's waiting requests are those that no instance takes: while a model has some it may go up,
      whatever its freeness, and not down. With `min_instances=0` a model without load gives up its last
      instance, and its first waiting request brings it a new one.

    **What to set.** `low` matters most: it trades instances for latency, and `high` follows it, 50 above.
    `drain_s` hardly matters beside a rescheduler, which moves requests away sooner. The defaults are the
    paper's.

    Ties go to the smaller id. Of the EMPTY instances the smallest that holds the model is used.
    """

    freeness: Freeness = field(default=Freeness())
    _: KW_ONLY
    low: float = 10.0
    high: float = 60.0
    min_instances: int = 1
    max_instances: int = 16
    interval_s: float = 10.0
    drain_s: float = 60.0

    def __post_init__(self) -> None:
        if not (isfinite(self.low) and isfinite(self.high) and self.low <= self.high):
            raise ConfigError(
                f"low is {self.low!r} and high is {self.high!r}; give finite KV blocks per request, and "
                "low at most high."
            )
        if not 0 <= self.min_instances <= self.max_instances:
            raise ConfigError(
                f"min_instances is {self.min_instances!r} and max_instances is {self.max_instances!r}; give "
                "0 or more, and no lower maximum."
            )
        if not self.interval_s >= 0:
            raise ConfigError(f"interval_s is {self.interval_s!r}; give 0 or more seconds.")
        if not 0 <= self.drain_s < inf:
            raise ConfigError(
                f"drain_s is {self.drain_s!r}; give 0 (evict at once) or more, finite, seconds."
            )

    def plan(self, fleet: FleetView) -> Sequence[Action]:
        allocation = Allocation(fleet)
        groups = [_Group.of(model, fleet, self.freeness) for model in fleet.models]
        urgent = sorted(groups, key=lambda group: (self._missing(group) <= 0, group.average, group.model.id))
        return tuple(action for group in urgent for action in self._scale(group, fleet, allocation))

    def _scale(self, group: _Group, fleet: FleetView, allocation: Allocation) -> Iterator[Action]:
        model, since_s = group.model, fleet.now_s - self.interval_s
        if (missing := self._missing(group)) > 0:
            for _ in range(missing):
                yield from self._up(model, f"{model.id} lacks instances", allocation)
        elif not group.members or group.starting or group.youngest_s > since_s:
            return
        elif model.num_waiting or group.average < self.low:
            if self._is_pooled or not group.terminating:
                for _ in range(min(self._num_more(group), self.max_instances - group.num_replicas)):
                    yield from self._up(model, self._why(group), allocation)
        elif group.terminating:
            return
        elif group.average_less_one > self.high and group.num_replicas > self._least(model):
            emptied_s = [i.swapped_s for i in fleet.instances if i.model is None and i.swapped_s is not None]
            if max(emptied_s, default=-inf) <= since_s:
                yield from self._down(group, allocation)

    @property
    def _is_pooled(self) -> bool:
        return self.freeness.reading == "artifact"

    def _num_more(self, group: _Group) -> int:
        """How many more instances, of as many KV blocks each, bring the average to `low`."""
        blocks = max(instance.num_kv_blocks for instance in group.members)
        if not self._is_pooled or not blocks or not group.batch:
            return 1
        return max(1, ceil((self.low - group.average) * group.batch / blocks))

    def _why(self, group: _Group) -> str:
        model = group.model
        if model.num_waiting:
            return f"{model.num_waiting} requests of {model.id} wait for a replica"
        return f"average F({model.id})={group.average:.3g} < {self.low:g}"

    def _up(self, model: ModelView, reason: str, allocation: Allocation) -> Iterator[Swap]:
        if (instance := allocation.empty(model)) is not None:
            swap = Swap(instance=instance.id, model=model.id, reason=reason)
            allocation.swap(swap)
            yield swap

    def _down(self, group: _Group, allocation: Allocation) -> Iterator[Unload]:
        if free := allocation.free_replicas(group.model):
            idlest = min(free, key=lambda instance: (instance.num_requests, instance.id))
            reason = f"average F({group.model.id})={group.average:.3g} > {self.high:g}"
            yield Unload(instance=idlest.id, deadline_s=self.drain_s, reason=reason)

    def _least(self, model: ModelView) -> int:
        return max(self.min_instances, model.min_replicas)

    def _missing(self, group: _Group) -> int:
        """How many instances a model must get at once, whatever its freeness."""
        unserved = min(group.model.num_waiting, 1, self.max_instances)
        return max(self._least(group.model), unserved) - group.num_replicas


@dataclass(frozen=True, slots=True, kw_only=True)
class _Group:
    """The instances of one model: the number of its replicas, and the `members` that serve it and stay."""

    model: ModelView
    num_replicas: int
    members: Sequence[InstanceView]
    starting: bool
    terminating: bool
    youngest_s: float
    batch: int
    average: float
    average_less_one: float

    @classmethod
    def of(cls, model: ModelView, fleet: FleetView, freeness: Freeness) -> _Group:
        members = [i for i in fleet.instances if i.model == model.id and _stays(i)]
        swapping = [i for i in fleet.instances if i.swapping and i.target != i.model]
        average, less_one = _averages(members, freeness)
        return cls(
            model=model,
            num_replicas=len(fleet.replicas(model.id)),
            members=members,
            starting=any(i.target == model.id for i in swapping),
            terminating=any(i.model == model.id for i in swapping),
            youngest_s=max((s for i in members if (s := i.serving_since_s) is not None), default=-inf),
            batch=sum(freeness.batch(i, dispatch=True) for i in members),
            average=average,
            average_less_one=less_one,
        )


def _stays(instance: InstanceView) -> bool:
    return instance.state is InstanceState.SERVING and not is_terminating(instance)


def _averages(members: Sequence[InstanceView], freeness: Freeness) -> tuple[float, float]:
    """The average freeness of instances, and the average that decides whether one is removed."""
    if not members:
        return -inf, -inf
    if freeness.reading == "paper":
        mean = sum(_finite(instance, freeness) for instance in members) / len(members)
        return mean, mean
    room = sum(instance.num_kv_blocks - freeness.usage(instance).total for instance in members)
    batch = sum(freeness.batch(instance, dispatch=True) for instance in members)
    blocks = max(instance.num_kv_blocks - freeness.reserve(instance) for instance in members)
    if not batch:
        return inf, inf
    waiting = any(instance.num_waiting for instance in members)
    running = sum(freeness.batch(i, dispatch=True) - i.num_waiting for i in members)
    return room / batch, (room - blocks) / max(1, running + waiting)


def _finite(instance: InstanceView, freeness: Freeness) -> float:
    """The freeness of an instance; one without requests counts as if it had one that holds nothing."""
    free = freeness.of(instance)
    return instance.num_kv_blocks - freeness.usage(instance).total if free == inf else free
