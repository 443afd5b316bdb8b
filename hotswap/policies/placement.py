"""ServerlessLLM's placement: a model starts where that takes the least time, victims move out of its way."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import inf, isfinite
from typing import Literal, TypeAlias, get_args

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

Victims: TypeAlias = Literal["move", "evict", "stay"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StartupTimePlacement(Scheduler):
    """Starts a model for which requests wait where it takes the least time, moving others away if need be.

    Source: ServerlessLLM (Fu et al., OSDI 2024), section 6. For a model with waiting requests and no place
    for them, each instance has a startup time, load and migrations together:

        EMPTY or idle    q + n / b                                        the load alone
        busy             sum of a (t_in + t_out) + b over its requests,   they move to other replicas first
                         + q + n / b
        busy, and no     q' + n' / b' of its model on an EMPTY or idle    which then takes its requests
        room elsewhere   instance, and then the same

    *q* and *b* are those that the instance sees: where tiers belong to nodes, a model that lies in the memory
    of a node is near to the instances there. That is what the last line is for: the busy instance has the
    model near, the one that is free does not.

    The requests that a busy replica of the model takes sooner than the quickest of these wait for it; for the
    others instances are chosen by an exact 0/1 knapsack (`hotswap.policies.knapsack`) over the places that
    they have, at the least sum of startup times. Equal sums go to those from whom fewer lose: EMPTY, then
    idle, used longest ago first, then busy.

    **Readings.** In the paper a victim is an inference that holds GPUs, and GPUs are what the knapsack frees.
    Here an instance holds one model and many requests. So a victim is an instance with all that runs on it,
    what it frees are places for waiting requests (`max_requests`), and its cost is that of all its requests:
    they move one after the other, so times add up. A request that will end sooner than it could move is left
    to end meanwhile. A victim's requests go to replicas of its model that are open and stay. Or one is loaded
    for them: instead of an instance without requests that the knapsack has chosen, where that is sooner, and
    if nobody waits for the victim's model. The queue *q* grows with each model that one plan loads, not with
    a model's replicas on a node, which read the same bytes. Models take their turn by the longest wait,
    halved for each failed load.

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

    The paper compares moves with other ways to treat victims: `victims="evict"` chooses likewise and ends
    their work here at once, which costs the model that starts nothing, and them a prefill elsewhere, once
    there is room or their model is loaded (its Shepherd*). `"stay"` leaves busy instances alone.

    `costs` learns from records only where the fleet is given its learners; see there.
    """

    costs: StartupCosts = field(default_factory=StartupCosts)
    deadline_s: float = 30.0
    victims: Victims = "move"

    def __post_init__(self) -> None:
        if self.victims not in get_args(Victims):
            raise ConfigError(f"victims is {self.victims!r}; give 'move', 'evict' or 'stay'.")
        if not (self.deadline_s >= 0 and isfinite(self.deadline_s)):
            raise ConfigError(f"deadline_s is {self.deadline_s!r}; give 0 (evict at once) or more seconds.")

    def plan(self, fleet: FleetView) -> Sequence[Action]:
        board = _Board(fleet, self.costs, self.victims, self.deadline_s)
        evacuated = board.evacuate() if self.victims == "move" else ()
        return (*evacuated, *self._starts(board))

    def _starts(self, board: _Board) -> Iterator[Action]:
        for model in board.starved():
            for start in board.pick(model):
                instance = start.instance
                ready = f"{instance.id} is ready in {start.seconds:.3g} s"
                reason = f"{model.num_waiting} wait for {model.id}; {ready}"
                if start.refuge is not None and instance.model is not None:
                    whose = f"takes the requests of {instance.id}: {reason}"
                    yield Swap(instance=start.refuge.id, model=instance.model, reason=whose)
                if self.victims == "move":
                    yield from board.moves(instance, reason)
                waits = instance.num_requests and self.victims == "move"
                deadline_s = self.deadline_s if waits else 0.0
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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Start:
    """An instance that turns to a model, and in how many seconds it is ready.

    On `refuge`, if there is one, the model of its victims is loaded for them.
    """

    instance: InstanceView
    seconds: float
    refuge: InstanceView | None = None


class _Board:
    """What one plan knows, and has decided so far."""

    def __init__(self, fleet: FleetView, costs: StartupCosts, victims: Victims, deadline_s: float) -> None:
        self._costs, self._fate, self._deadline_s = costs, victims, deadline_s
        self._store, self._seen = fleet.store, dict[str, StoreView]()
        self._num_nodes = len({instance.node for instance in fleet.instances})
        self._allocation = Allocation(fleet)
        self._instances = {i.id: i for i in sorted(fleet.instances, key=lambda i: i.id)}
        self._fleet = fleet
        self._replicas: defaultdict[ModelId, list[InstanceView]] = defaultdict(list)
        self._places: Counter[ModelId] = Counter()
        for instance in self._instances.values():
            self._count(instance)
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

    @cached_property
    def _room(self) -> dict[InstanceId, int]:
        """How many requests each instance could take; read when somebody has to leave one, which is rare."""
        largest, longest = dict[ModelId, int](), dict[ModelId, int]()
        for run in self._fleet.running:
            model, num_tokens = run.model, run.num_tokens
            if num_tokens > largest.get(model, 0):
                largest[model] = num_tokens
            if num_tokens + run.num_remaining > longest.get(model, 0):
                longest[model] = num_tokens + run.num_remaining
        return {
            instance.id: _room_at(instance, largest.get(model, 0), longest.get(model, 0))
            for model, replicas in self._replicas.items()
            for instance in replicas
        }

    @cached_property
    def _preferred(self) -> list[InstanceView]:
        """All instances, those first that are rather turned."""
        return sorted(self._instances.values(), key=_preference)

    def _running_on(self, instance: InstanceView) -> list[RunningView]:
        return sorted(self._fleet.running_on(instance.id), key=lambda run: run.id)

    # ------------------------------------------------------------------ where a model starts

    def starved(self) -> list[ModelView]:
        """The models that have requests waiting, longest wait first."""
        waiting = [m for m in self._allocation.models.values() if m.num_waiting]
        return sorted(waiting, key=lambda m: (-self._allocation.waited_s(m), m.id))

    def pick(self, model: ModelView) -> list[_Start]:
        """Take the instances on which a model is best started.

        Empty where its requests had better wait for its replicas, or nothing can be had.
        """
        num_waiting = model.num_waiting - self._places[model.id]
        pools = self._pools(model) if num_waiting > 0 else []
        quickest_s = min((offer.seconds for pool in pools for offer in pool.offers), default=inf)
        need = num_waiting - self._num_ending_within(quickest_s, model.id)
        offers = choose(pools, need) if need > 0 else ()
        taken = {offer.instance for offer in offers}
        starts: list[_Start] = []
        for offer in offers:
            starts.append(self._detour(model, offer, taken) or self._direct(offer))
            taken.add(starts[-1].instance.id)
        for start in starts:
            self._take(start.instance, model.id)
            if start.refuge is not None and start.instance.model is not None:
                self._take(start.refuge, start.instance.model)
        nodes = dict.fromkeys(s.instance.node for s in starts if s.instance.preloaded != model.id)
        for node in nodes:
            self._ask_for(model.id, node)
        return starts

    def _direct(self, offer: Offer) -> _Start:
        return _Start(instance=self._instances[offer.instance], seconds=offer.seconds)

    def _take(self, instance: InstanceView, model: ModelId) -> None:
        self._allocation.take(Swap(instance=instance.id, model=model))
        self._room.pop(instance.id, None)

    def _load_s(self, model: ModelId, instance: InstanceView) -> float:
        """Seconds until a model is loaded on an instance that has been emptied."""
        if instance.preloaded == model:
            return 0.0
        if instance.node not in self._seen:
            self._seen[instance.node] = self._store.seen_from(instance.node)
        return self._costs.loads.load_s(self._seen[instance.node], model)

    def _ask_for(self, model: ModelId, node: str) -> None:
        """Count a model's bytes to those that are queued on a node."""
        self._store = _asked_for(self._store, model, node)
        self._seen.clear()

    # ------------------------------------------------------------------ the way round

    def _detour(self, model: ModelView, offer: Offer, taken: Collection[InstanceId]) -> _Start | None:
        """A busy instance where the model is ready sooner once the chosen one has taken its requests."""
        refuge = self._instances[offer.instance]
        if self._num_nodes < 2 or refuge.num_requests or self._fate == "stay":
            return None  # one node has nothing nearer than another
        others = [i for i in self._allocation.turnable(model) if i.num_requests and i.id not in taken]
        ways = [(self._detour_s(model, instance, refuge), instance) for instance in others]
        seconds, instance = min(ways, key=lambda way: (way[0], way[1].id), default=(inf, refuge))
        if seconds >= offer.seconds:
            return None
        if instance.model is not None and refuge.preloaded != instance.model:
            self._ask_for(instance.model, refuge.node)
        return _Start(instance=instance, seconds=seconds, refuge=refuge)

    def _detour_s(self, model: ModelView, instance: InstanceView, refuge: InstanceView) -> float:
        """Seconds until the model is ready on a busy instance; infinite where the way is barred."""
        victims, donor = self._victims(instance), self._allocation.models.get(instance.model or ModelId(""))
        barred = not victims.all_known or instance.id in self._receiving or instance.model == refuge.model
        if barred or donor is None or donor.num_waiting or len(victims.movers) > refuge.max_requests:
            return inf
        if not self._allocation.may_turn(refuge, donor):
            return inf
        load_s = self._load_s(model.id, instance)
        if self._fate == "evict":
            return load_s
        gone_s = self._load_s(donor.id, refuge) + victims.seconds
        return gone_s + load_s if gone_s <= self._deadline_s else inf  # else they would be evicted first

    def _num_ending_within(self, seconds: float, model: ModelId) -> int:
        """How many of a model's waiting requests its replicas will have taken by then."""
        runs = (run for replica in self._replicas[model] for run in self._running_on(replica))
        return bisect_right(sorted(self._costs.rest_s(run.num_remaining) for run in runs), seconds)

    def _pools(self, model: ModelView) -> list[Pool]:
        """What may be turned to a model, by the model that it has now; used longest ago first."""
        load_s: dict[str, float] = {}
        offers: defaultdict[ModelId | None, list[Offer]] = defaultdict(list)
        turnable = {instance.id for instance in self._allocation.turnable(model)}
        for instance in self._preferred:
            if instance.id not in turnable:
                continue
            victims = self._victims(instance)
            if victims.all_known and instance.id not in self._receiving:
                if instance.preloaded != model.id and instance.node not in load_s:
                    load_s[instance.node] = self._load_s(model.id, instance)
                staged = instance.preloaded == model.id
                offer = Offer(
                    instance=instance.id,
                    slots=instance.max_requests,
                    seconds=victims.seconds + (0.0 if staged else load_s[instance.node]),
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
        runs = self._running_on(instance)
        if self._fate != "move":
            known = len(runs) >= instance.num_requests if self._fate == "evict" else not instance.num_requests
            return _Victims(all_known=known, seconds=0.0, movers=tuple(runs))
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


def _room_at(instance: InstanceView, largest: int, longest: int) -> int:
    """How many of its model's requests an instance could take, each as large as the largest of them."""
    if not instance.open:
        return 0
    places = instance.max_requests - instance.num_requests
    if instance.max_tokens is None:
        return places
    if longest > instance.max_tokens:
        return 0
    return min(places, instance.num_free_kv_blocks // (largest // instance.kv_block_tokens + 1))


def _preference(instance: InstanceView) -> tuple[float, int, InstanceId]:
    """EMPTY ones first, small ones before large; then those used longest ago."""
    return used_s(instance), instance.memory_bytes, instance.id


def _asked_for(store: StoreView, model: ModelId, node: str) -> StoreView:
    """The store once a model has been asked for on a node: its bytes are queued there, and count once."""
    seen = store.seen_from(node)
    link, num_bytes = seen.source(model), seen.load_bytes(model)
    if link is None or num_bytes is None:
        return store
    own_bytes = num_bytes - link.queued_bytes
    busy = replace(link, queued_bytes=num_bytes)
    return replace(
        store,
        tiers=tuple(busy if (t.name, t.node) == (link.name, link.node) else t for t in store.tiers),
        rising=(
            *store.rising,
            Residency(model=model, tier=link.name, size_bytes=own_bytes, node=link.node),
        ),
    )
