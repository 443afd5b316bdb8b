"""Swaps by what they cost: an instance changes its model once waiting has cost more than the swap would."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf, ldexp
from typing import NamedTuple

from hotswap.action import Action, Swap
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


@dataclass(frozen=True, slots=True)
class CostSwap(Scheduler):
    """Gives a model an instance once its requests have waited for as long as the swap would stop others.

    It needs no numbers. Both sides are seconds of requests, by the times that the fleet has measured of its
    own swaps and prefills (`FleetView.times`), so nothing has to be tuned to models, devices or loads:

        lost(m, i) = w(m) x sum over the requests that wait for m of  t max(1, t / (4 S))
        cost(m, i) = 0 without a request on the instance i, else
                     w(v) n (S + 2 S + q 3 S / E + swap_s(v, i) + prefill_s(tokens)) / r(v)
        swap i to m   for the i of the least cost(m, i), if lost(m, i) >= cost(m, i)

    with *t* the seconds that a request has waited and *S* = `swap_s(m, i)`; *v* the model that *i* has, *n*
    its requests there with all their tokens, *r* its replicas; *w* the `weight`; *q* the other models that
    wait without a replica, *E* the instances. The *n* requests stop until *i* has come to *m*, *m* has had a
    turn of 2 *S*, the *q* others, on *E* instances, have had theirs, and *i* has come back; then their tokens
    are computed again. With other replicas they lose less.

    Where all *n* requests end so soon that waiting for it would lose less than the cost, those that wait do
    so once: what they would lose is added to the cost. The end is `num_remaining` tokens of
    `FleetView.times.token_s` away at most, so the rule does something only where requests bound their answers
    (`Sampling.max_tokens`) by little more than they have.

    Waits grow by themselves, the long ones with their square, so every waiting model has its turn. The model
    whose requests have waited most goes first, halved for each failed load.

    Source: the rule of ski rental (Karlin, Manasse, Rudolph, Sleator, "Competitive snoopy caching", 1988):
    who pays as long as the alternative costs, and then changes, pays at most twice what foresight would have.
    That bound is for one decision; for a fleet it is a heuristic, measured in `docs/papers.md`.

    **Which models.** Those with waiting requests and fewer replicas than requests, unless an instance is
    swapping to them already. One that has replicas gets another only if its requests find no place.

    **Which instances.** `min_replicas` are restored first, and kept. An instance with requests is left alone
    until the first tokens that its turn began with are there (`Allocation`), and for twice as long as a swap
    and the prefill of its requests take, which bounds what turns cost. Of equal costs EMPTY instances go
    first, then those with the model preloaded, then the least recently used.

    **The longest wait.** On one instance, with weights of 1, a single request for a model without a replica
    waits, while no third model does, at most

        max(2 sqrt(S C), F, 2 (S + T)) + I + S  where C = 2 n (4 S + T) is the cost, and C for 2 sqrt(S C)
                                                if that is under 4 S

    seconds: *T* the seconds of prefill of the *n* requests there, *F* the first tokens of their turn, *I* the
    fleet's interval. Each model whose requests have waited more takes one such turn before.
    """

    def plan(self, fleet: FleetView) -> Sequence[Action]:
        allocation = Allocation(fleet)
        restored = tuple(restore_min_replicas(allocation, deadline_s=0.0))
        return (*restored, *self._swaps(fleet, allocation))

    def _swaps(self, fleet: FleetView, allocation: Allocation) -> Iterator[Swap]:
        waits = _waits(fleet, allocation)
        if not waits:
            return
        costs = _Costs(fleet, allocation, [wait.model for wait in waits])
        for wait in sorted(waits, key=lambda wait: (-wait.lost_s(inf), wait.model.id)):
            model = wait.model
            best = min((costs.of(wait, i) for i in allocation.swappable(model)), default=None)
            if best is None:
                continue
            lost_s = wait.lost_s(costs.swap_s(model.id, fleet.instance(best.id)))
            if lost_s >= best.cost_s:  # which is infinite where a turn has just begun
                lost = f"requests for {model.id} have lost {lost_s:.3g} s by waiting"
                reason = f"{lost}; others would lose {best.cost_s:.3g} s on {best.id}"
                swap = Swap(instance=best.id, model=model.id, reason=reason)
                allocation.swap(swap)
                yield swap


@dataclass(frozen=True, slots=True)
class _Wait:
    """The seconds for which requests have waited for a model that should have an instance more."""

    model: ModelView
    seconds: Sequence[float]

    def lost_s(self, swap_s: float, *, after_s: float = 0.0) -> float:
        """Return what they have lost, where a swap takes so long; less if the model failed to load.

        Or what they will have lost `after_s` more of waiting.
        """
        patience_s = _PATIENCE * max(swap_s, 1e-6)
        waits_s = (wait_s + after_s for wait_s in self.seconds)
        lost_s = sum(wait_s * max(1.0, wait_s / patience_s) for wait_s in waits_s)
        return ldexp(lost_s * self.model.weight, -self.model.num_failed_loads)


class _Price(NamedTuple):
    """What an instance costs; a smaller one is better."""

    cost_s: float
    taken: bool
    unprepared: bool
    used_s: float
    id: InstanceId


class _Costs:
    """The costs of instances while one plan adds its swaps."""

    def __init__(self, fleet: FleetView, allocation: Allocation, waiting: Sequence[ModelView]) -> None:
        self._fleet, self._allocation, self._waiting = fleet, allocation, waiting
        self._known_s: dict[tuple[ModelId, str, bool, bool], float] = {}
        self._tokens: Counter[InstanceId] = Counter()
        self._remaining: dict[InstanceId, int] = {}
        for run in fleet.running:
            self._tokens[run.instance] += run.num_tokens
            self._remaining[run.instance] = max(run.num_remaining, self._remaining.get(run.instance, 0))

    def of(self, wait: _Wait, instance: InstanceView) -> _Price:
        """Return what others lose if an instance goes to a model; infinite where a turn has just begun."""
        taken = instance.state is not InstanceState.EMPTY
        unprepared = instance.preloaded != wait.model.id
        return _Price(self._cost_s(wait, instance), taken, unprepared, used_s(instance), instance.id)

    def swap_s(self, model: ModelId, instance: InstanceView) -> float:
        """Return `FleetView.swap_s`, worked out once for instances that are alike."""
        empty, preloaded = instance.state is InstanceState.EMPTY, instance.preloaded == model
        key = model, instance.node, empty, preloaded
        seconds = self._known_s.get(key)
        if seconds is None:
            seconds = self._known_s[key] = self._fleet.swap_s(model, instance)
        return seconds

    def _cost_s(self, wait: _Wait, instance: InstanceView) -> float:
        donor = None if instance.model is None else self._allocation.models.get(instance.model)
        if donor is None or not instance.num_requests:
            return 0.0
        there_s = self.swap_s(wait.model.id, instance)
        prefill_s = self._fleet.times.prefill_s(self._tokens[instance.id])
        since_s = instance.serving_since_s
        if since_s is not None and self._fleet.now_s - since_s < _TURN * (there_s + prefill_s):
            return inf
        turn_s = there_s + _TURN * there_s
        stopped_s = turn_s * (1 + self._num_queued(wait.model) / len(self._fleet.instances))
        stopped_s += self.swap_s(donor.id, instance) + prefill_s
        cost_s = donor.weight * instance.num_requests * stopped_s / self._allocation.num_replicas(donor)
        end_s = self._fleet.times.token_s * self._remaining.get(instance.id, 0)
        until_end_s = wait.lost_s(there_s, after_s=end_s) - wait.lost_s(there_s)
        return cost_s + until_end_s if until_end_s < cost_s else cost_s

    def _num_queued(self, model: ModelView) -> int:
        """How many other models wait for an instance and have none."""
        return sum(m.id != model.id and not self._allocation.num_replicas(m) for m in self._waiting)


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
