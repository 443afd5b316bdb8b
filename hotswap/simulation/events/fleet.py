"""The fleet of production with riders in place of clients."""

from __future__ import annotations

from collections.abc import Callable

import anyio

from hotswap.request import ModelId, Request, Sampling
from hotswap.runtime import Fleet
from hotswap.runtime.registry import check_servable
from hotswap.simulation.events.rider import Ground, Rider

__all__ = ["EventFleet"]


class EventFleet(Fleet):
    """A fleet on `EventEngine`s that takes riders.

    They meet the same waiting room, control loop, swaps, moves and adapters as clients do, and have no task
    and no queue of their own.
    """

    _ground: Ground | None = None

    def ride(
        self,
        model: str,
        prompt: tuple[int, ...],
        sampling: Sampling,
        *,
        adapter: str | None = None,
        priority: int = 0,
        on_end: Callable[[Rider], None],
    ) -> Rider:
        """Start a request, and have its end told; arguments and errors are those of `stream`."""
        ground, name = self._common_ground(), ModelId(model)
        name = self._aliases.get(name, name)
        named = None if adapter is None else self._adapters.named(name, adapter)
        request = Request(
            id=self._next_id(),
            model=name,
            prompt=prompt,
            sampling=sampling,
            adapter=None if named is None else named.version,
            priority=priority,
            arrived_s=anyio.current_time(),
        )
        check_servable(request, self._registry.card(name), self._observer.memory_bytes)
        if named is not None:
            self._adapters.demand.ask(named)
        rider = Rider(request, named, ground, on_end)
        self._num_flights += 1
        rider.number = self._num_flights
        self._flights[request.id] = rider
        rider.start()
        return rider

    def _common_ground(self) -> Ground:
        tasks = self._open_tasks()
        if self._ground is None or self._ground.tasks is not tasks:
            self._ground = Ground(
                room=self._room,
                shelves=self._adapters.shelves,
                release=self._dispatcher.release,
                on_lost=self._changed,
                on_end=self._forget,
                tasks=tasks,
            )
        return self._ground

    def _forget(self, rider: Rider) -> None:
        del self._flights[rider.request.id]
