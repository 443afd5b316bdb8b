"""ServerlessLLM's placement: a model starts where that takes the least time, victims move out of its way."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import inf, isfinite

from hotswap.action import Action, Migrate, Swap
from hotswap.errors import ConfigError
from hotswap.policies.allocation import Allocation, turns_away, used_s
from hotswap.policies.knapsack import Offer, Pool, choose
from hotswap.policies.startup_cost import StartupCosts
from hotswap.request import ModelId
from hotswap.scheduler import Scheduler
from hotswap.view import (
    FleetView,
    InstanceId,
    InstanceState,
    InstanceView,
    ModelView,
    Residency,
    RunningView,
    StoreView,
)

__all__ = ["StartupTimePlacement"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StartupTimePlacement(Scheduler):
    """Starts a model for which requests wait where it takes the least time, moving others away if need be.

    Source: ServerlessLLM (Fu et al., OSDI 2024), section 6. For a model with waiting requests and no place
    for them, each instance has a startup time, load and migrations together:

        EMPTY or idle    q + n / b                                        the load alone
        busy             sum of a (t_in + t_out) + b over its requests,   they move to other replicas first
                         + q + n / b

    The requests that a busy replica of the model takes sooner than the quickest of these wait for it; for the
    others instances are chosen by an exact 0/1 knapsack (`hotswap.policies.knapsack`) over the places that
    they have, at the least sum of startup times. Equal sums go to those from whom fewer lose: EMPTY, then
    idle, used longest ago first, then busy.

    **Readings.** In the paper a victim is an inference that holds GPUs, and GPUs are what the knapsack frees.
    Here an instance holds one model and many requests. So a victim is an instance with all that runs on it,
    what it frees are places for waiting requests (`max_requests`), and its cost is that of all its requests:
    they move one after the other, so times add up. A request that will end sooner than it could move is left
    to end meanwhile. A victim's requests go to replicas of its model that are open and stay; the paper also
    loads another replica for them elsewhere, which is left to the next plan, when its own requests wait. The
    queue *q* grows with each model that one plan loads, not with a model's replicas, which read the same
    bytes. Models take their turn by the longest wait, halved for each failed load.

    **Ours.** What room a replica has is counted in whole requests, each as large as its model's largest, and
    less what waits for that model already. Nobody is evicted to make room, but for a request that comes to an
    idle instance in the moment in which it begins to turn: where no room is, the model waits. More active
    models than instances need a policy beside this one that is less patient
    (`InOrder(StartupTimePlacement(), WeightedLoadSwap(...))`). Floors are never broken; `RestoreFloors` is
    what brings them back.

    The swap away from a busy instance begins together with the moves, so that it soon takes nobody new, and
    gives them `deadline_s` seconds; whoever is left then is evicted, and goes on elsewhere for a prefill.
    While an instance turns, later plans go on moving its requests, whoever planned the swap: an instance
    takes part in `MigrationLimits.per_instance` moves at once and the fleet drops what is beyond.

    `costs` learns from records only where the fleet is given its learners; see there.
    """

    costs: StartupCosts = field(default_factory=StartupCosts)
    deadline_s: float = 30.0

    def __post_init__(self) -> None:
        if not (self.deadline_s >= 0 and isfinite(self.deadline_s)):
            raise ConfigError(f"deadline_s is {self.deadline_s!r}; give 0 (evict at once) or more seconds.")

    def plan(self, fleet: FleetView) -> Sequence[Action]:
        board = _Board(fleet, self.costs)
        return (*board.evacuate(), *self._starts(board))

    def _starts(self, board: _Board) -> Iterator[Action]:
        for model in board.starved():
            picks = board.pick(model)
            for instance, seconds in picks:
                reason = f"{model.num_waiting} wait for {model.id}; {instance.id} is ready in {seconds:.3g} s"
                yield from board.moves(instance, reason)
                deadline_s = self.deadline_s if instance.num_requests else 0.0
                yield Swap(instance=instance.id, model=model.id, deadline_s=deadline_s, reason=reason)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Victims:
    """Who would have to leave an instance, and how soon it would be empty.

    `all_known` is false while requests are on their way to it. `movers` are those that would have to move,
    and do not yet; the others end sooner.
    """

    all_known: bool
    seconds: float
    movers: tuple[RunningView, ...]


class _Board:
    """What one plan knows, and has decided so far."""

    def __init__(self, fleet: FleetView, costs: StartupCosts) -> None:
        self._costs = costs
        self._store = fleet.store
        self._allocation = Allocation(fleet)
        self._instances = {i.id: i for i in sorted(fleet.instances, key=lambda i: i.id)}
        self._running: defaultdict[InstanceId, list[RunningView]] = defaultdict(list)
        self._largest: Counter[ModelId] = Counter()
        self._longest: Counter[ModelId] = Counter()
        for run in sorted(fleet.running, key=lambda run: run.id):
            self._running[run.instance].append(run)
            self._largest[run.model] = max(self._largest[run.model], run.num_tokens)
            self._longest[run.model] = max(self._longest[run.model], run.num_tokens + run.num_remaining)
        self._replicas: defaultdict[ModelId, list[InstanceView]] = defaultdict(list)
        self._places: Counter[ModelId] = Counter()
        for instance in self._instances.values():
            self._count(instance)
        self._room = {i.id: self._room_at(i) for replicas in self._replicas.values() for i in replicas}
        self._receiving: set[InstanceId] = set()
        self._known_victims: dict[InstanceId, _Victims] = {}

    def _count(self, instance: InstanceView) -> None:
        """Note whose requests an instance takes, now or as soon as it has turned."""
        if turns_away(instance):
            if instance.target is not None:
                self._places[instance.target] += instance.max_requests
        elif instance.model is not None and instance.state is InstanceState.SERVING:
            self._replicas[instance.model].append(instance)
            if instance.open:
                self._places[instance.model] += instance.max_requests - instance.num_requests

    def _room_at(self, instance: InstanceView) -> int:
        """How many of its model's requests an instance could take, each as large as the largest of them."""
        if not instance.open or instance.model is None:
            return 0
        places = instance.max_requests - instance.num_requests
        if instance.max_tokens is None:
            return places
        if self._longest[instance.model] > instance.max_tokens:
            return 0
        blocks = self._largest[instance.model] // instance.kv_block_tokens + 1
        return min(places, instance.num_free_kv_blocks // blocks)

    # ------------------------------------------------------------------ where a model starts

    def starved(self) -> list[ModelView]:
        """The models that have requests waiting, longest wait first."""
        waiting = [m for m in self._allocation.models.values() if m.num_waiting]
        return sorted(waiting, key=lambda m: (-self._allocation.waited_s(m), m.id))

    def pick(self, model: ModelView) -> list[tuple[InstanceView, float]]:
        """Take the instances on which a model is best started, and say in how many seconds each is ready.

        Empty where its requests had better wait for its replicas, or nothing can be had.
        """
        num_waiting = model.num_waiting - self._places[model.id]
        pools = self._pools(model) if num_waiting > 0 else []
        quickest_s = min((offer.seconds for pool in pools for offer in pool.offers), default=inf)
        need = num_waiting - self._num_ending_within(quickest_s, model.id)
        picks = [(self._instances[o.instance], o.seconds) for o in choose(pools, need)] if need > 0 else []
        for instance, _ in picks:
            self._allocation.take(Swap(instance=instance.id, model=model.id))
            self._room.pop(instance.id, None)
        if any(instance.preloaded != model.id for instance, _ in picks):
            self._store = _asked_for(self._store, model.id)
        return picks

    def _num_ending_within(self, seconds: float, model: ModelId) -> int:
        """How many of a model's waiting requests its replicas will have taken by then."""
        runs = (run for replica in self._replicas[model] for run in self._running[replica.id])
        return bisect_right(sorted(self._costs.rest_s(run.num_remaining) for run in runs), seconds)

    def _pools(self, model: ModelView) -> list[Pool]:
        """What may be turned to a model, by the model that it has now; used longest ago first."""
        load_s = self._costs.loads.load_s(self._store, model.id)
        offers: defaultdict[ModelId | None, list[Offer]] = defaultdict(list)
        for instance in sorted(self._allocation.takeable(model), key=_preference):
            victims = self._victims(instance)
            if victims.all_known and instance.id not in self._receiving:
                offer = Offer(
                    instance=instance.id,
                    slots=instance.max_requests,
                    seconds=victims.seconds + (0.0 if instance.preloaded == model.id else load_s),
                    harm=0 if instance.state is InstanceState.EMPTY else 1 + instance.num_requests,
                    room=self._room.get(instance.id, 0) + len(victims.movers),
                )
                offers[instance.model].append(offer)
        return [self._pool(donor, found) for donor, found in offers.items()]

    def _pool(self, donor: ModelId | None, offers: list[Offer]) -> Pool:
        """Bound what one model may give; an offer that is too large by itself is none."""
        if donor is None:
            return Pool(offers=tuple(offers), most=len(offers))
        model = self._allocation.models[donor]
        room = sum(self._room.get(replica.id, 0) for replica in self._replicas[donor]) - model.num_waiting
        fitting = tuple(offer for offer in offers if offer.room <= room)
        return Pool(offers=fitting, most=self._allocation.num_spare(model), room=room)

    # ------------------------------------------------------------------ victims

    def _victims(self, instance: InstanceView) -> _Victims:
        """Who would have to leave an instance; read once, since a plan moves nobody."""
        if instance.id not in self._known_victims:
            self._known_victims[instance.id] = self._look_at(instance)
        return self._known_victims[instance.id]

    def _look_at(self, instance: InstanceView) -> _Victims:
        runs = self._running[instance.id]
        times_s = [
            (self._costs.rest_s(run.num_remaining), self._costs.resume_s(run.num_tokens)) for run in runs
        ]
        return _Victims(
            all_known=len(runs) >= instance.num_requests,
            seconds=max(
                sum(resume_s for rest_s, resume_s in times_s if rest_s > resume_s),
                max((rest_s for rest_s, resume_s in times_s if rest_s <= resume_s), default=0.0),
            ),
            movers=tuple(
                run
                for run, (rest_s, resume_s) in zip(runs, times_s, strict=True)
                if rest_s > resume_s and not run.moving
            ),
        )

    def moves(self, instance: InstanceView, reason: str) -> Iterator[Migrate]:
        """Send the requests of an instance to replicas that stay, the roomiest first."""
        for run in self._victims(instance).movers:
            others = [r for r in self._replicas[run.model] if self._room.get(r.id, 0) > 0]
            if not others:
                return
            to = min(others, key=lambda replica: (-self._room[replica.id], replica.id))
            self._room[to.id] -= 1
            self._receiving.add(to.id)
            yield Migrate(request=run.id, destination=to.id, reason=reason)

    def evacuate(self) -> Iterator[Migrate]:
        """Go on moving requests off the instances that are turning to another model."""
        for instance in self._instances.values():
            runs_on = instance.state in (InstanceState.SERVING, InstanceState.DRAINING)
            if turns_away(instance) and runs_on:
                turns = "is unloaded" if instance.target is None else f"turns to {instance.target}"
                yield from self.moves(instance, f"{instance.id} {turns}")


def _preference(instance: InstanceView) -> tuple[float, int, InstanceId]:
    """EMPTY ones first, small ones before large; then those used longest ago."""
    return used_s(instance), instance.memory_bytes, instance.id


def _asked_for(store: StoreView, model: ModelId) -> StoreView:
    """The store once a model has been asked for: its bytes are queued, and count once."""
    tier = store.tier_of(model)
    num_bytes = None if tier is None else store.load_bytes(model, tier)
    if tier is None or num_bytes is None:
        return store
    own_bytes = num_bytes - next(link.queued_bytes for link in store.tiers if link.name == tier)
    return replace(
        store,
        tiers=tuple(replace(t, queued_bytes=num_bytes) if t.name == tier else t for t in store.tiers),
        rising=(*store.rising, Residency(model=model, tier=tier, size_bytes=own_bytes)),
    )
