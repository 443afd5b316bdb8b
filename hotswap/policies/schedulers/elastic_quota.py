"""Aegaeon's quotas: more active models than instances take turns, just long enough to keep tokens on time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf, isfinite, ldexp

from hotswap.action import Action, Swap
from hotswap.argument_kinds import check_arguments
from hotswap.errors import ConfigError
from hotswap.policies.resume_costs import resume_s
from hotswap.policies.schedulers.allocation import Allocation
from hotswap.policies.schedulers.min_replicas import restore_min_replicas
from hotswap.request import ModelId
from hotswap.scheduler import Scheduler
from hotswap.view import FleetView, InstanceState, InstanceView, ModelView, RunningView, WaitingView

__all__ = ["ElasticQuota", "Quotas", "quotas"]


@dataclass(frozen=True, slots=True)
class Quotas:
    """The lengths of turns, in the order of the given models, and the share of tokens that are on time."""

    alpha: float
    quotas_s: tuple[float, ...]

    @property
    def attainment(self) -> float:
        """The share of tokens that are on time, `min(1, 1 / alpha)`."""
        return min(1.0, 1 / self.alpha)


def quotas(n: Sequence[float], c: float, *, max_quota_s: float = 4.0) -> Quotas:
    """Return the length of each model's turn.

    Source: Aegaeon (SOSP 2025), the decoding phase. One engine serves its models in rounds. Model *k*
    generates `n_k = TBT / t_k` times as fast as its tokens are due (TBT: the target time between two tokens;
    t_k: the time of a step), so the tokens of a turn last beyond it. With *c* the seconds of all switches of
    a round,

        alpha = max(c / (min n * Qmax) + sum 1 / n, 0.5)
        q_i   = c / (n_i (alpha - sum 1 / n))

    so in every round each model generates `1 / alpha` of the tokens that are due meanwhile. With no switches
    (`c = 0`) and no slack the quotient is taken as its limit, where `min n` gets `Qmax`.

    Args:
        n: *n* of each model.
        c: Seconds of all switches in one round.
        max_quota_s: *Qmax*, the bound of the longest quota.

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


