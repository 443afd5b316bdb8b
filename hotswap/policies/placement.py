"""ServerlessLLM's placement: a model starts where that takes the least time, victims move out of its way."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import inf, isfinite
from typing import Literal, NamedTuple, TypeAlias, get_args

from hotswap.action import Action, Migrate, Swap
from hotswap.errors import ConfigError
from hotswap.policies.allocation import Allocation, turns_away
from hotswap.policies.busy import Departures, harm, preference
from hotswap.policies.knapsack import Offer, Pool, choose
from hotswap.policies.rooms import Rooms
from hotswap.policies.startup_cost import QueuedLoads, StartupCosts
from hotswap.request import ModelId
from hotswap.scheduler import Scheduler
from hotswap.view import FleetView, InstanceId, InstanceState, InstanceView, ModelView, RunningView

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
    a model's replicas on a node, which read the same bytes. The paper places request by request: here the
    model whose oldest request has waited longest is first, halved for each failed load, however many
    replicas it has had or given up meanwhile. A place that comes free or is loaded is first for those who
    move there: who waits for their model counts on what is left.

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


class _Found(NamedTuple):
    """An offer among others: of equal costs the one used longest ago is less."""

    seconds: float
    harm: int
    preference: tuple[float, int, InstanceId]
    offer: Offer


class _Board:
    """What one plan knows, and has decided so far."""

    def __init__(self, fleet: FleetView, costs: StartupCosts, victims: Victims, deadline_s: float) -> None:
        self._costs, self._fate, self._deadline_s = costs, victims, deadline_s
        self._loads = QueuedLoads(costs.loads, fleet.store)
        self._num_nodes = len({instance.node for instance in fleet.instances})
        self._allocation = Allocation(fleet)
        self._instances = {i.id: i for i in sorted(fleet.instances, key=lambda i: i.id)}
        self._fleet = fleet
        self._rooms = Rooms(fleet, self._instances.values())
        self._turning = [instance for instance in self._instances.values() if turns_away(instance)]
        self._receiving: set[InstanceId] = set()
        self._known_victims: dict[InstanceId, _Victims] = {}
        self._busy: dict[str, Departures] = {}

    def _leaving(self) -> Iterator[InstanceView]:
        """The instances that turn to another model while requests may still run there."""
        runs_on = (InstanceState.SERVING, InstanceState.DRAINING)
        return (instance for instance in self._turning if instance.state in runs_on)

    def _num_places(self, model: ModelId) -> int:
        """How many waiting requests of a model will be taken by who serves it now or turns to it already."""
        replicas = (replica for replica in self._rooms.replicas(model) if replica.open)
        now = sum(replica.max_requests - replica.num_requests for replica in replicas)
        soon = sum(instance.max_requests for instance in self._turning if instance.target == model)
        if self._fate != "move":
            return now + soon
        leaving = (instance for instance in self._leaving() if instance.model == model)
        return now + soon - sum(len(self._victims(instance).movers) for instance in leaving)

    @cached_property
    def _on(self) -> dict[str, list[InstanceView]]:
        """All instances by node."""
        nodes: defaultdict[str, list[InstanceView]] = defaultdict(list)
        for instance in self._instances.values():
            nodes[instance.node].append(instance)
        return nodes

    @cached_property
    def _idle_on(self) -> dict[str, list[InstanceView]]:
        """Those without requests, by node, the best first."""
        idle = {node: [i for i in instances if not i.num_requests] for node, instances in self._on.items()}
        return {node: sorted(on, key=lambda i: (harm(i), preference(i))) for node, on in idle.items()}

    @cached_property
    def _staged(self) -> dict[ModelId, list[InstanceView]]:
        """Those that have a model preloaded."""
        staged: defaultdict[ModelId, list[InstanceView]] = defaultdict(list)
        for instance in self._instances.values():
            if instance.preloaded is not None:
                staged[instance.preloaded].append(instance)
        return staged

    def _busy_on(self, node: str) -> Iterable[InstanceView]:
        """Those of a node that have requests, the best first."""
        if self._fate == "stay":
            return ()
        if node not in self._busy:
            busy = (i for i in self._on[node] if i.num_requests)
            self._busy[node] = Departures(self._fleet, busy, self._gone_s)
        return self._busy[node]

    def _running_on(self, instance: InstanceView) -> list[RunningView]:
        return sorted(self._fleet.running_on(instance.id), key=lambda run: run.id)

    # ------------------------------------------------------------------ where a model starts

    def starved(self) -> list[ModelView]:
        """The models that have requests waiting, longest wait first."""
        waiting = [m for m in self._allocation.models.values() if m.num_waiting]
        return sorted(waiting, key=lambda m: (-self._allocation.waited_s(m, since_turn=False), m.id))

    def pick(self, model: ModelView) -> list[_Start]:
        """Take the instances on which a model is best started.

        Empty where its requests had better wait for its replicas, or nothing can be had.
        """
        num_waiting = model.num_waiting - self._num_places(model.id)
        soonest = self._soonest(model) if num_waiting > 0 else None
        if soonest is None:
            return []
        need = num_waiting - self._num_ending_within(soonest.seconds, model.id)
        if need <= 0:
            return []
        # The usual case is that one is enough, and more cost more.
        offers = (soonest,) if need <= soonest.slots else choose(self._pools(model), need)
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
            self._loads.ask_for(model.id, node)
        return starts

    def _direct(self, offer: Offer) -> _Start:
        return _Start(instance=self._instances[offer.instance], seconds=offer.seconds)

    def _take(self, instance: InstanceView, model: ModelId) -> None:
        self._allocation.take(Swap(instance=instance.id, model=model))
        self._rooms.close(instance)

    # ------------------------------------------------------------------ the way round

    def _detour(self, model: ModelView, offer: Offer, taken: Collection[InstanceId]) -> _Start | None:
        """A busy instance where the model is ready sooner once the chosen one has taken its requests."""
        refuge = self._instances[offer.instance]
        if self._num_nodes < 2 or refuge.num_requests or self._fate == "stay":
            return None  # one node has nothing nearer than another
        others = [
            instance
            for instance in self._allocation.turnable(model)
            if instance.num_requests
            and instance.id not in taken
            and self._loads.at(model.id, instance) < offer.seconds
        ]
        ways = [(self._detour_s(model, instance, refuge), instance) for instance in others]
        seconds, instance = min(ways, key=lambda way: (way[0], way[1].id), default=(inf, refuge))
        if seconds >= offer.seconds:
            return None
        if instance.model is not None and refuge.preloaded != instance.model:
            self._loads.ask_for(instance.model, refuge.node)
        return _Start(instance=instance, seconds=seconds, refuge=refuge)

    def _detour_s(self, model: ModelView, instance: InstanceView, refuge: InstanceView) -> float:
        """Seconds until the model is ready on a busy instance; infinite where the way is barred."""
        victims, donor = self._victims(instance), self._allocation.models.get(instance.model or ModelId(""))
        barred = not victims.all_known or instance.id in self._receiving or instance.model == refuge.model
        if barred or donor is None or donor.num_waiting or len(victims.movers) > refuge.max_requests:
            return inf
        if not self._allocation.may_turn(refuge, donor):
            return inf
        load_s = self._loads.at(model.id, instance)
        if self._fate == "evict":
            return load_s
        gone_s = self._loads.at(donor.id, refuge) + victims.seconds
        return gone_s + load_s if gone_s <= self._deadline_s else inf  # else they would be evicted first

    def _num_ending_within(self, seconds: float, model: ModelId) -> int:
        """How many of a model's waiting requests its replicas will have taken by then."""
        runs = (run for replica in self._rooms.replicas(model) for run in self._running_on(replica))
        return bisect_right(sorted(self._costs.rest_s(run.num_remaining) for run in runs), seconds)

    # ------------------------------------------------------------------ what may be turned

    def _soonest(self, model: ModelView) -> Offer | None:
        """The offer of the least seconds, then of the least harm, then of the one used longest ago.

        Requests are looked at only where an instance without any would be later.
        """
        staged = self._staged.get(model.id, ())
        best = min((f for instance in staged if (f := self._find(model, instance))), default=None)
        load_s = {node: self._loads.load_s(model.id, node) for node in self._on}
        for least_harm, on in ((0, self._idle_on.__getitem__), (2, self._busy_on)):
            for node, seconds in load_s.items():
                if best is not None and best < (seconds, least_harm):
                    continue  # whoever is there
                unstaged = (i for i in on(node) if i.preloaded != model.id)
                found = next((f for instance in unstaged if (f := self._find(model, instance))), None)
                best = min((f for f in (best, found) if f is not None), default=None)
        return best.offer if best else None

    def _find(self, model: ModelView, instance: InstanceView) -> _Found | None:
        """What an instance could do for a model; `None` if it may not be turned."""
        if not self._allocation.may_turn(instance, model):
            return None
        offer = self._offer(model, instance)
        if offer is None or (instance.model is not None and offer.room > self._spare_room(instance.model)):
            return None
        return _Found(offer.seconds, offer.harm, preference(instance), offer)

    def _offer(self, model: ModelView, instance: InstanceView) -> Offer | None:
        victims = self._victims(instance)
        if not victims.all_known or instance.id in self._receiving:
            return None
        return Offer(
            instance=instance.id,
            slots=instance.max_requests,
            seconds=victims.seconds + self._loads.at(model.id, instance),
            harm=harm(instance),
            room=self._rooms.at(instance) + len(victims.movers),
        )

    def _spare_room(self, model: ModelId) -> int:
        """How many more requests of a model its replicas could take than wait for it."""
        return self._rooms.total(model) - self._allocation.models[model].num_waiting

    def _pools(self, model: ModelView) -> list[Pool]:
        """What may be turned to a model, by the model that it has now; used longest ago first."""
        offers: defaultdict[ModelId | None, list[Offer]] = defaultdict(list)
        turnable = {instance.id for instance in self._allocation.turnable(model)}
        for instance in sorted(self._instances.values(), key=preference):
            if instance.id in turnable and (offer := self._offer(model, instance)):
                offers[instance.model].append(offer)
        return [self._pool(donor, found) for donor, found in offers.items()]

    def _pool(self, donor: ModelId | None, offers: list[Offer]) -> Pool:
        """Bound what one model may give; an offer that is too large by itself is none."""
        if donor is None:
            return Pool(offers=tuple(offers), most=len(offers))
        room = self._spare_room(donor)
        fitting = tuple(offer for offer in offers if offer.room <= room)
        most = self._allocation.num_spare(self._allocation.models[donor])
        return Pool(offers=fitting, most=most, room=room)

    # ------------------------------------------------------------------ victims

    def _victims(self, instance: InstanceView) -> _Victims:
        """Who would have to leave an instance; read once, since a plan moves nobody."""
        if instance.id not in self._known_victims:
            self._known_victims[instance.id] = self._look_at(instance)
        return self._known_victims[instance.id]

    def _gone_s(self, runs: Sequence[RunningView]) -> float:
        """Seconds until they have left."""
        return self._costs.leave_s(runs) if self._fate == "move" else 0.0

    def _look_at(self, instance: InstanceView) -> _Victims:
        runs = self._running_on(instance)
        all_known = not instance.num_requests if self._fate == "stay" else len(runs) >= instance.num_requests
        return _Victims(
            all_known=all_known,
            seconds=self._gone_s(runs),
            movers=tuple(run for run in runs if self._fate != "move" or self._has_to_move(run)),
        )

    def _has_to_move(self, run: RunningView) -> bool:
        """Whether a request would not end sooner, nor moves already."""
        return not run.moving and self._costs.rest_s(run.num_remaining) > self._costs.resume_s(run.num_tokens)

    def moves(self, instance: InstanceView, reason: str) -> Iterator[Migrate]:
        """Send the requests of an instance to replicas that stay, the roomiest first."""
        for run in self._victims(instance).movers:
            to = self._rooms.promise(run.model)
            if to is None:
                return
            self._receiving.add(to)
            yield Migrate(request=run.id, destination=to, reason=reason)

    def evacuate(self) -> Iterator[Migrate]:
        """Go on moving requests off the instances that are turning to another model."""
        for instance in self._leaving():
            turns = "is unloaded" if instance.target is None else f"turns to {instance.target}"
            yield from self.moves(instance, f"{instance.id} {turns}")
