"""One plan of `StartupTimePlacement`: which instances swap to which model, decided model by model."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf
from typing import Literal, NamedTuple, TypeAlias

from hotswap.action import Migrate, Swap
from hotswap.policies.schedulers.allocation import Allocation
from hotswap.policies.schedulers.instances import is_leaving
from hotswap.policies.schedulers.startup_time.capacity import SpareCapacity
from hotswap.policies.schedulers.startup_time.knapsack import Offer, Pool, choose
from hotswap.policies.schedulers.startup_time.soonest_empty import SoonestEmpty, disruption, lru_key
from hotswap.policies.startup_costs import QueuedLoads, StartupCosts
from hotswap.request import ModelId
from hotswap.view import FleetView, InstanceId, InstanceState, InstanceView, ModelView, RunningView

__all__ = ["Start", "StartupPlan", "Victims"]

Victims: TypeAlias = Literal["move", "evict", "stay"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """An instance that swaps to a model, and the seconds until it is ready.

    If there is a `replacement`, that instance loads the victims' model and takes their requests.
    """

    instance: InstanceView
    seconds: float
    replacement: InstanceView | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Clearing:
    """What it takes to empty an instance.

    Attributes:
        all_known: False while a request is assigned to the instance that the view does not show running.
        seconds: Until all requests have left.
        movers: The requests that would have to move and do not move yet; the others end sooner.
    """

    all_known: bool
    seconds: float
    movers: tuple[RunningView, ...]


class _Ranked(NamedTuple):
    """An offer with the key it is compared by: seconds, then disruption, then the least recently used."""

    seconds: float
    disruption: int
    lru_key: tuple[float, int, InstanceId]
    offer: Offer


class StartupPlan:
    """The state of one plan: what the view shows, and what has been decided so far."""

    def __init__(
        self,
        fleet: FleetView,
        costs: StartupCosts,
        loads: QueuedLoads,
        victims: Victims,
        deadline_s: float,
    ) -> None:
        self._fleet, self._costs, self._victims, self._deadline_s = fleet, costs, victims, deadline_s
        self._loads = loads
        self._num_nodes = len({instance.node for instance in fleet.instances})
        self._allocation = Allocation(fleet)
        self._instances = {i.id: i for i in sorted(fleet.instances, key=lambda i: i.id)}
        self._capacity = SpareCapacity(fleet, self._instances.values())
        self._swapping = [instance for instance in self._instances.values() if is_leaving(instance)]
        self._destinations: set[InstanceId] = set()  # of moves
        self._clearings: dict[InstanceId, _Clearing] = {}
        self._busy: dict[str, SoonestEmpty] = {}

    # ------------------------------------------------------------------ where a model starts

    def waiting_models(self) -> list[ModelView]:
        """Return the models with waiting requests, the longest wait first."""
        waiting = [m for m in self._allocation.models.values() if m.num_waiting]
        return sorted(waiting, key=lambda m: (-self._allocation.waited_s(m, since_turn=False), m.id))

    def start(self, model: ModelView) -> list[Start]:
        """Choose the instances on which the model is started best, and take them.

        Empty where its requests are served sooner by its present replicas, or no instance may swap.
        """
        num_waiting = model.num_waiting - self._num_places(model.id)
        soonest = self._soonest(model) if num_waiting > 0 else None
        if soonest is None:
            return []
        need = num_waiting - self._num_ending_within(soonest.seconds, model.id)
        if need <= 0:
            return []
        # Usually one instance is enough, and more cost more.
        offers = (soonest,) if need <= soonest.places else choose(self._pools(model), need)
        taken = {offer.instance for offer in offers}
        starts: list[Start] = []
        for offer in offers:
            starts.append(self._with_replacement(model, offer, taken) or self._direct(offer))
            taken.add(starts[-1].instance.id)
        for start in starts:
            self._take(start.instance, model.id)
            if start.replacement is not None and start.instance.model is not None:
                self._take(start.replacement, start.instance.model)
        nodes = dict.fromkeys(s.instance.node for s in starts if s.instance.preloaded != model.id)
        for node in nodes:
            self._loads.queue(model.id, node)
        return starts

    def _num_places(self, model: ModelId) -> int:
        """How many waiting requests of a model its replicas will take, those still loading included."""
        replicas = (replica for replica in self._capacity.replicas(model) if replica.open)
        now = sum(replica.max_requests - replica.num_requests for replica in replicas)
        soon = sum(instance.max_requests for instance in self._swapping if instance.target == model)
        if self._victims != "move":
            return now + soon
        leaving = (instance for instance in self._leaving() if instance.model == model)
        return now + soon - sum(len(self._clearing(instance).movers) for instance in leaving)

    def _num_ending_within(self, seconds: float, model: ModelId) -> int:
        """How many running requests of a model end within `seconds`, each of which frees a place."""
        runs = (run for replica in self._capacity.replicas(model) for run in self._running_on(replica))
        return bisect_right(sorted(self._costs.rest_s(run.num_remaining) for run in runs), seconds)

    def _take(self, instance: InstanceView, model: ModelId) -> None:
        self._allocation.swap(Swap(instance=instance.id, model=model))
        self._capacity.remove(instance)

    def _direct(self, offer: Offer) -> Start:
        return Start(instance=self._instances[offer.instance], seconds=offer.seconds)

    # ------------------------------------------------------------------ through a replacement

    def _with_replacement(
        self, model: ModelView, offer: Offer, taken: Collection[InstanceId]
    ) -> Start | None:
        """A start on a busy instance, whose requests go to the offered one, if that is ready sooner."""
        replacement = self._instances[offer.instance]
        if self._num_nodes < 2 or replacement.num_requests or self._victims == "stay":
            return None  # with one node every instance is as near to the weights as any other
        starts = [
            (self._with_replacement_s(model, instance, replacement), instance)
            for instance in self._allocation.swappable(model)
            if instance.num_requests
            and instance.id not in taken
            and self._loads.at(model.id, instance) < offer.seconds
        ]
        seconds, instance = min(starts, key=lambda start: (start[0], start[1].id), default=(inf, replacement))
        if seconds >= offer.seconds:
            return None
        if instance.model is not None and replacement.preloaded != instance.model:
            self._loads.queue(instance.model, replacement.node)
        return Start(instance=instance, seconds=seconds, replacement=replacement)

    def _with_replacement_s(
        self, model: ModelView, instance: InstanceView, replacement: InstanceView
    ) -> float:
        """Seconds until the model is ready on a busy instance; infinite where that is not allowed."""
        clearing, donor = self._clearing(instance), self._allocation.models.get(instance.model or ModelId(""))
        barred = (
            not clearing.all_known
            or instance.id in self._destinations
            or instance.model == replacement.model
            or len(clearing.movers) > replacement.max_requests
        )
        if barred or donor is None or donor.num_waiting:
            return inf
        if not self._allocation.can_swap(replacement, donor):
            return inf
        load_s = self._loads.at(model.id, instance)
        if self._victims == "evict":
            return load_s
        cleared_s = self._loads.at(donor.id, replacement) + clearing.seconds
        return cleared_s + load_s if cleared_s <= self._deadline_s else inf  # later they would be evicted

    # ------------------------------------------------------------------ which instances may swap

    def _soonest(self, model: ModelView) -> Offer | None:
        """The offer of the fewest seconds; ties go to the least disruption, then the least recently used.

        Running requests are read only where every instance without requests would be later.
        """
        preloaded = self._preloaded.get(model.id, ())
        best = min((f for instance in preloaded if (f := self._rank(model, instance))), default=None)
        load_s = {node: self._loads.load_s(model.id, node) for node in self._by_node}
        for least_disruption, instances_of in ((0, self._idle_by_node.__getitem__), (2, self._busy_on)):
            for node, seconds in load_s.items():
                if best is not None and best < (seconds, least_disruption):
                    continue  # no instance of this node is better
                others = (i for i in instances_of(node) if i.preloaded != model.id)
                found = next((f for instance in others if (f := self._rank(model, instance))), None)
                best = min((f for f in (best, found) if f is not None), default=None)
        return best.offer if best else None

    def _rank(self, model: ModelView, instance: InstanceView) -> _Ranked | None:
        """What an instance offers to a model; `None` if it may not swap."""
        if not self._allocation.can_swap(instance, model):
            return None
        offer = self._offer(model, instance)
        if offer is None:
            return None
        if instance.model is not None and offer.capacity > self._spare_capacity(instance.model):
            return None
        return _Ranked(offer.seconds, offer.disruption, lru_key(instance), offer)

    def _offer(self, model: ModelView, instance: InstanceView) -> Offer | None:
        clearing = self._clearing(instance)
        if not clearing.all_known or instance.id in self._destinations:
            return None
        return Offer(
            instance=instance.id,
            places=instance.max_requests,
            seconds=clearing.seconds + self._loads.at(model.id, instance),
            disruption=disruption(instance),
            capacity=self._capacity.of(instance) + len(clearing.movers),
        )

    def _spare_capacity(self, model: ModelId) -> int:
        """How many more requests of a model its replicas can take, beyond those that wait for it."""
        return self._capacity.total(model) - self._allocation.models[model].num_waiting

    def _pools(self, model: ModelView) -> list[Pool]:
        """The offers to a model by the model that an instance has now, the least recently used first."""
        offers: defaultdict[ModelId | None, list[Offer]] = defaultdict(list)
        swappable = {instance.id for instance in self._allocation.swappable(model)}
        for instance in sorted(self._instances.values(), key=lru_key):
            if instance.id in swappable and (offer := self._offer(model, instance)):
                offers[instance.model].append(offer)
        return [self._pool(donor, found) for donor, found in offers.items()]

    def _pool(self, donor: ModelId | None, offers: list[Offer]) -> Pool:
        """Bound what one model gives up; an offer that is too large by itself is left out."""
        if donor is None:
            return Pool(offers=tuple(offers), max_offers=len(offers))
        capacity = self._spare_capacity(donor)
        fitting = tuple(offer for offer in offers if offer.capacity <= capacity)
        max_offers = self._allocation.num_spare(self._allocation.models[donor])
        return Pool(offers=fitting, max_offers=max_offers, capacity=capacity)

    @cached_property
    def _by_node(self) -> dict[str, list[InstanceView]]:
        """All instances by node."""
        nodes: defaultdict[str, list[InstanceView]] = defaultdict(list)
        for instance in self._instances.values():
            nodes[instance.node].append(instance)
        return nodes

    @cached_property
    def _idle_by_node(self) -> dict[str, list[InstanceView]]:
        """The instances without requests by node, the best first."""
        idle = {node: [i for i in group if not i.num_requests] for node, group in self._by_node.items()}
        return {
            node: sorted(group, key=lambda i: (disruption(i), lru_key(i))) for node, group in idle.items()
        }

    @cached_property
    def _preloaded(self) -> dict[ModelId, list[InstanceView]]:
        """The instances by the model that they have preloaded."""
        preloaded: defaultdict[ModelId, list[InstanceView]] = defaultdict(list)
        for instance in self._instances.values():
            if instance.preloaded is not None:
                preloaded[instance.preloaded].append(instance)
        return preloaded

    def _busy_on(self, node: str) -> Iterable[InstanceView]:
        """The instances of a node that have requests, the best first."""
        if self._victims == "stay":
            return ()
        if node not in self._busy:
            busy = (i for i in self._by_node[node] if i.num_requests)
            self._busy[node] = SoonestEmpty(self._fleet, busy, self._cleared_s)
        return self._busy[node]

    # ------------------------------------------------------------------ requests that have to leave

    def _leaving(self) -> Iterator[InstanceView]:
        """The instances that swap to another model while requests may still run there."""
        running = (InstanceState.SERVING, InstanceState.DRAINING)
        return (instance for instance in self._swapping if instance.state in running)

    def _running_on(self, instance: InstanceView) -> list[RunningView]:
        return sorted(self._fleet.running_on(instance.id), key=lambda run: run.id)

    def _clearing(self, instance: InstanceView) -> _Clearing:
        """What it takes to empty an instance; worked out once."""
        clearing = self._clearings.get(instance.id)
        if clearing is None:
            runs = self._running_on(instance)
            stay = self._victims == "stay"
            clearing = self._clearings[instance.id] = _Clearing(
                all_known=not instance.num_requests if stay else len(runs) >= instance.num_requests,
                seconds=self._cleared_s(runs),
                movers=tuple(run for run in runs if self._victims != "move" or self._has_to_move(run)),
            )
        return clearing

    def _cleared_s(self, runs: Sequence[RunningView]) -> float:
        """Seconds until requests have left."""
        return self._costs.leave_s(runs) if self._victims == "move" else 0.0

    def _has_to_move(self, run: RunningView) -> bool:
        """Whether a request neither ends sooner than it could move nor moves already."""
        return not run.moving and self._costs.rest_s(run.num_remaining) > self._costs.resume_s(run.num_tokens)

    def moves(self, instance: InstanceView, reason: str) -> Iterator[Migrate]:
        """Yield the moves of an instance's requests to replicas that stay, those with most places first."""
        for run in self._clearing(instance).movers:
            destination = self._capacity.reserve(run.model)
            if destination is None:
                return
            self._destinations.add(destination)
            yield Migrate(request=run.id, destination=destination, reason=reason)

    def evacuate(self) -> Iterator[Migrate]:
        """Yield more moves off the instances that are swapping already."""
        for instance in self._leaving():
            swap = "is unloaded" if instance.target is None else f"swaps to {instance.target}"
            yield from self.moves(instance, f"{instance.id} {swap}")
