"""Emptying an instance of requests without refusing one: they move, end, or wait for a place elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import anyio

from hotswap.action import DrainRecord, MigrationWay
from hotswap.errors import MigrationAborted
from hotswap.request import Request, RequestId
from hotswap.runtime.flight import Flight
from hotswap.runtime.instance import Instance
from hotswap.runtime.migrate import Migrator

__all__ = ["Drainer"]

# Seconds after which a request that could not move is tried again.
_RETRY_S = 0.05
# Moves of a request that may fail before it goes on elsewhere without one.
_MAX_FAILURES = 2


@dataclass(frozen=True, slots=True)
class Drainer:
    """Empties instances of one fleet.

    Attributes:
        migrator: Moves requests.
        flights: Those under way.
        route: Where a request could go now, if it had to; nobody is charged with it.
    """

    migrator: Migrator
    flights: Callable[[], Iterable[Flight]]
    route: Callable[[Request], Instance | None]

    async def run(
        self, instance: Instance, *, deadline_s: float | None, way: MigrationWay | None, reason: str
    ) -> DrainRecord:
        """Return once an instance is charged with no request; nobody sends any while it is `draining`.

        One that was sent there before is waited for as those that run are, and a move there is given up.
        Requests move one after the other. One for which there is no room elsewhere stays
        until it ends or there is; after `deadline_s` seconds the rest wait for a place in the waiting room,
        before others that came later.
        """
        started_s, moved = anyio.current_time(), 0
        seen: dict[RequestId, Flight] = {}
        self.migrator.turn_away(instance)
        failures: dict[RequestId, int] = {}
        cut: set[RequestId] = set()
        with anyio.move_on_after(float("inf") if deadline_s is None else deadline_s):
            while instance.num_requests:
                for flight in self._on(instance):
                    seen[flight.request.id] = flight
                    if await self._move(flight, instance, way, reason, failures):
                        moved += 1
                    elif failures.get(flight.request.id, 0) >= _MAX_FAILURES:
                        cut.add(flight.request.id)
                        flight.cut()
                await anyio.sleep(_RETRY_S)
        while instance.num_requests:
            for flight in self._on(instance):
                cut.add(flight.request.id)
                flight.cut()
            await anyio.sleep(_RETRY_S)
        return DrainRecord(
            instance=instance.id,
            reason=reason,
            started_s=started_s,
            seconds=anyio.current_time() - started_s,
            num_moved=moved,
            num_evicted=len(cut),
            num_finished=sum(
                flight.finish_reason is not None and flight.hops[-1].instance == instance.id
                for request, flight in seen.items()
                if request not in cut
            ),
        )

    def _on(self, instance: Instance) -> list[Flight]:
        return [flight for flight in self.flights() if flight.instance is instance]

    async def _move(
        self,
        flight: Flight,
        instance: Instance,
        way: MigrationWay | None,
        reason: str,
        failures: dict[RequestId, int],
    ) -> bool:
        if flight.instance is not instance or flight.moving:
            return False
        destination = self.route(flight.remaining)
        if destination is None or destination is instance:
            return False
        try:
            record = await self.migrator.run(flight, destination, way=way, reason=reason)
        except MigrationAborted:  # one of the ends is busy with another move
            return False
        if record.outcome == "aborted":
            failures[flight.request.id] = failures.get(flight.request.id, 0) + 1
        return record.outcome == "done"
