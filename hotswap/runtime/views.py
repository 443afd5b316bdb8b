"""The view of a fleet that is lent for one question: it costs what is looked at."""

# The fields of a view become properties here that are computed once.
# pyright: reportIncompatibleVariableOverride=false

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from functools import cached_property
from operator import attrgetter
from typing import Any, TypeVar

from hotswap.loop_time import current_time
from hotswap.model import Adapter, ModelCard
from hotswap.request import ModelId, RequestId
from hotswap.runtime.active import ActiveRequest
from hotswap.runtime.demand import Asked
from hotswap.runtime.index import Index
from hotswap.runtime.instance import Instance
from hotswap.runtime.state import FleetState
from hotswap.store_view import KVStoreView
from hotswap.view import (
    AdapterView,
    Count,
    FleetView,
    InstanceId,
    InstanceView,
    ModelView,
    Rank,
    RunningView,
    StoreView,
    TimesView,
    WaitingView,
)

__all__ = ["LiveView", "lend"]

_T = TypeVar("_T")

_PARTS = ("now_s", "instances", "models", "waiting", "store", "running", "adapters", "times", "kv_store")


def lend(
    state: FleetState,
    question: Callable[[FleetView], _T],
    *,
    running: bool = False,
    adapters: bool = False,
) -> _T:
    """Show a policy the fleet, as of its last `refresh`, and return its answer.

    A policy may keep the view. One that still exists after the answer is completed before the fleet changes;
    the others cost no more than what the policy has looked at.
    """
    view = LiveView.of(state, running=running, adapters=adapters)
    kept = weakref.ref(view)
    try:
        return question(view)
    finally:
        del view
        if (still := kept()) is not None:
            still.complete()