@check_arguments
@dataclass(frozen=True, slots=True, kw_only=True)
class ElasticQuota(Scheduler):
    """Lets more active models than instances take turns, each just long enough to keep its tokens on time.

    Source: Aegaeon (SOSP 2025), decoding: `quotas`. A model with requests and without a replica takes an
    EMPTY instance, else one whose model has no requests or keeps another replica, else the one whose model is
    furthest beyond its quota. The model that has waited longest since its last turn goes first. Before that,
    `min_replicas` are restored (as by `RestoreMinReplicas`).

    **Readings.**

    - The paper gives each engine a list of models. Here all instances serve all active models in turn: *E*
      instances generate *E* times as much, so `n_k` is multiplied by *E*, which is the paper's formula for
      one instance. The next model is the one that has waited longest, so a plan needs no list.
    - *t_k* is `step_s * weight`, since a view knows the speed of a model as `weight` alone. A switch
      takes `switch_s` and the seconds in which the store reads the model (`StoreView.load_s`).
    - In the paper prefill has engines of its own, and KV blocks outlive a turn. Here the instances do both,
      and a turn begins with a prefill of all that its requests have, prompts and tokens of earlier turns. No
      token comes meanwhile, as in a switch, so that time is part of *c*, and a turn is longer by it than its
      quota. With a KV store of the fleet, what is stored of them is copied instead, in the time that the
      fleet has measured (`policies.resume_costs`).
    - With prefill engines of their own, first tokens come in the order of requests and wait for no round.
      Here each second in which a request waits for its first token counts `first_weight` times: other
      requests of its model are ahead of their due tokens, if `alpha` is under 1, and it has none. Every wait
      grows, so none is endless.

    **Ours:** the first two cases of the order above; a model without further requests gives way at once;
    `min_replicas`; the first tokens that a turn begins with are finished (`Allocation`).

    **What to set.** `max_quota_s` matters most where instances prefill as well: a round has to fit into the
    time of a first token, which took 1 s for ten seconds (`docs/papers.md`). With `prefill_token_s=0` more
    engines can be worse: quotas shrink with each until prefills take most of a turn. `tbt_s`, `switch_s` and
    `first_weight` hardly matter.

    Attributes:
        tbt_s: The target time between two tokens of a request (*TBT*).
        step_s: The time of a decode step of a model whose `weight` is 1.
        max_quota_s: *Qmax*.
        switch_s: Seconds of a switch besides reading the weights.
        prefill_token_s: Seconds per token that a model's requests have when its turn begins. With `None` the
            prefill of a turn takes what the fleet has measured (`FleetView.times`), a constant part included.
            Tokens that the fleet's KV store has do not count. 0 if engines keep KV blocks from turn to turn.
        deadline_s: Seconds that running requests get to finish when their model's turn is over.
        first_weight: How many times the wait for a first token counts; with 0 only the wait for a turn does.
    """

    tbt_s: float = 0.1
    step_s: float = 0.025
    max_quota_s: float = 4.0
    switch_s: float = 0.5
    prefill_token_s: float | None = None
    deadline_s: float = 0.0
    first_weight: float = 2.0

    def __post_init__(self) -> None:
        for name in ("tbt_s", "step_s", "max_quota_s"):
            if not 0 < getattr(self, name) < inf:
                raise ConfigError(f"{name} is {getattr(self, name)!r}; give seconds over 0, finite.")
        for name in ("switch_s", "prefill_token_s", "deadline_s"):
            value = getattr(self, name)
            if not (0 <= value < inf if value is not None else name == "prefill_token_s"):
                raise ConfigError(f"{name} is {value!r}; give 0 or more seconds, finite.")
        if not 0 <= self.first_weight < inf:
            raise ConfigError(f"first_weight is {self.first_weight!r}; give a finite number, 0 or more.")

    def plan(self, fleet: FleetView) -> Sequence[Action]:
        allocation = Allocation(fleet)
        restored = tuple(restore_min_replicas(allocation, deadline_s=self.deadline_s))
        return (*restored, *self._turns(allocation, fleet, self.quotas_s(fleet)))

    def quotas_s(self, fleet: FleetView) -> dict[ModelId, float]:
        """Return the length of the turn of each model that has requests, its prefills included."""
        active = [m for m in fleet.models if m.num_requests]
        num_instances = sum(i.state is not InstanceState.LOST for i in fleet.instances)
        if not num_instances:
            return {}
        n = [num_instances * self.tbt_s / (self.step_s * m.weight) for m in active]
        prefill_s = self._prefill_s(fleet)
        c = sum(self._switch_s(fleet, m) + prefill_s.get(m.id, 0.0) for m in active)
        lengths_s = quotas(n, c, max_quota_s=self.max_quota_s).quotas_s
        return {
            m.id: prefill_s.get(m.id, 0.0) + quota_s for m, quota_s in zip(active, lengths_s, strict=True)
        }

    def _prefill_s(self, fleet: FleetView) -> Mapping[ModelId, float]:
        """The seconds of prefill for each model's requests, if it has any, if its turn began now."""
        requests: defaultdict[ModelId, list[WaitingView | RunningView]] = defaultdict(list)
        for running in fleet.running:
            requests[running.model].append(running)
        for waiting in fleet.waiting:
            requests[waiting.model].append(waiting)
        times = fleet.times
        if self.prefill_token_s is not None:
            times = replace(times, prefill_start_s=0.0, prefill_token_s=self.prefill_token_s)
        return {model: resume_s(times, of_model) for model, of_model in requests.items()}

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
            swap = self._take_empty(allocation, model) or self._take_over(
                allocation, model, quotas_s, fleet.now_s
            )
            if swap:
                allocation.swap(swap)
                yield swap

    def _take_empty(self, allocation: Allocation, model: ModelView) -> Swap | None:
        empty = allocation.empty(model)
        if empty is None:
            return None
        return Swap(instance=empty.id, model=model.id, reason=f"{model.id} has its turn; {empty.id} is empty")

    def _take_over(
        self, allocation: Allocation, model: ModelView, quotas_s: Mapping[ModelId, float], now_s: float
    ) -> Swap | None:
        """Take the instance of the model that is furthest beyond its quota, of those whose turn is over."""
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
    """The longest wait of each model's requests that have no token yet."""
    longest_s: dict[ModelId, float] = {}
    for request in fleet.waiting:
        if not request.num_generated:
            waited_s = fleet.now_s - request.arrived_s
            longest_s[request.model] = max(waited_s, longest_s.get(request.model, 0.0))
    return longest_s


def _served_s(instance: InstanceView, now_s: float) -> float:
    return inf if instance.serving_since_s is None else now_s - instance.serving_since_s
