"""The state of a fleet: what runs where, what waits, and what has failed. No other part keeps any of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import anyio
from opentelemetry.trace import SpanContext

from hotswap.action import SwapRecord
from hotswap.checks import check_strings
from hotswap.engine import Engine
from hotswap.errors import ConfigError, SwapRefused
from hotswap.kv_lookup import KVLookup
from hotswap.kv_store import KVStore
from hotswap.loop_time import current_time
from hotswap.metered_store import MeteredStore
from hotswap.phase_view import PhaseView
from hotswap.request import AdapterId, ModelId, Request, RequestId
from hotswap.runtime.active import ActiveRequest
from hotswap.runtime.change import Change, StateListener
from hotswap.runtime.demand import Demand
from hotswap.runtime.entering import EnteringRequest
from hotswap.runtime.events import EventLog
from hotswap.runtime.index import Index
from hotswap.runtime.instance import FIRST_PAUSE_S, LONGEST_PAUSE_S, MAX_RESTARTS, Cooldown, Instance
from hotswap.runtime.lifecycle import Event, Evicted, Lost, Next, doubled
from hotswap.runtime.queue import Answered, Queue, Standing, Ticket
from hotswap.runtime.registry import Registry
from hotswap.runtime.times import MeasuredTimes
from hotswap.store import WeightStore
from hotswap.view import InstanceId, InstanceState

__all__ = ["FleetState"]


class FleetState(Registry):
    """The only mutable truth of a fleet.

    Its verbs are synchronous, and each leaves every count right. Listeners are told in order of subscription.

    Attributes:
        instances: By id, in the order in which they came.
        entering: Requests whose prompts are being read.
        requests: Those under way beside them.
        queue: Those of them that wait for an instance.
        suspect: The request that is suspected to take instances down, if one runs.
        num_running: Requests by model that are assigned to instances.
        num_failed_loads: By model, since the last load that succeeded.
        num_tokens: Tokens that requests were given, by model.
        index: The instances by model, for views.
        store: Where weights are.
        kv_store: Where KV blocks are kept across swaps; `None` if they are not.
        kv_lookup: What it has.
        version: Another number after every change that `changed` waits for.
        demand: How much each adapter is asked for.
        times: How long swaps and prefills take.
        events: What has happened, for those that watch the fleet.
    """

    def __init__(self, store: WeightStore, kv_store: KVStore | None = None, *, fleet: str = "") -> None:
        super().__init__()
        self.store, self.kv_store, self.kv_lookup = store, kv_store, KVLookup(kv_store, fleet)
        self.instances: dict[InstanceId, Instance] = {}
        self.entering: dict[EnteringRequest, None] = {}
        self.requests: dict[RequestId, ActiveRequest] = {}
        self.queue, self.index = Queue(self.kv_lookup), Index()
        self.suspect: RequestId | None = None
        self.num_running, self.num_tokens = Counter[ModelId](), Counter[ModelId]()
        self.num_failed_loads: Counter[ModelId] = Counter()
        self.demand, self.times, self.events = Demand(), MeasuredTimes(), EventLog()
        self._last_evicted_s, self._num_adapted = dict[ModelId, float](), Counter[tuple[ModelId, AdapterId]]()
        self.version = self._num_assigned = self._num_arrived = 0
        self._samples: dict[RequestId, dict[ActiveRequest, None]] = {}
        self._running: dict[InstanceId, dict[RequestId, ActiveRequest]] = {}
        self._cooling_down = dict[InstanceId, None]()
        self._swapping = dict[InstanceId, Instance]()  # in a phase that reads on
        self._listeners: list[StateListener] = []
        self._change: anyio.Event | None = None

    # ------------------------------------------------------------------ changes

    def subscribe(self, listener: StateListener) -> None:
        """Tell a listener of every change from now on."""
        self._listeners.append(listener)

    def unsubscribe(self, listener: StateListener) -> None:
        """Tell it of none any more."""
        self._listeners.remove(listener)

    def tell(self, change: Change) -> None:
        """Tell all listeners of a change."""
        if change is not Change.WAITING:
            self.wake()
        for listener in self._listeners:
            listener.state_changed(change)

    async def changed(self, since: int) -> None:
        """Wait until `version` is another: an instance has changed, or has room for a request more."""
        while self.version == since:
            self._change = self._change or anyio.Event()
            await self._change.wait()

    def wake(self) -> None:
        """Have everything that awaits `changed` look again."""
        self.version += 1
        if self._change is not None:
            self._change.set()
            self._change = None

    # ------------------------------------------------------------------ models

    def remove_model(self, model: ModelId) -> None:
        super().remove_model(model)
        for of in (self.num_failed_loads, self.num_tokens, self._last_evicted_s):
            of.pop(model, None)
        self.times.forget(model)

    # ------------------------------------------------------------------ instances

    def add(self, engine: Engine) -> Instance:
        """Take an engine in.

        Raises:
            ConfigError: its id is no string, or there is an instance of it.
        """
        check_strings(ConfigError, **{"engine.id": getattr(engine, "id", None)})
        if engine.id in self.instances:
            raise ConfigError(f"There is an instance {engine.id!r} already; give the engine another id.")
        instance = Instance(engine, self.models.values())
        instance.polled = not engine.watch(self.index.listener(instance.id))
        self.instances[engine.id] = instance
        self.index.add(instance.id, instance)
        self._note(instance)
        return instance

    def remove(self, instance: Instance) -> None:
        """Let an instance go."""
        del self.instances[instance.id]
        self._cooling_down.pop(instance.id, None)
        self.index.remove(instance.id)
        self.tell(Change.INSTANCES)

    def instance(self, instance: str) -> Instance:
        """Return an instance by its id.

        Raises:
            ConfigError: naming those that there are.
        """
        check_strings(ConfigError, instance=instance)
        found = self.instances.get(InstanceId(instance))
        if found is None:
            known = ", ".join(map(repr, self.instances)) or "none"
            raise ConfigError(f"There is no instance {instance!r}; this fleet has {known}.")
        return found

    def claim(self, instance: Instance, target: ModelId | None) -> None:
        """Take an instance for a swap to `target`: no other swap can have it until `unclaim`.

        `None`, an unload, may claim an instance that was left half way as well.

        Raises:
            SwapRefused: another swap has it, or it was left half way.
        """
        if instance.swapping:
            raise SwapRefused(
                f"Instance {instance.id!r} is being swapped to {instance.target!r}; wait for its end."
            )
        state = None if target is None else instance.status().state
        if state in (InstanceState.LOADING, InstanceState.DRAINING):
            raise SwapRefused(f"Instance {instance.id!r} is {state}; wait until it is SERVING or EMPTY.")
        instance.swapping, instance.target = True, target
        self._note(instance)

    def unclaim(self, instance: Instance) -> None:
        """Give an instance back after its swap."""
        instance.swapping, instance.target, instance.phase, instance.reads = False, None, None, None
        self._swapping.pop(instance.id, None)
        instance.swapped_s = current_time()
        self._note(instance)

    def begin_swap(self, instance: Instance, context: SpanContext) -> None:
        """Note the span of an instance's latest swap, which requests that it evicts are linked to."""
        instance.swap_context = context

    def begin_phase(self, instance: Instance, name: str, total_bytes: int, reads: MeteredStore) -> None:
        """Note the phase of its swap that an instance is in from now on, and from what the swap reads."""
        instance.phase = PhaseView(name=name, since_s=current_time(), total_bytes=total_bytes)
        instance.reads = reads
        self._swapping[instance.id] = instance
        phase = instance.current_phase()
        self.events.note("swap_phase", instance=instance.id, model=instance.target, phase=phase)
        self._note(instance)

    def set_serving_since(self, instance: Instance, since_s: float | None) -> None:
        """Note when an instance's model became ready; `None` when it has none any more."""
        instance.serving_since_s = since_s
        if since_s is None:
            instance.turn.empty()
        self._note(instance)

    def begin_turn(self, instance: Instance) -> None:
        """Note that the requests which waited for an instance's model have been assigned."""
        instance.turn.begins = False

    def close(self, instance: Instance) -> None:
        """Send an instance no more requests."""
        instance.draining = True
        self._note(instance)

    def reopen(self, instance: Instance) -> None:
        """Send it requests again."""
        instance.draining = False
        self._note(instance)
        self.tell(Change.INSTANCES)

    def count_move(self, number: int, *ends: Instance) -> None:
        """Count a move that begins (1) or ends (-1) at its ends."""
        for instance in ends:
            instance.num_moves += number
            if instance.id in self.instances:
                self.index.counts_changed(instance.id)
        if number < 0:
            self.wake()

    # ------------------------------------------------------------------ failures

    def set_lost(self, instance: Instance, because: str | None) -> None:
        """Note why an instance is lost; `None` once it is not any more."""
        instance.lost_because = because
        self._note(instance)

    def record_swap(self, record: SwapRecord) -> None:
        """Note what a swap did to the models, and how long it took."""
        self.times.learn_swap(record)
        if record.model_before is not None and record.model_after != record.model_before:
            self._last_evicted_s[record.model_before] = current_time()

    def succeeded(self, instance: Instance, model: ModelId | None) -> None:
        """Forget that a model failed on an instance; `None` stands for an unload or a restart."""
        instance.cooldowns.pop(model, None)
        instance.gone_for_good = False
        if model is not None:
            self.num_failed_loads.pop(model, None)
        self._note(instance)

    def failed(self, instance: Instance, model: ModelId | None) -> None:
        """Leave the pair alone for a while that doubles with every failure in a row.

        An instance whose restart failed ten times in a row is left LOST.
        """
        failures = instance.cooldowns.get(model, Cooldown()).num_failures + 1
        pause_s = doubled(FIRST_PAUSE_S, failures - 1, LONGEST_PAUSE_S)
        instance.cooldowns[model] = Cooldown(failures, current_time() + pause_s)
        if model is None and failures >= MAX_RESTARTS:
            instance.gone_for_good = True
        elif model is not None:
            self.num_failed_loads[model] += 1
        self._note(instance)

    # ------------------------------------------------------------------ requests

    def next_arrival(self) -> int:
        """Return the number of a request that has just come."""
        self._num_arrived += 1
        return self._num_arrived

    def begin(self, request: ActiveRequest) -> None:
        """Keep a request that is under way from now on."""
        self.requests[request.request.id] = request
        if request.samples is not None:
            self._samples.setdefault(request.samples.request, {})[request] = None

    def end(self, request: ActiveRequest) -> None:
        """Forget a request."""
        del self.requests[request.request.id]
        if (samples := request.samples) is not None:
            of = self._samples[samples.request]
            del of[request]
            if not of:
                del self._samples[samples.request]
            if samples.left(request.request.id):
                self.tell(Change.RELEASED)
        self.wake()

    def under_way(self, request: RequestId) -> list[EnteringRequest | ActiveRequest]:
        """Return the request of an id, or its samples; it may still be read."""
        if (active := self.requests.get(request)) is not None:
            return [active]
        return [*self._samples.get(request, ()), *(one for one in self.entering if one.id == request)]

    def enqueue(self, request: Request, arrival: int, answered: Answered, standing: Standing) -> Ticket:
        """Have a request wait for an instance."""
        return self.queue.add(request, arrival, answered, standing, active=self.requests.get(request.id))

    def dequeue(self, ticket: Ticket) -> None:
        """Have it wait no more; nothing happens when it does not."""
        self.queue.remove(ticket)

    def retarget(self, requests: Mapping[Ticket, Request]) -> None:
        """Have requests that wait go on as requests for other models."""
        self.queue.retarget(requests)
        self.tell(Change.INSTANCES)

    def attach(self, request: ActiveRequest, instance: Instance) -> None:
        """Note that a request runs on an instance now, to which it is assigned."""
        request.instance = instance
        self._running.setdefault(instance.id, {})[request.request.id] = request
        if instance.draining:  # the drain has not seen it yet
            self.wake()

    def depart(self, request: ActiveRequest, instance: Instance, event: Event) -> Next:
        """Take a request from its instance after an event, and return what it does next."""
        request.departing(instance.id, event)
        if isinstance(event, Lost):
            instance.seem_lost()
            self._note(instance)
            self.tell(Change.INSTANCES)
        instance.num_evicted += isinstance(event, Evicted) and request.next_instance is None
        self.withdraw(request, instance)
        return request.departed(event, instance.swap_context if isinstance(event, Evicted) else None)

    def withdraw(self, request: ActiveRequest, instance: Instance) -> None:
        """Take a request from its instance."""
        self.times.learn_stay(*request.stay())
        request.instance = None
        del self._running[instance.id][request.request.id]
        if not self._running[instance.id]:
            del self._running[instance.id]
        if request.move is not None:
            request.move.source_left()
        self.release(request.request, instance)

    def running_on(self, instance: InstanceId) -> tuple[ActiveRequest, ...]:
        """Return the requests that run on an instance, in the order in which they came to it."""
        return tuple(self._running.get(instance, {}).values())

    def note_token(self, request: ActiveRequest) -> None:
        """Note a token of a request that runs; a suspect is none any more."""
        self.num_tokens[request.request.model] += 1
        if (instance := request.instance) is not None and request.request.id in instance.turn.opening:
            tokens = instance.turn.got_token(request.request.id)
            self.times.learn_turn(tokens, current_time() - (instance.serving_since_s or 0.0))
            self.index.counts_changed(instance.id)
        if request.note_token():
            self.tell(Change.RELEASED)
        if self.suspect == request.request.id:
            self.suspect = None
            self.tell(Change.RELEASED)

    def assign(self, request: Request, instance: Instance, *, suspect: bool = False) -> float:
        """Count a request to an instance; return the loop time."""
        self.suspect = request.id if suspect else self.suspect
        instance.last_assigned = self._num_assigned = self._num_assigned + 1
        active, turn = self.requests.get(request.id), instance.turn
        stalled = active is not None and active.history.num_stalls > 0
        if stalled or turn.begins:
            view = self.index.counted(instance.id) if turn.begins else None
            turn.assign(request, stalled=stalled, most=None if view is None else view.max_tokens)
        return self._count(request, instance, 1)

    def release(self, request: Request, instance: Instance) -> None:
        """Count it out again."""
        self.suspect = None if self.suspect == request.id else self.suspect
        instance.turn.leave(request.id)
        self._count(request, instance, -1)
        self.tell(Change.RELEASED)

    def _count(self, request: Request, instance: Instance, number: int) -> float:
        instance.num_requests += number
        instance.num_high_priority += number * (request.priority > 0)
        now_s = instance.last_used_s = current_time()
        if instance.id in self.instances:
            self.index.counts_changed(instance.id)
        self.num_running[request.model] += number
        if request.adapter is not None:
            key = request.model, request.adapter
            self._num_adapted[key] += number
            if not self._num_adapted[key]:  # versions come and go
                del self._num_adapted[key]
        return now_s

    def num_running_with(self, model: ModelId, adapter: AdapterId) -> int:
        """Return how many requests with a version of an adapter are assigned to instances."""
        return self._num_adapted[model, adapter]

    def num_waiting_with(self, model: ModelId, adapter: AdapterId) -> int:
        """Return how many wait for an instance with it."""
        return self.queue.count_with(model, adapter)

    def is_needed(self, model: ModelId, adapter: AdapterId) -> bool:
        """Return whether a request has a version of a model's adapter, or waits for an instance with it."""
        return self.num_running_with(model, adapter) > 0 or self.num_waiting_with(model, adapter) > 0

    # ------------------------------------------------------------------ what can be seen

    def _note(self, instance: Instance) -> None:
        """Have a change of an instance seen by the next view."""
        if instance.id not in self.instances:
            return
        self.index.state_changed(instance.id)
        self.index.poll(instance.id, instance.polled or bool(instance.cooldowns))
        if instance.cooldowns:
            self._cooling_down[instance.id] = None
        else:
            self._cooling_down.pop(instance.id, None)

    def refresh(self, *, progress: bool = False) -> None:
        """Bring the index up to date with instances that have changed state, or are polled.

        With `progress` also with how much their swaps have read, which routes need not know.
        """
        if progress:
            for instance in self._swapping.values():
                self._note(instance)
        self.index.refresh()

    def troubled(self) -> tuple[Instance, ...]:
        """Return the instances that are not settled, or that have failed at what they may try again."""
        self.index.refresh()
        return tuple(self.instances[name] for name in {**self.index.unsettled, **self._cooling_down})

    def last_evicted_s(self, model: ModelId) -> float | None:
        """Return the loop time at which a model was last taken from an instance; `None` if it never was."""
        return self._last_evicted_s.get(model)

    def unserved_since_s(self, model: ModelId) -> float | None:
        """Return since when requests have waited for a model that no instance serves or swaps to."""
        oldest_s = self.queue.oldest_s(model)
        if oldest_s is None or self.index.has_replica(model):
            return None
        return max(oldest_s, self._last_evicted_s.get(model, oldest_s))

    def __repr__(self) -> str:
        return f"<FleetState {self}>"

    def __str__(self) -> str:
        self.index.refresh()
        views = self.index.instances()
        states = Counter(f"{v.state} {v.target or v.model or ''}".strip() for v in views)
        instances = ", ".join(f"{count} {state}" for state, count in states.items())
        running = sum(self.num_running.values())
        return f"[requests: {running} running, {len(self.queue)} waiting | instances: {instances}]"
