"""Aegaeon's turns: more active models than engines, each served for as long as keeps its tokens on time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf, isfinite, ldexp

from hotswap.action import Action, Swap
from hotswap.errors import ConfigError
from hotswap.policies.schedulers.allocation import Allocation
from hotswap.policies.schedulers.min_replicas import restore_min_replicas
from hotswap.request import ModelId
from hotswap.scheduler import Scheduler
from hotswap.view import FleetView, InstanceState, InstanceView, ModelView

__all__ = ["ElasticQuota", "Quotas", "quotas"]


@dataclass(frozen=True, slots=True)
class Quotas:
    """Lengths of turns, in the order of the models that were asked about, and what comes of them."""

    alpha: float
    quotas_s: tuple[float, ...]

    @property
    def attainment(self) -> float:
        """The share of tokens that come on time, `min(1, 1 / alpha)`."""
        return min(1.0, 1 / self.alpha)


def quotas(n: Sequence[float], c: float, *, max_quota_s: float = 4.0) -> Quotas:
    """Return how long each model is served before the next one has its turn.

    Source: Aegaeon (SOSP 2025), the decoding phase. One engine goes round its models. Model *k* generates
    `n_k = TBT / t_k` times as fast as its tokens are due (TBT: the target between two tokens; t_k: a step),
    so what it makes in its turn lasts beyond it. With *c* the seconds of all switches of a round,

        alpha = max(c / (min n * Qmax) + sum 1 / n, 0.5)
        q_i   = c / (n_i (alpha - sum 1 / n))

    so in every round each model makes `1 / alpha` of the tokens that are due meanwhile. With no switches to
    make up for (`c = 0`) and no slack the quotient is taken as its limit, where `min n` gets `Qmax`.

    Args:
        n: For each model.
        c: Seconds that switching takes in one round.
        max_quota_s: *Qmax*, which the longest quota is bounded by.

    Raises:
        ConfigError: an n is not over 0, c is under 0, or `max_quota_s` is not over 0.
    """
    if not all(0 < value < inf for value in n):
        raise ConfigError(f"n is {n!r}; give finite numbers over 0.")
    if not (c >= 0 and isfinite(c)):
        raise ConfigError(f"c is {c!r}; give 0 or more seconds, finite.")
    if not 0 < max_quota_s < inf:
        raise ConfigError(f"max_quota_s is {max_quota_s!r}; give seconds over 0, finite.")
    if not n:
        return Quotas(0.5, ())
    work, least = sum(1 / value for value in n), c / (min(n) * max_quota_s)
    alpha = max(least + work, 0.5)
    # Where the first of the two is larger, alpha - work is `least`, and c cancels out.
    share = min(n) * max_quota_s if least + work >= 0.5 else c / (0.5 - work)
    return Quotas(alpha, tuple(share / value for value in n))


@dataclass(frozen=True, slots=True, kw_only=True)
class ElasticQuota(Scheduler):
    """Lets more active models than instances take turns, as long as keeps their tokens coming on time.

    Source: Aegaeon (SOSP 2025), decoding: `quotas`. A model with requests and without a replica takes an
    EMPTY instance, then one whose model has no requests or keeps another replica, then the one whose model is
    furthest beyond its quota. Who has waited longest since its last turn goes first. Before that, models
    below `min_replicas` get theirs (as `RestoreMinReplicas`).

    **Readings.**

    - The paper gives each engine a list of models and goes round it. Here all instances go round all active
      models: *E* instances generate *E* times as much, so `n_k` is taken times *E*, which gives the paper's
      formula for one. Who is next follows from how long it has waited, so a plan needs no list.
    - *t_k* is `step_s * weight`, since a view knows speeds as `weight` alone. A switch takes `switch_s`
      and what the store needs to read the model (`StoreView.load_s`).
    - Prefill has engines of its own in the paper, and KV blocks outlive a turn. Here the instances do both,
      and a turn begins with computing what its requests have, prompts and all they got in earlier turns. That
      is time without a token, as a switch is, so it counts to *c*; and a turn is longer by it than its quota.

    - Where prefill has engines of its own, first tokens come in the order of requests and wait for no round.
      Here a second in which a request waits for its first token counts as `first_weight` of them: the others
      of its model have tokens ahead of their time, if `alpha` is under 1, and it has none. No wait is
      without end, as all of them grow.

    **Ours:** the cases before the last; a model that has no more requests gives way at once; floors.

    Attributes:
        tbt_s: Target between two tokens of a request (*TBT*).
        step_s: A decode step of a model whose `weight` is 1.
        max_quota_s: *Qmax*.
        switch_s: Seconds of a switch beside reading the weights.
        prefill_token_s: Seconds for each token that a model's requests have when its turn begins; 0 where
            engines keep KV blocks from turn to turn, or to leave it out of account.
        deadline_s: What running requests get to finish when their model's turn is over.
        first_weight: How many times the wait for a first token counts; with 0 only that for a turn does.
    """

    tbt_s: float = 0.1
    step_s: float = 0.025
    max_quota_s: float = 4.0
    switch_s: float = 0.5
    prefill_token_s: float = 0.0
    deadline_s: float = 0.0
    first_weight: float = 2.0

    def __post_init__(self) -> None:
        for name in ("tbt_s", "step_s", "max_quota_s"):
            if not 0 < getattr(self, name) < inf:
                raise ConfigError(f"{name} is {getattr(self, name)!r}; give seconds over 0, finite.")
        for name in ("switch_s", "prefill_token_s", "deadline_s"):
            if not 0 <= getattr(self, name) < inf:
                raise ConfigError(f"{name} is {getattr(self, name)!r}; give 0 or more seconds, finite.")
        if not 0 <= self.first_weight < inf:
            raise ConfigError(f"first_weight is {self.first_weight!r}; give a finite number, 0 or more.")

    def plan(self, fleet: FleetView) -> Sequence[Action]:
        allocation = Allocation(fleet)
        floors = tuple(restore_min_replicas(allocation, deadline_s=self.deadline_s))
        return (*floors, *self._turns(allocation, fleet, self.quotas_s(fleet)))

    def quotas_s(self, fleet: FleetView) -> dict[ModelId, float]:
        """Return the seconds of a turn of each model that has requests, its prefills included."""
        active = [m for m in fleet.models if m.num_requests]
        num_instances = sum(i.state is not InstanceState.LOST for i in fleet.instances)
        if not num_instances:
            return {}
        n = [num_instances * self.tbt_s / (self.step_s * m.weight) for m in active]
        prefill_s = self._prefill_s(fleet)
        c = sum(self._switch_s(fleet, m) + prefill_s[m.id] for m in active)
        lengths_s = quotas(n, c, max_quota_s=self.max_quota_s).quotas_s
        return {m.id: prefill_s[m.id] + quota_s for m, quota_s in zip(active, lengths_s, strict=True)}

    def _prefill_s(self, fleet: FleetView) -> defaultdict[ModelId, float]:
        """Seconds for which each model's requests would be prefilled if its turn began now."""
        seconds: defaultdict[ModelId, float] = defaultdict(float)
        if self.prefill_token_s:
            for run in fleet.running:
                seconds[run.model] += self.prefill_token_s * run.num_tokens
            for request in fleet.waiting:
                seconds[request.model] += self.prefill_token_s * request.num_tokens
        return seconds

    def _switch_s(self, fleet: FleetView, model: ModelView) -> float:
        load_s = fleet.store.load_s(model.id)
        return self.switch_s + (load_s if isfinite(load_s) else 0.0)

    def _turns(
        self, allocation: Allocation, fleet: FleetView, quotas_s: Mapping[ModelId, float]
    ) -> Iterator[Swap]:
        first_s = _first_waits_s(fleet)

        def waited_s(model: ModelView) -> float:
            for_first_s = ldexp(first_s.get(model.id, 0.0), -model.num_failed_loads)
            return max(allocation.waited_s(model), self.first_weight * for_first_s)

        waiting = [m for m in allocation.models.values() if m.num_requests and not allocation.num_replicas(m)]
        for model in sorted(waiting, key=lambda m: (-waited_s(m), m.id)):
            swap = self._fill(allocation, model) or self._next(allocation, model, quotas_s, fleet.now_s)
            if swap:
                allocation.swap(swap)
                yield swap

    def _fill(self, allocation: Allocation, model: ModelView) -> Swap | None:
        empty = allocation.empty(model)
        if empty is None:
            return None
        return Swap(instance=empty.id, model=model.id, reason=f"{model.id} has its turn; {empty.id} is empty")

    def _next(
        self, allocation: Allocation, model: ModelView, quotas_s: Mapping[ModelId, float], now_s: float
    ) -> Swap | None:
        """Take the instance whose model needs it least, of those whose turn is over."""
        over: list[tuple[bool, float, ModelView, InstanceView]] = []
        for donor, _ in allocation.donors(model):
            alone = allocation.load(donor, more=-1) == inf
            quota_s = quotas_s.get(donor.id, 0.0) if alone else 0.0
            if instance := allocation.replica(donor, model, served_s=quota_s):
                over.append((alone, quota_s - _served_s(instance, now_s), donor, instance))
        if not over:
            return None
        _, beyond_s, donor, instance = min(over, key=lambda turn: (turn[0], turn[1], turn[2].id))
        reason = f"{model.id} has its turn; {donor.id} had its own for {-beyond_s:.3g} s more than its quota"
        return Swap(instance=instance.id, model=model.id, deadline_s=self.deadline_s, reason=reason)


def _first_waits_s(fleet: FleetView) -> dict[ModelId, float]:
    """How long the first has waited of each model's requests that have no token yet."""
    longest_s: dict[ModelId, float] = {}
    for request in fleet.waiting:
        if not request.num_generated:
            waited_s = fleet.now_s - request.arrived_s
            longest_s[request.model] = max(waited_s, longest_s.get(request.model, 0.0))
    return longest_s


def _served_s(instance: InstanceView, now_s: float) -> float:
    return inf if instance.serving_since_s is None else now_s - instance.serving_since_s
