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
        tasks, name = self._open_tasks(), ModelId(model)
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

        def end(rider: Rider) -> None:
            del self._flights[request.id]
            on_end(rider)

        ground = Ground(
            room=self._room,
            shelves=self._adapters.shelves,
            release=self._dispatcher.release,
            on_lost=self._changed,
            on_end=end,
            tasks=tasks,
        )
        rider = Rider(request, named, ground)
        self._num_flights += 1
        rider.number = self._num_flights
        self._flights[request.id] = rider
        rider.start()
        return rider
