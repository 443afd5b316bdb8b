"""The fleet as it can be seen at one moment: what schedulers, routers and people decide from."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Set
from typing import Any, TypeVar

import anyio

from hotswap.lookup import Lookup
from hotswap.model import ModelCard
from hotswap.request import ModelId, RequestId
from hotswap.runtime.admission import WaitingRoom
from hotswap.runtime.flight import Flight
from hotswap.runtime.instance import Change, Instance
from hotswap.store import WeightStore
from hotswap.view import AdapterView, FleetView, InstanceId, InstanceView, ModelView, RunningView

__all__ = ["Observer", "ask"]

_T = TypeVar("_T")


def ask(view: Callable[[], FleetView], question: Callable[[FleetView], _T]) -> _T:
    """Show somebody the fleet and return the answer.

    A view costs what is looked at. Who keeps it after having answered has all of it fetched.
    """
    shown = view()
    kept = weakref.ref(shown)
    try:
        return question(shown)
    finally:
        del shown
        if (still := kept()) is not None:
            still.settle()


class Observer:
    """Makes views of one fleet, and keeps what they are made of from one to the next.

    An engine that says when it changes (`SupportsWatch`) is looked at again after that, any other for every
    view. It owns nothing of what it looks at.
    """

    def __init__(
        self,
        *,
        instances: Mapping[InstanceId, Instance],
        cards: Mapping[ModelId, ModelCard],
        flights: Mapping[RequestId, Flight],
        room: WaitingRoom,
        store: WeightStore,
        num_running: Counter[ModelId],
        num_failed_loads: Counter[ModelId],
        last_evicted_s: Mapping[ModelId, float],
        adapters: Callable[[], tuple[AdapterView, ...]],
    ) -> None:
        self.instances, self.cards, self.flights = instances, cards, flights
        self.room, self.store = room, store
        self.num_running, self.num_failed_loads, self.last_evicted_s = (
            num_running,
            num_failed_loads,
            last_evicted_s,
        )
        self.adapters = adapters
        self._lookup = Lookup(pull=self._pull, recount=self._recount)
        self._turned: dict[InstanceId, None] = {}
        self._restless: dict[InstanceId, None] = {}  # whose views change without anybody's saying so
        self._unsettled: dict[InstanceId, Instance] = {}
        self._whole, self._brief = _Source(self, running=True), _Source(self, running=False)
        for instance in instances.values():
            self.join(instance)

    # ------------------------------------------------------------------ views

    def view(self) -> FleetView:
        """Return all there is to see; `settle` it before you keep it, or have somebody `ask`ed."""
        self._refresh()
        return FleetView.of(self._whole, anyio.current_time())

    def brief(self) -> FleetView:
        """Return the same without the requests that run and adapters: routers need none of them."""
        self._refresh()
        return FleetView.of(self._brief, anyio.current_time())

    def served(self) -> Set[ModelId]:
        """Return the models that instances are SERVING at this moment."""
        self._refresh()
        return self._lookup.hosted

    def replicas(self, model: ModelId) -> tuple[InstanceView, ...]:
        """Return `FleetView.replicas` of this moment."""
        self._refresh()
        return self._lookup.replicas(model)

    def floors_hold(self) -> bool:
        """Whether every model has its least number of replicas serving."""
        self._refresh()
        return all(len(self._lookup.hosts(card.id)) >= card.min_replicas for card in self.cards.values())

    def unsettled(self) -> tuple[Instance, ...]:
        """Return the instances that are broken, or have failed at something that they may try again."""
        self._refresh()
        return tuple(self._unsettled.values())

    # ------------------------------------------------------------------ what is looked at

    def join(self, instance: Instance) -> None:
        """Look at an instance from now on."""
        instance.on_change = self._note
        self._turned[instance.id] = None

    def leave(self, instance: Instance) -> None:
        """Look at it no more."""
        instance.on_change = None
        self._turned.pop(instance.id, None)
        self._restless.pop(instance.id, None)
        self._unsettled.pop(instance.id, None)
        self._lookup.drop(instance.id)

    def counted(self, instance: InstanceId) -> InstanceView | None:
        """Return one as a view of this moment shows it, but for its engine's load; `None` if it is gone."""
        return self._lookup.counted(instance)

    def memory_bytes(self) -> Iterator[int]:
        """Yield what each engine has; 0 where nobody knows."""
        self._refresh()
        return (view.memory_bytes for view in self._lookup.seen())

    def _note(self, instance: InstanceId, change: Change) -> None:
        if change is Change.LOAD:  # by far the most
            self._lookup.stir(instance)
        elif change is Change.COUNTED:
            self._lookup.touch(instance)
        else:
            self._turned[instance] = None

    def _refresh(self) -> None:
        for instance in tuple(self._turned):
            self._look(self.instances[instance])
            self._turned.pop(instance, None)  # not before: one whose view cannot be had now is asked again
        for key in tuple(self._restless):
            self._look(self.instances[key])

    def _look(self, instance: Instance) -> None:
        self._lookup.put(instance.view())
        if instance.restless:
            self._restless[instance.id] = None
        else:
            self._restless.pop(instance.id, None)
        if instance.broken or instance.retries:
            self._unsettled[instance.id] = instance
        else:
            self._unsettled.pop(instance.id, None)

    def _pull(self, instance: InstanceId) -> InstanceView:
        return self.instances[instance].view()

    def _recount(self, view: InstanceView) -> InstanceView:
        return self.instances[view.id].counted(view)

    def __str__(self) -> str:
        self._refresh()
        states = Counter(f"{v.state} {v.target or v.model or ''}".strip() for v in self._lookup.instances())
        instances = ", ".join(f"{count} {state}" for state, count in states.items())
        running = sum(self.num_running.values())
        return f"[requests: {running} running, {len(self.room)} waiting | instances: {instances}]"

    # ------------------------------------------------------------------ parts

    def part(self, name: str, *, running: bool) -> Any:
        """Return a field of a view; `running` is whether that and `adapters` may hold anything."""
        match name:
            case "instances":
                return self._lookup.instances()
            case "models":
                waiting = self.room.counts()
                return tuple(self._model(card, waiting[card.id]) for card in self.cards.values())
            case "waiting":
                return self.room.views()
            case "store":
                return self.store.view()
            case "adapters":
                return self.adapters() if running else ()
            case _:
                return tuple(self._running()) if running else ()

    def running_on(self, instance: InstanceId) -> tuple[RunningView, ...]:
        """Return the requests of one instance."""
        found = self.instances.get(instance)
        if found is None:
            return ()
        flights = sorted(found.flights.values(), key=lambda flight: flight.number)
        return tuple(_running(flight, found) for flight in flights)

    @property
    def lookup(self) -> Lookup:
        """The instances."""
        return self._lookup

    def _running(self) -> Iterator[RunningView]:
        for flight in self.flights.values():
            if flight.instance is not None:
                yield _running(flight, flight.instance)

    def _model(self, card: ModelCard, num_waiting: int) -> ModelView:
        return ModelView(
            id=card.id,
            weight_bytes=card.weight_bytes,
            min_replicas=card.min_replicas,
            weight=card.weight,
            num_running=self.num_running[card.id],
            num_waiting=num_waiting,
            num_failed_loads=self.num_failed_loads[card.id],
            last_evicted_s=self.last_evicted_s.get(card.id),
        )


class _Source:
    """Where the views of an observer find their parts."""

    def __init__(self, observer: Observer, *, running: bool) -> None:
        self._observer, self._runs = observer, running

    @property
    def lookup(self) -> Lookup:
        return self._observer.lookup

    def part(self, name: str) -> Any:
        return self._observer.part(name, running=self._runs)

    def running_on(self, instance: InstanceId) -> tuple[RunningView, ...]:
        return self._observer.running_on(instance) if self._runs else ()


def _running(flight: Flight, instance: Instance) -> RunningView:
    request, num_generated = flight.request, flight.num_generated
    return RunningView(
        id=request.id,
        model=request.model,
        instance=instance.id,
        num_tokens=len(request.prompt) + num_generated,
        num_remaining=request.sampling.max_tokens - num_generated,
        priority=request.priority,
        arrived_s=request.arrived_s,
        begun=num_generated > flight.hops[-1].first_index,
        moving=flight.moving,
    )