class LiveView(FleetView):
    """A view whose parts are read from the state when they are first asked for.

    It is true as long as the state does not change. `complete` makes it an ordinary view.
    """

    _state: FleetState
    _index: Index
    _running: bool
    _adapters: bool

    def __init__(self, **parts: Any) -> None:
        # As by `dataclasses.replace`: a view with other parts is an ordinary one.
        super().__init__(**parts)
        object.__setattr__(self, "__class__", FleetView)

    @classmethod
    def of(
        cls, state: FleetState, *, running: bool, adapters: bool = False, now_s: float | None = None
    ) -> LiveView:
        """Return the view of a state as of its last `refresh`.

        Args:
            state: What it shows.
            running: Whether it shows the requests that run, and adapters; routers see neither.
            adapters: Whether it shows only instances that can hold adapters.
            now_s: Its loop time; the clock is read, when a policy asks for it, if there is none here.
        """
        view = object.__new__(cls)
        vars(view).update(_state=state, _index=state.index, _running=running, _adapters=adapters)
        if now_s is not None:
            vars(view)["now_s"] = now_s
        return view

    def complete(self) -> FleetView:
        """Read everything, so that the state may change, and return the view."""
        own = vars(self)
        if "_state" in own:
            for part in _PARTS:
                getattr(self, part)
            for name in ("_state", "_index", "_running", "_adapters"):
                del own[name]
            object.__setattr__(self, "__class__", FleetView)
        return self

    # ------------------------------------------------------------------ parts

    @cached_property
    def now_s(self) -> float:
        return current_time()

    @cached_property
    def instances(self) -> tuple[InstanceView, ...]:
        instances = self._index.instances()
        return tuple(i for i in instances if i.max_adapters) if self._adapters else instances

    @cached_property
    def models(self) -> tuple[ModelView, ...]:
        return tuple(_model_view(self._state, card) for card in self._state.models.values())

    @cached_property
    def waiting(self) -> tuple[WaitingView, ...]:
        return self._state.queue.views()

    @cached_property
    def store(self) -> StoreView:
        return self._state.store.view()

    @cached_property
    def times(self) -> TimesView:
        return self._state.times.view()

    @cached_property
    def kv_store(self) -> KVStoreView | None:
        return self._state.kv_lookup.view()

    @cached_property
    def running(self) -> tuple[RunningView, ...]:
        if not self._running:
            return ()
        running = ((request, request.instance) for request in self._state.requests.values())
        return tuple(_running_view(request, on) for request, on in running if on is not None)

    @cached_property
    def adapters(self) -> tuple[AdapterView, ...]:
        if not self._running:
            return ()
        state = self._state
        asked = ((state.adapters.get(key), asked) for key, asked in state.demand)
        return tuple(
            _adapter_view(state, latest, asked, self.now_s) for latest, asked in asked if latest is not None
        )

    # ------------------------------------------------------------------ questions

    @property
    def ids(self) -> frozenset[InstanceId]:
        return self._ids if self._adapters else self._index.ids

    def instance(self, instance: InstanceId) -> InstanceView:
        return self._by_id[instance] if self._adapters else self._index.instance(instance)

    def hosts(self, model: ModelId) -> tuple[InstanceView, ...]:
        return self._index.hosts(model, adapters=self._adapters)

    def replicas(self, model: ModelId) -> tuple[InstanceView, ...]:
        replicas = self._index.replicas(model)
        return tuple(i for i in replicas if i.max_adapters) if self._adapters else replicas

    def min_by(self, model: ModelId, rank: Rank) -> InstanceView | None:
        return self._index.min_by(model, rank, adapters=self._adapters)

    def ranked(self, model: ModelId, rank: Rank) -> Iterator[InstanceView]:
        return self._index.ranked(model, rank, adapters=self._adapters)

    def total(self, model: ModelId, count: Count) -> tuple[int, int]:
        return self._index.total(model, count, adapters=self._adapters)

    def host_ids(self, model: ModelId) -> frozenset[InstanceId]:
        return self._index.host_ids(model, adapters=self._adapters)

    def oldest_waiting_s(self, model: ModelId) -> float | None:
        return self._state.queue.oldest_s(model)

    def waiting_request(self, request: RequestId) -> WaitingView | None:
        return self._state.queue.view(request)

    def running_on(self, instance: InstanceId) -> tuple[RunningView, ...]:
        found = self._state.instances.get(instance) if self._running else None
        if found is None:
            return ()
        requests = sorted(self._state.running_on(instance), key=attrgetter("arrival"))
        return tuple(_running_view(request, found) for request in requests)


def _model_view(state: FleetState, card: ModelCard) -> ModelView:
    return ModelView(
        id=card.id,
        weight_bytes=card.weight_bytes,
        min_replicas=card.min_replicas,
        weight=card.weight,
        num_running=state.num_running[card.id],
        num_waiting=state.queue.count(card.id),
        num_failed_loads=state.num_failed_loads[card.id],
        last_evicted_s=state.last_evicted_s(card.id),
        unserved_since_s=state.unserved_since_s(card.id),
    )


def _adapter_view(state: FleetState, latest: Adapter, asked: Asked, now_s: float) -> AdapterView:
    model = ModelId(latest.model)
    return AdapterView(
        id=latest.version,
        model=model,
        num_running=state.num_running_with(model, latest.version),
        num_waiting=state.num_waiting_with(model, latest.version),
        popularity=asked.popularity_at(now_s),
        asked_s=asked.at_s,
        gap_s=asked.gap_s,
    )


def _running_view(active: ActiveRequest, instance: Instance) -> RunningView:
    request, num_generated = active.request, active.num_generated
    return RunningView(
        id=request.id,
        model=request.model,
        instance=instance.id,
        num_tokens=len(request.prompt) + num_generated,
        num_remaining=request.sampling.max_tokens - num_generated,
        priority=request.priority,
        arrived_s=request.arrived_s,
        begun=num_generated > active.hops[-1].first_index,
        moving=active.moving,
        since_s=active.hops[-1].since_s,
        num_evicted=active.num_evicted,
        num_stalls=active.history.num_stalls,
        stored_tokens=active.stored_tokens,
    )
