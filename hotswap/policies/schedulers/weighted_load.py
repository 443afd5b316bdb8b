"""Snowflake's hot-swap rule: the most loaded model gets a replica of the least loaded one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from itertools import islice
from math import hypot, inf, isfinite
from typing import Literal

from hotswap.action import Action, Swap
from hotswap.argument_kinds import check_arguments
from hotswap.errors import ConfigError
from hotswap.policies.schedulers.allocation import Allocation, Spare
from hotswap.policies.schedulers.min_replicas import restore_min_replicas
from hotswap.request import ModelId
from hotswap.scheduler import Scheduler
from hotswap.view import FleetView, ModelView

__all__ = ["WeightedLoadSwap"]


@check_arguments
@dataclass(frozen=True, slots=True)
class WeightedLoadSwap(Scheduler):
    """Gives the most loaded model a replica of the least loaded one.

    Source: Chan, Zhang, Wang, "Model Hotswapping", Snowflake, 2024. For each model *i*, *p* is its number of
    requests (running and waiting), *w* its `weight` (twice the value for half the throughput), *r* its
    replicas, loading ones included. Then

        f(i) = p w / r                      load per replica; r = 0: infinite if p > 0, else 0
        m1   = argmax f(i)                  subject to f(m1) > t1
        m2   = argmin f(j)                  over j != m1 with r > min_replicas
        swap   if f(m1) > b f(m2)           and f(m2) < t2

    Before that, `min_replicas` are restored (as by `RestoreMinReplicas`). An EMPTY instance goes to m1
    without an m2: no model loses a replica, so neither b nor t2 applies.

    **Readings.** The post's formulas are images, and its text leaves two things open.

    - *b* is "a scalar value for how big the difference from f(m1) needs to be from f(m2)". `reading="ratio"`
      takes it as the factor above (b >= 1), which needs no unit; `reading="margin"` as the difference,
      f(m1) - f(m2) > b (b >= 0), in requests.
    - *t2* is "a threshold for when models should not perform swaps". It is compared to f(m2) here: when even
      the least loaded model is that loaded, a swap only shifts the overload. `math.inf` switches it off.

    **"A model that does not violate any rules when swapped"** is searched for, as the post says. A model is
    passed over for the next least loaded if the guard protects it, or if none of its instances is free, large
    enough for m1, and not cooling down after a failed load of m1. If m1 finds no m2, the next most loaded
    model above t1 is tried.

    **Ours, not the post's:**

    - No model is an m1 that has as many replicas as requests, since a further replica would have no request
      to run. Without this rule one request of a slow model (*w* > t1) took several idle instances.
    - `guard` forbids a swap that would call for its own reversal: by the loads predicted for after the swap,
      f(m2) may not exceed f(m1). If m1 has no replica, m2 must only keep one for its requests. Each swap then
      lowers the higher of the two loads and raises no other, so under a steady load no allocation returns and
      swapping ends. With `guard=False`, as in the post, such a swap takes a replica that has served for
      `patience_s`. Else models without a replica take them from each other at once, for a few tokens a turn.
    - `patience_s` prevents starvation in a full fleet. A model without a replica whose oldest request has
      waited this long takes the least loaded replica that has served this long, against b, t2 and the guard,
      never against `min_replicas`. More active models than instances so take turns. Requests are batched by
      model: those that come as ABCABC to one instance are served as AABBCC, since a replica stays while it
      has requests and no other model has waited for `patience_s`. On one instance with *M* models, without
      `min_replicas` and failed loads, no request waits longer for its model to be served than

          (M - 1) (max(P, R, F) + I + S) + S

      seconds, with *P* `patience_s`, *R* `min_residency_s`, *F* the time of the first tokens that a turn
      begins with (`Allocation`), *I* the fleet's interval and *S* the longest swap: all other models have one
      turn each, however long their queues. `None` is off: then such a model
      waits until another one has spare replicas or no requests.
    - `sigmas` tells load from chance. A count of *p* independent requests has a standard deviation of its
      root, so f(m1) counts as greater than f(m2) only if it is by so many standard deviations of their
      difference, `sqrt((w1 sqrt(p1) / r1)^2 + (w2 sqrt(p2) / r2)^2)`. A growing queue soon is. 0 is off; then
      small models swap by chance alone (`docs/papers.md` shows it), with 3 or 4 rarely.
    - `min_residency_s` protects a replica for so long after it became ready, except from the restoring of
      `min_replicas`. Requests that come slowly are so batched too, at the price of that wait.
    - A plan repeats the rule on the predicted allocation until no further swap is due, so that a burst is met
      in one interval. It ends because every swap takes one free instance. `max_swaps` bounds the number
      (without those for `min_replicas`); 1 is the post's loop.

    **What to set.** With more models than instances `patience_s` matters most: about half of what a first
    token may take. *t1*, *t2* and *b* hardly do there. With fewer models these decide, and `sigmas`, which
    keeps chance from swapping; the post's rule has 0. A *t2* of a few requests forbids most swaps of a busy
    fleet: set it far above the load at which a replica still keeps its targets. The defaults held on loads
    that nothing was chosen by (`docs/papers.md`).

    Ties of m1 go to the longer wait since its last turn, then the larger p w, then the smaller id; of m2 to
    the one whose load rises less, then the smaller id. Of m2's replicas the one with m1 preloaded goes, then
    the one with the fewest requests. Weights lie in the same tiers for every instance, so tiers have no
    influence. Running requests get `deadline_s` to finish.
    """

    t1: float = 16.0
    t2: float = 50.0
    b: float = 1.5
    _: KW_ONLY
    reading: Literal["ratio", "margin"] = "ratio"
    guard: bool = True
    patience_s: float | None = 4.0
    sigmas: float = 3.0
    min_residency_s: float = 0.0
    max_swaps: int | None = None
    deadline_s: float = 0.0

    def __post_init__(self) -> None:
        least_b = {"ratio": 1.0, "margin": 0.0}.get(self.reading)
        if least_b is None:
            raise ConfigError(f"reading is {self.reading!r}; give 'ratio' or 'margin'.")
        if not (self.t1 >= 0 and isfinite(self.t1)):
            raise ConfigError(f"t1 is {self.t1!r}; give a finite load per replica of 0 or more.")
        if not self.t2 > 0:
            raise ConfigError(f"t2 is {self.t2!r}; give a load per replica over 0 (inf is off).")
        if not (self.b >= least_b and isfinite(self.b)):
            raise ConfigError(f"b is {self.b!r}; as a {self.reading} give a finite {least_b:g} or more.")
        if self.patience_s is not None and not self.patience_s >= 0:
            raise ConfigError(f"patience_s is {self.patience_s!r}; give 0 or more seconds, or None.")
        if self.max_swaps is not None and self.max_swaps < 1:
            raise ConfigError(f"max_swaps is {self.max_swaps!r}; give 1 or more, or None for no bound.")
        for name, unit in (("sigmas", "standard deviations"), ("min_residency_s", "seconds")):
            value = getattr(self, name)
            if not (value >= 0 and isfinite(value)):
                raise ConfigError(f"{name} is {value!r}; give 0 (off) or more {unit}.")
        if not self.deadline_s >= 0:
            raise ConfigError(f"deadline_s is {self.deadline_s!r}; give 0 (evict at once) or more seconds.")

    def plan(self, fleet: FleetView) -> Sequence[Action]:
        allocation = Allocation(fleet)
        restored = restore_min_replicas(allocation, deadline_s=self.deadline_s)
        return (*restored, *islice(self._swaps(allocation), self.max_swaps))

    def _swaps(self, allocation: Allocation) -> Iterator[Swap]:
        # An m1 without an m2 finds one only when its own load rises, or among those that gained a replica.
        gained: list[ModelId] = []
        failed: dict[ModelId, int] = {}
        while swap := self._next(allocation, gained, failed):
            donor = allocation.swap(swap)
            if donor is not None:
                failed.pop(donor, None)
            gained.append(swap.model)
            yield swap

    def _next(
        self, allocation: Allocation, gained: Sequence[ModelId], failed: dict[ModelId, int]
    ) -> Swap | None:
        for m1 in allocation.overloaded(self.t1):
            since = failed.pop(m1.id, None)
            # The guard protects every model that would keep no replica for its requests.
            among = None if since is None else gained[since:]
            donors = allocation.spare(m1, keeping=self.guard, among=among)
            swap = (
                self._fill(allocation, m1)
                or self._exchange(allocation, m1, donors)
                or self._end_wait(allocation, m1)
            )
            if swap:
                return swap
            if allocation.load(m1) < inf:
                failed[m1.id] = len(gained)
        return None

    def _fill(self, allocation: Allocation, m1: ModelView) -> Swap | None:
        """Take an EMPTY instance."""
        instance = allocation.empty(m1)
        if instance is None:
            return None
        reason = f"f({m1.id})={allocation.load(m1):g} > t1={self.t1:g}; {instance.id} is empty"
        return Swap(instance=instance.id, model=m1.id, reason=reason)

    def _exchange(
        self, allocation: Allocation, m1: ModelView, donors: Iterable[tuple[Spare, ModelId]]
    ) -> Swap | None:
        """Take a replica of m2, if the rules allow it."""
        f1, deviation = allocation.load(m1), allocation.deviation(m1)
        most_after = allocation.load(m1, more=1) if f1 < inf else inf
        for (f2, after, name, deviation2), _ in donors:
            if name == m1.id:
                continue
            if f2 >= self.t2 or not self._far_apart(f1, f2) or f1 - f2 < self.sigmas * deviation:
                return None  # all further donors are more loaded
            reversible = after > most_after or after == inf
            if self.guard and after > most_after:
                if f2 > most_after:
                    return None
                continue
            if f1 - f2 < self.sigmas * hypot(deviation, deviation2):
                continue
            m2 = allocation.models[name]
            turn_s = (self.patience_s or 0.0) if reversible else 0.0
            instance = allocation.replica(m2, m1, served_s=max(self.min_residency_s, turn_s))
            if instance is not None:
                reason = f"f({m1.id})={f1:g} > t1={self.t1:g}; f({m2.id})={f2:g} is least"
                return Swap(instance=instance.id, model=m1.id, deadline_s=self.deadline_s, reason=reason)
        return None

    def _far_apart(self, f1: float, f2: float) -> bool:
        return f1 > self.b * f2 if self.reading == "ratio" else f1 - f2 > self.b

    def _end_wait(self, allocation: Allocation, m1: ModelView) -> Swap | None:
        """Take a replica for a model that has none and has waited too long."""
        waited_s = allocation.waited_s(m1)
        if self.patience_s is None or allocation.load(m1) < inf or waited_s < self.patience_s:
            return None
        found = allocation.best_donor(m1, served_s=max(self.patience_s, self.min_residency_s))
        if found is None:
            return None
        m2, instance = found
        reason = f"{m1.id} has waited {waited_s:.3g} s without a replica; f({m2.id})={allocation.load(m2):g}"
        return Swap(instance=instance.id, model=m1.id, deadline_s=self.deadline_s, reason=reason)
