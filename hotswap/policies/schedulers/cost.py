"""Swaps by what they cost: an instance changes its model once waiting has cost more than the swap would."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf, ldexp
from typing import NamedTuple

from hotswap.action import Action, Swap
from hotswap.argument_kinds import check_arguments
from hotswap.policies.resume_costs import resume_s
from hotswap.policies.schedulers.allocation import Allocation
from hotswap.policies.schedulers.instances import used_s
from hotswap.policies.schedulers.min_replicas import restore_min_replicas
from hotswap.request import ModelId
from hotswap.scheduler import Scheduler
from hotswap.view import FleetView, InstanceId, InstanceState, InstanceView, ModelView

__all__ = ["CostSwap"]

# A replica with requests serves for so many times as long as its swap and prefills take, at least.
_TURN = 2.0
# A wait counts more than once from so many swap times on.
_PATIENCE = 4.0
# By so much a sum must be over a limit to be so however it is rounded.
_CERTAIN = 1.000_001


@check_arguments
@dataclass(frozen=True, slots=True)
class CostSwap(Scheduler):
    """Gives a model an instance once its requests have waited for as long as the swap would stop others.

    It needs no numbers. Both sides are seconds of requests, by the times that the fleet has measured of its
    own swaps and prefills (`FleetView.times`), so nothing has to be tuned to models, devices or loads:

        lost(m, i)  = w(m) x sum over the requests that wait for m of  t max(1, t / (4 S))
        stop(m, i)  = S + 2 S + q 3 S / E + swap_s(v, i) + prefill_s(tokens)
        evict(m, i) = (w(v) x sum over the requests on i of  stop min(1, stop / whole)
                       + o (swap_s(v, i) + prefill_s(tokens))) / r(v)
        drain(m, i) = lost(m, i) at the end of the requests on i, less lost(m, i) now
                      + (w(v) x come x (stop - prefill_s(tokens) + end / 2) + o swap_s(v, i)) / r(v)
        ages(m, i)  = w(m) x sum over the requests that have waited t > 4 S for m of  2 t / (4 S)
        swap i to m   for the i of the least cost(m, i) = min(evict, drain), if lost(m, i) >= cost(m, i),
                      or q = 0 and ages(m, i) A >= lost(m, i) + cost(m, i)

    with *t* the seconds that a request has waited and *S* = `swap_s(m, i)`; *v* the model that *i* has, *r*
    its replicas; *whole* the seconds for which a request is on *i* in all; *w* the `weight`; *q* the other
    models that wait without a replica, *E* the instances, *o* the requests that wait for other models, by
    weight, over *E*; *end* the seconds until the requests on *i* have ended, *come* those that come for *v*
    until then; *A* the seconds since an instance was last taken from *m*. An instance without a request costs
    nothing.

    **Evicted requests** stop until *i* has come to *m*, *m* has had a turn of 2 *S*, the *q* others, on *E*
    instances, have had theirs, and *i* has come back; then their tokens are computed again, or those copied
    that the fleet's KV store keeps. With other replicas they lose less.

    **A stop counts by its share of the whole** time of its request: an answer of a minute loses little by a
    stop of two seconds, and one of two seconds as much as it takes. A request is expected to take as long
    again as it has been on *i*, unless `num_remaining` tokens of `FleetView.times.token_s` end it sooner:
    what it has waited before makes no further stop cheaper.

    **Requests that end soon** are left to end, where those that wait lose less by that than the others would
    by being evicted: the instance admits none, and goes to *m* when they have ended, at the latest when
    waiting for them has cost as much as evicting them (`Swap.deadline_s`). Their end is `num_remaining`
    tokens of `FleetView.times.token_s` away at most, so the rule does something only where requests bound
    their answers (`Sampling.max_tokens`) by little more than they have. Requests that come for *v* meanwhile
    wait for a part of the *end* and until *i* has come back. In the *whole* of a request's time as many come
    as there are others beside it now, so none is expected where one is alone.

    **A model that is rarely asked for** waits little longer than 4 *S*. Who loses as much by waiting as by
    a swap hopes to be spared the swap: others may end, or more requests come and share the visit. Where few
    come and others keep every instance busy, the same visit is made in the end, and the wait was for nothing.
    So from 4 *S* on a model has its turn once a second more of waiting (*ages*) costs more than a second has
    cost on average since its last turn, this visit included. Where requests come all the time that is hardly
    sooner than by the first rule; where other models wait as well, instances take turns by the first rule.
    So does a model whose latest load failed, since its next one may evict requests for nothing. One that has
    had no instance taken from it yet has its turn after 4 *S*.

    **A swap back and tokens that are computed again** take time of an instance, which all that wait for other
    models wait for, an *E*-th each. So where many wait, fewer are evicted.

    Waits grow by themselves, the long ones with their square, so every waiting model has its turn. The model
    whose requests have lost most goes first, by the shortest of its swaps, halved for each failed load.

    Source: the rule of ski rental (Karlin, Manasse, Rudolph, Sleator, "Competitive snoopy caching", 1988):
    who pays as long as the alternative costs, and then changes, pays at most twice what foresight would have.
    That bound is for one decision; for a fleet it is a heuristic, measured in `docs/papers.md`. The second
    rule ends a cycle when its next second would cost more than its average one, which is the best where
    cycles repeat (Charnov, "Optimal foraging, the marginal value theorem", 1976).

    **Which models.** Those with waiting requests and fewer replicas than requests, unless an instance is
    swapping to them already. One that has replicas gets another only if its requests find no place, or if its
    prompts queue there: the tokens to be computed take longer on each replica than the swap, and the requests
    without a token have waited in all for as long as that. For such a model only an instance without a
    request is taken, for the requests to come: those that queue stay where they are.

    **Which instances.** `min_replicas` are restored first, and kept. An instance with requests is left alone
    until the first tokens that its turn began with are there (`Allocation`), and for twice as long as a swap
    and the prefill of its requests take, which bounds what turns cost. Of equal costs EMPTY instances go
    first, then those with the model preloaded, then the least recently used.

    **The longest wait.** On one instance, with weights of 1, a single request for a model without a replica
    waits, while no third model does, at most

        max(2 sqrt(S C), F, 2 (S + T)) + I + S  where C = 2 n (4 S + T) is twice the most that evictions
                                                cost, and C for 2 sqrt(S C) if that is under 4 S

    seconds: *T* the seconds of prefill of the *n* requests there, *F* the first tokens of their turn, *I* the
    fleet's interval. Each model whose requests have waited more takes one such turn before.
    """

    def plan(self, fleet: FleetView) -> Sequence[Action]:
        allocation = Allocation(fleet)
        restored = tuple(restore_min_replicas(allocation, deadline_s=0.0))
        return (*restored, *self._swaps(fleet, allocation))

    def _swaps(self, fleet: FleetView, allocation: Allocation) -> Iterator[Swap]:
        waits = _waits(fleet, allocation)
        costs = _Costs(fleet, allocation, waits)
        for wait in sorted(waits, key=costs.rank):
            model, best = wait.model, costs.best(wait)
            if best is None:
                continue
            lost_s, absent_s = wait.lost_s(best.swap_s), costs.absent_s(model)
            rare = lost_s < best.cost_s
            if not rare or wait.ages(best.swap_s, absent_s) >= lost_s + best.cost_s:
                lost = f"requests for {model.id} have lost {lost_s:.3g} s by waiting"
                more = "by waiting for others to end" if best.deadline_s else "if others were evicted"
                once = (
                    ""
                    if not rare
                    else f", once in {absent_s:.3g} s"
                    if absent_s < inf
                    else ", the first time"
                )
                reason = f"{lost}; {more} on {best.id} {best.cost_s:.3g} s would be lost{once}"
                swap = Swap(instance=best.id, model=model.id, deadline_s=best.deadline_s, reason=reason)
                allocation.swap(swap)
                costs.planned(wait)
                yield swap
        for wait, queue_s in _queues(fleet, allocation, waits):
            model, best = wait.model, costs.best(wait)
            if best is None or best.cost_s:
                continue
            if queue_s > best.swap_s and wait.lost_s(best.swap_s) >= best.swap_s:
                reason = f"prompts for {model.id} queue for {queue_s:.3g} s; {best.id} has no requests"
                swap = Swap(instance=best.id, model=model.id, deadline_s=0.0, reason=reason)
                allocation.swap(swap)
                yield swap


class _Wait:
    """The seconds for which requests have waited for a model that should have an instance more.

    Attributes:
        model: The model.
        num_weighted: The number of the requests, by the model's weight.
    """

    def __init__(self, model: ModelView, seconds: Sequence[float]) -> None:
        self.model, self._seconds = model, seconds
        self.num_weighted = len(seconds) * model.weight
        self._until_now_s: dict[float, float] = {}

    def more_s(self, swap_s: float, after_s: float) -> float:
        """Return what they lose by `after_s` more of waiting."""
        return self._lost_s(swap_s, after_s) - self.lost_s(swap_s)

    def lost_s(self, swap_s: float) -> float:
        """Return what they have lost, where a swap takes so long; less if the model failed to load."""
        lost_s = self._until_now_s.get(swap_s)
        if lost_s is None:
            lost_s = self._until_now_s[swap_s] = self._lost_s(swap_s, 0.0)
        return lost_s

    def ages(self, swap_s: float, seconds: float) -> float:
        """Return what so many seconds cost at the rate at which those lose now that have waited long."""
        patience_s = _PATIENCE * max(swap_s, 1e-6)
        rate = sum(2 * wait_s / patience_s for wait_s in self._seconds if wait_s > patience_s)
        return rate * seconds * self.model.weight if rate else 0.0

    def loses_more_than(self, most_s: float, after_s: float) -> bool:
        """Whether `more_s` is more for certain: it is at least `after_s` for each of them."""
        return ldexp(self.num_weighted * after_s, -self.model.num_failed_loads) > most_s * _CERTAIN

    def _lost_s(self, swap_s: float, after_s: float) -> float:
        patience_s, lost_s = _PATIENCE * max(swap_s, 1e-6), 0.0
        for waited_s in self._seconds:
            wait_s = waited_s + after_s
            lost_s += wait_s if wait_s <= patience_s else wait_s * (wait_s / patience_s)
        return ldexp(lost_s * self.model.weight, -self.model.num_failed_loads)


class _Price(NamedTuple):
    """What an instance costs; a smaller one is better. Its requests get `deadline_s` to finish.

    `swap_s` is what its swap takes.
    """

    cost_s: float
    taken: bool
    unprepared: bool
    used_s: float
    id: InstanceId
    deadline_s: float
    swap_s: float


class _Busy:
    """An instance with requests: what it costs to take it, as far as the model that gets it does not matter.

    Attributes:
        donor: The model that it has.
        since_s: The loop time at which its turn began.
        prefill_s: What it takes to compute the tokens of its requests again, or to copy their KV blocks.
        back_s: What a swap back takes.
        end_s: The seconds after which all of its requests have ended at the latest.
        come_per_s: The requests that come there in a second.
    """

    def __init__(self, fleet: FleetView, instance: InstanceView, donor: ModelView, back_s: float) -> None:
        times, runs = fleet.times, fleet.running_on(instance.id)
        self.donor, self.back_s = donor, back_s
        self.since_s = -inf if instance.serving_since_s is None else instance.serving_since_s
        self.prefill_s = resume_s(times, runs)
        self.end_s = times.token_s * max((run.num_remaining for run in runs), default=0)
        self._num_unknown = instance.num_requests - len(runs)
        self._whole_s = [
            here_s + min(here_s, times.token_s * run.num_remaining)
            for run in runs
            for here_s in (fleet.now_s - run.since_s,)
        ]
        whole_s = sum(self._whole_s)
        self.come_per_s = len(runs) * (len(runs) - 1) / whole_s if whole_s else 0.0

    def lost_s(self, stop_s: float) -> float:
        """Return what its requests lose if they stop for so long: each the more, the shorter it is."""
        known_s = stop_s * sum(1.0 if stop_s >= whole_s else stop_s / whole_s for whole_s in self._whole_s)
        return self.donor.weight * (known_s + self._num_unknown * stop_s)


class _Costs:
    """The costs of instances while one plan adds its swaps."""

    def __init__(self, fleet: FleetView, allocation: Allocation, waits: Sequence[_Wait]) -> None:
        self._fleet, self._allocation = fleet, allocation
        self._waiting = {wait.model.id: wait for wait in waits}
        self._known_s: dict[tuple[ModelId, str, bool, bool], float] = {}
        self._busy: dict[InstanceId, _Busy | None] = {}
        self._count()

    @cached_property
    def _kinds(self) -> Sequence[InstanceView]:
        """An instance of each kind: those of one kind swap in the same time."""
        kinds = {(i.node, i.state is InstanceState.EMPTY, i.preloaded): i for i in self._fleet.instances}
        return tuple(kinds.values())

    def _count(self) -> None:
        """Count anew which models wait for an instance and have none, and the requests that wait."""
        waits = self._waiting.values()
        self._queued = {w.model.id for w in waits if not self._allocation.num_replicas(w.model)}
        self._num_weighted = sum(wait.num_weighted for wait in waits)

    def planned(self, wait: _Wait) -> None:
        """Take note of a swap to a model: its requests no longer wait for one."""
        del self._waiting[wait.model.id]
        self._count()

    def rank(self, wait: _Wait) -> tuple[float, ModelId]:
        """Return the key by which models get instances: the one that has lost most comes first."""
        swaps_s = (self.swap_s(wait.model.id, instance) for instance in self._kinds)
        return -wait.lost_s(min(swaps_s, default=inf)), wait.model.id

    def absent_s(self, model: ModelView) -> float:
        """Return the seconds since an instance was taken from a model, if it alone waits for one; 0 if not.

        Infinitely many if none ever was. 0 after a failed load, which the next may do as well.
        """
        if self._queued != {model.id} or model.num_failed_loads:
            return 0.0
        return inf if model.last_evicted_s is None else self._fleet.now_s - model.last_evicted_s

    def best(self, wait: _Wait) -> _Price | None:
        """Return the price of the instance that costs least; `None` where none may be taken."""
        best: _Price | None = None
        for instance in self._allocation.swappable(wait.model):
            cost = self._cost_s(wait, instance)
            if cost is None or (best is not None and cost[0] > best.cost_s):
                continue
            price = _Price(
                cost_s=cost[0],
                taken=instance.state is not InstanceState.EMPTY,
                unprepared=instance.preloaded != wait.model.id,
                used_s=used_s(instance),
                id=instance.id,
                deadline_s=cost[1],
                swap_s=self.swap_s(wait.model.id, instance),
            )
            best = price if best is None else min(best, price)
        return best

    def swap_s(self, model: ModelId, instance: InstanceView) -> float:
        """Return `FleetView.swap_s`, worked out once for instances that are alike."""
        empty, preloaded = instance.state is InstanceState.EMPTY, instance.preloaded == model
        key = model, instance.node, empty, preloaded
        seconds = self._known_s.get(key)
        if seconds is None:
            seconds = self._known_s[key] = self._fleet.swap_s(model, instance)
        return seconds

    def _cost_s(self, wait: _Wait, instance: InstanceView) -> tuple[float, float] | None:
        """Return what others lose if an instance goes to a model, and the seconds its requests get to finish.

        `None` where its turn has just begun.
        """
        busy = self._busy_on(instance)
        if busy is None:
            return 0.0, 0.0
        there_s = self.swap_s(wait.model.id, instance)
        if self._fleet.now_s - busy.since_s < _TURN * (there_s + busy.prefill_s):
            return None
        num_engines, num_replicas = len(self._fleet.instances), self._allocation.num_replicas(busy.donor)
        num_queued = len(self._queued) - (wait.model.id in self._queued)
        stop_s = (there_s + _TURN * there_s) * (1 + num_queued / num_engines)
        stop_s += busy.back_s + busy.prefill_s
        others = (self._num_weighted - wait.num_weighted) / num_engines
        back_s = others * busy.back_s / num_replicas
        evict_s = (busy.lost_s(stop_s) + others * busy.prefill_s) / num_replicas + back_s
        if wait.loses_more_than(evict_s, busy.end_s):
            return evict_s, 0.0

        def drain_s(end_s: float) -> float:
            come = busy.come_per_s * end_s * (stop_s - busy.prefill_s + end_s / 2)
            return wait.more_s(there_s, end_s) + busy.donor.weight * come / num_replicas + back_s

        cost_s = drain_s(busy.end_s)
        if not back_s < cost_s < evict_s:
            return evict_s, 0.0
        deadline_s = busy.end_s  # which is an estimate: longer, while that costs no more than to evict
        while drain_s(2 * deadline_s) <= evict_s:
            deadline_s *= 2
        return cost_s, deadline_s

    def _busy_on(self, instance: InstanceView) -> _Busy | None:
        """Return an instance with requests, looked at once; `None` if it has none."""
        if instance.id not in self._busy:
            donor = None if instance.model is None else self._allocation.models.get(instance.model)
            busy = None
            if donor is not None and instance.num_requests:
                busy = _Busy(self._fleet, instance, donor, self.swap_s(donor.id, instance))
            self._busy[instance.id] = busy
        return self._busy[instance.id]


def _queues(
    fleet: FleetView, allocation: Allocation, waits: Sequence[_Wait]
) -> Iterator[tuple[_Wait, float]]:
    """Yield what waits on the replicas of each model, and the seconds of prefill that each has to do.

    Models with requests that find no place, and those to which an instance swaps, are left out.
    """
    hosts: defaultdict[ModelId, list[InstanceView]] = defaultdict(list)
    for instance in fleet.instances:
        if instance.hosted is not None and not instance.swapping:
            hosts[instance.hosted].append(instance)
    others = {wait.model.id for wait in waits} | {i.target for i in fleet.instances if i.swapping}
    for name, replicas in hosts.items():
        num_tokens = min(instance.num_prefill_tokens for instance in replicas)
        model = allocation.models.get(name)
        if not num_tokens or model is None or name in others:
            continue
        if allocation.num_replicas(model) < model.num_requests:
            here = (run for instance in replicas for run in fleet.running_on(instance.id))
            seconds = [fleet.now_s - run.since_s for run in here if not run.begun]
            yield _Wait(model, seconds), num_tokens * fleet.times.prefill_token_s


def _waits(fleet: FleetView, allocation: Allocation) -> list[_Wait]:
    """Return what waits for each model that should have an instance more."""
    seconds: defaultdict[ModelId, list[float]] = defaultdict(list)
    for request in fleet.waiting:
        seconds[request.model].append(fleet.now_s - request.waiting_since_s)
    coming = {instance.target for instance in fleet.instances if instance.swapping}
    return [
        _Wait(model, seconds[name])
        for name, model in allocation.models.items()
        if name in seconds and name not in coming and allocation.num_replicas(model) < model.num_requests
    ]
