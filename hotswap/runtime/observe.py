"""The fleet as it can be seen at one moment: what schedulers, routers and people decide from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import anyio

from hotswap.model import ModelCard
from hotswap.request import ModelId, RequestId
from hotswap.runtime.admission import WaitingRoom
from hotswap.runtime.flight import Flight
from hotswap.runtime.instance import Instance
from hotswap.store import WeightStore
from hotswap.view import FleetView, InstanceId, InstanceState, ModelView, RunningView

__all__ = ["Observer"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Observer:
    """Makes views of one fleet; it owns nothing of what it looks at."""

    instances: Mapping[InstanceId, Instance]
    cards: Mapping[ModelId, ModelCard]
    flights: Mapping[RequestId, Flight]
    room: WaitingRoom
    store: WeightStore
    num_running: Counter[ModelId]
    num_failed_loads: Counter[ModelId]
    left_s: Mapping[ModelId, float]

    def view(self) -> FleetView:
        """Return all there is to see."""
        return replace(self.brief(), running=tuple(self._running()))

    def brief(self) -> FleetView:
        """Return the same without the requests that run: routers are asked often and need none of them."""
        waiting = self.room.counts()
        return FleetView(
            now_s=anyio.current_time(),
            instances=tuple(instance.view() for instance in self.instances.values()),
            models=tuple(self._model(card, waiting[card.id]) for card in self.cards.values()),
            waiting=self.room.views(),
            store=self.store.view(),
        )

    def floors_hold(self) -> bool:
        """Whether every model has its least number of replicas serving."""
        views = (instance.view() for instance in self.instances.values())
        serving = Counter(view.model for view in views if view.state is InstanceState.SERVING)
        return all(serving[card.id] >= card.min_replicas for card in self.cards.values())

    def __str__(self) -> str:
        views = [instance.view() for instance in self.instances.values()]
        states = Counter(f"{v.state} {v.target or v.model or ''}".strip() for v in views)
        instances = ", ".join(f"{count} {state}" for state, count in states.items())
        running = sum(self.num_running.values())
        return f"[requests: {running} running, {len(self.room)} waiting | instances: {instances}]"

    def _running(self) -> Iterator[RunningView]:
        for flight in self.flights.values():
            if flight.instance is not None:
                request, num_generated = flight.request, len(flight.journal)
                yield RunningView(
                    id=request.id,
                    model=request.model,
                    instance=flight.instance.id,
                    num_tokens=len(request.prompt) + num_generated,
                    num_remaining=request.sampling.max_tokens - num_generated,
                    priority=request.priority,
                    arrived_s=request.arrived_s,
                    begun=num_generated > flight.hops[-1].first_index,
                    moving=flight.moving,
                )

    def _model(self, card: ModelCard, num_waiting: int) -> ModelView:
        return ModelView(
            id=card.id,
            weight_bytes=card.weight_bytes,
            min_replicas=card.min_replicas,
            slowness=card.slowness,
            num_running=self.num_running[card.id],
            num_waiting=num_waiting,
            num_failed_loads=self.num_failed_loads[card.id],
            left_s=self.left_s.get(card.id),
        )
