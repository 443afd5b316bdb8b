"""ServerlessLLM's placement: a model starts on the instance that is ready soonest, busy ones included."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import get_args

from hotswap.action import Action, Swap
from hotswap.argument_kinds import check_arguments
from hotswap.errors import ConfigError
from hotswap.policies.schedulers.startup_time.plan import StartupPlan, Victims
from hotswap.policies.startup_costs import QueuedLoads, StartupCosts
from hotswap.scheduler import Scheduler
from hotswap.view import FleetView

__all__ = ["StartupTimePlacement"]


@check_arguments
@dataclass(frozen=True, slots=True, kw_only=True)
class StartupTimePlacement(Scheduler):
    """Starts a model with waiting requests where its startup time is least; requests there move away.

    Source: ServerlessLLM (Fu et al., OSDI 2024), section 6. For a model that has more waiting requests than
    places, each instance has a startup time, which is the load and the moves before it:

        EMPTY or idle     q + n / b                                        the load alone
        busy              sum of a (t_in + t_out) + b over its requests,   they move to other replicas first
                          + q + n / b
        busy, and other   q' + n' / b' of its model on an EMPTY or idle    that instance then takes its
        replicas full     instance, and then the line above                requests

    *q* and *b* are those of the instance's node: where tiers belong to nodes, a model in the memory of a node
    loads quickly on the instances of that node alone. The last line is for that case: the busy instance is
    near to the weights, and the free one is not.

    Requests that a busy replica of the model will take sooner than the best startup time keep waiting for
    that replica. For the others the instances are chosen by an exact 0/1 knapsack (`.knapsack`) over their
    places, at the least sum of startup times. Ties go to the least disruption: EMPTY, then idle with the
    least recently used first, then busy.

    **Readings.** In the paper a victim is an inference that holds GPUs, and the knapsack frees GPUs. Here an
    instance holds one model and many requests. So:

    - A victim is an instance with all its requests. It frees places for waiting requests (`max_requests`).
      Its cost is that of all its requests: they move one after another, so their times add up. A request that
      ends sooner than it could move is left to end.
    - The victim's requests move to open replicas of their model that keep it. Or their model is loaded for
      them: on an instance without requests that the knapsack had chosen, if that is sooner, and only if no
      request waits for the victim's model.
    - *q* grows with each model that one plan loads on a node. Replicas of one model on one node read the same
      bytes, so they count once.
    - The paper places one request at a time. Here the model whose oldest request has waited longest goes
      first, with the wait halved for each failed load, however many replicas it has or gave up.
    - A place that comes free or is loaded is first for requests that move there. Waiting requests count on
      what is left.

    **Ours.** The capacity of a replica is counted in whole requests, each as large as the largest of its
    model, less the requests that wait for that model already. No request is evicted to make room, but for one
    that comes to an idle instance in the moment in which its swap begins. Without room the model waits. With
    more active models than instances, chain a scheduler behind this one that takes turns
    (`Chain(StartupTimePlacement(), WeightedLoadSwap())`). `min_replicas` are never violated;
    `RestoreMinReplicas` restores them.

    The swap of a busy instance begins together with the moves, so that the instance soon admits no request,
    and has a deadline of `deadline_s`. Requests that are left then are evicted, and continue elsewhere for
    one prefill. Later plans go on moving requests off an instance that is swapping, whichever policy planned
    the swap: an instance takes part in `MigrationLimits.per_instance` moves at once, and the fleet drops the
    rest.

    The paper compares moves with two other treatments of victims. `victims="evict"` chooses likewise and
    evicts at once, which costs the starting model nothing, and the victims a prefill elsewhere, once there is
    room or their model is loaded (its Shepherd*). `victims="stay"` leaves busy instances alone.

    **What to set.** `costs`, if anything: what a move takes decides between busy instances and loads. It
    learns from records only if the fleet is given its learners; see `StartupCosts`. `deadline_s` hardly
    matters, as moves rarely take so long.

    Attributes:
        costs: The times of moves and of the rest of requests; and of loads from tiers without a measured one.
        deadline_s: Seconds that the requests of a busy instance get to move or end.
        victims: What becomes of those requests.
        measured: Takes the times of loads, by tier, and of unloads from what the fleet has measured
            (`FleetView.times`). With False all loads take what `costs` tells, and unloads no time, as in the
            paper.
    """

    costs: StartupCosts = field(default_factory=StartupCosts)
    deadline_s: float = 30.0
    victims: Victims = "move"
    measured: bool = True

    def __post_init__(self) -> None:
        if self.victims not in get_args(Victims):
            raise ConfigError(f"victims is {self.victims!r}; give 'move', 'evict' or 'stay'.")
        if not (self.deadline_s >= 0 and isfinite(self.deadline_s)):
            raise ConfigError(f"deadline_s is {self.deadline_s!r}; give 0 (evict at once) or more seconds.")

    def plan(self, fleet: FleetView) -> Sequence[Action]:
        loads = QueuedLoads(self.costs.loads, fleet.store, fleet.times if self.measured else None)
        plan = StartupPlan(fleet, self.costs, loads, self.victims, self.deadline_s)
        evacuated = plan.evacuate() if self.victims == "move" else ()
        return (*evacuated, *self._starts(plan))

    def _starts(self, plan: StartupPlan) -> Iterator[Action]:
        for model in plan.waiting_models():
            for start in plan.start(model):
                instance = start.instance
                ready = f"{instance.id} is ready in {start.seconds:.3g} s"
                reason = f"{model.num_waiting} wait for {model.id}; {ready}"
                if start.replacement is not None and instance.model is not None:
                    takes = f"takes the requests of {instance.id}: {reason}"
                    yield Swap(instance=start.replacement.id, model=instance.model, reason=takes)
                if self.victims == "move":
                    yield from plan.moves(instance, reason)
                moves = instance.num_requests and self.victims == "move"
                deadline_s = self.deadline_s if moves else 0.0
                yield Swap(instance=instance.id, model=model.id, deadline_s=deadline_s, reason=reason)
