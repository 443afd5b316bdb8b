"""Shepherd's preemption rule for swaps: a large waiting batch displaces a small running one. A baseline."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import isfinite

from hotswap.action import Action, Swap
from hotswap.argument_kinds import check_arguments
from hotswap.errors import ConfigError
from hotswap.policies.schedulers.allocation import Allocation
from hotswap.policies.schedulers.instances import is_leaving, used_s
from hotswap.scheduler import Scheduler
from hotswap.view import FleetView, InstanceId, InstanceState, InstanceView, ModelView

__all__ = ["ShepherdSwap"]


@check_arguments
@dataclass(frozen=True, slots=True, kw_only=True)
class ShepherdSwap(Scheduler):
    """Takes the instance with the least running work for a model with over `lambda_` times that work waiting.

    Source: the preemption rule of Shepherd's online algorithm (Zhang et al., NSDI 2023), and its use for
    swaps, the baseline Shepherd* of ServerlessLLM (Fu et al., OSDI 2024): a waiting batch displaces the
    running one if it is larger by a factor of lambda.

    **Readings.** A batch is the requests of one model that an instance could take at once: at most
    `max_requests` of the waiting requests, or all running ones. Its size is the number of requests times the
    model's `weight`, since Shepherd compares batches by their value and its requests are worth the same.
    The waiting batch must be larger by more than the factor, so an idle instance may always be taken and at
    `lambda_=1` an equal batch stays. Requests that free or loading replicas of their model will take do not
    count as waiting. Shepherd's deadlines, its groups of models and its planner are left out. Evicted
    requests continue elsewhere with their tokens, where Shepherd starts a batch again.

    **Ours:** `min_replicas` are kept, and of equal victims the least recently used is taken. Running requests
    get `deadline_s` to finish, by default none. A displaced batch may displace in turn once it waits: with
    `lambda_` over 1 only when more requests have come for it meanwhile.

    **What to set.** `lambda_` matters: with more active models than instances a lower one serves more
    requests in time, for up to twice as many swaps (`docs/papers.md`). The default is ServerlessLLM's.
    `deadline_s` hardly matters; what running requests gain by it, waiting ones lose.
    """

    lambda_: float = 3.0
    deadline_s: float = 0.0

    def __post_init__(self) -> None:
        if not (self.lambda_ >= 1 and isfinite(self.lambda_)):
            raise ConfigError(f"lambda_ is {self.lambda_!r}; give a finite factor of 1 or more.")
        if not (self.deadline_s >= 0 and isfinite(self.deadline_s)):
            raise ConfigError(f"deadline_s is {self.deadline_s!r}; give 0 (evict at once) or more seconds.")

    def plan(self, fleet: FleetView) -> Sequence[Action]:
        return tuple(self._swaps(Allocation(fleet), fleet))

    def _swaps(self, allocation: Allocation, fleet: FleetView) -> Iterator[Swap]:
        waiting = {m.id: m.num_waiting - _num_places(fleet, m) for m in allocation.models.values()}
        waiting_models = [m for m in allocation.models.values() if waiting[m.id] > 0]
        while waiting_models:

            def urgency(model: ModelView) -> tuple[float, float, str]:
                return -waiting[model.id] * model.weight, -allocation.waited_s(model), model.id

            model = min(waiting_models, key=urgency)
            swap, places = self._next(allocation, model, waiting[model.id])
            if swap is not None:
                allocation.swap(swap)
                yield swap
            waiting[model.id] -= places
            if swap is None or waiting[model.id] <= 0:
                waiting_models.remove(model)

    def _next(self, allocation: Allocation, model: ModelView, num_waiting: int) -> tuple[Swap | None, int]:
        """The swap that gives a model an instance, if there is one to take, and the number of its places."""

        def work(instance: InstanceView) -> float:
            donor = allocation.models.get(instance.model) if instance.model is not None else None
            return 0.0 if donor is None else instance.num_requests * donor.weight

        def preference(instance: InstanceView) -> tuple[float, bool, float, int, InstanceId]:
            taken = instance.state is not InstanceState.EMPTY
            return work(instance), taken, used_s(instance), instance.memory_bytes, instance.id

        for instance in sorted(allocation.swappable(model), key=preference):
            batch = min(num_waiting, instance.max_requests) * model.weight
            if batch > self.lambda_ * work(instance):
                reason = f"{batch:g} of work wait for {model.id}; {instance.id} has {work(instance):g}"
                deadline_s = self.deadline_s if instance.num_requests else 0.0
                swap = Swap(instance=instance.id, model=model.id, deadline_s=deadline_s, reason=reason)
                return swap, instance.max_requests
        return None, 0


def _num_places(fleet: FleetView, model: ModelView) -> int:
    """How many waiting requests of a model its present and loading replicas will take."""
    coming = sum(i.max_requests for i in fleet.instances if is_leaving(i) and i.target == model.id)
    open_ones = (i for i in fleet.serving(model.id) if not is_leaving(i))
    return coming + sum(i.max_requests - i.num_requests for i in open_ones)
