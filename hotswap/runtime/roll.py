"""New weights for a model, one replica after the other, while it is served."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Literal, TypeAlias

from hotswap.model import Adapter
from hotswap.request import ModelId
from hotswap.runtime.flight import Flight
from hotswap.runtime.instance import Instance
from hotswap.view import InstanceId

__all__ = ["Roller", "Streams"]

Streams: TypeAlias = Literal["pinned", "moved"]


@dataclass(frozen=True, slots=True)
class Roller:
    """Turns the replicas of one model to another, each once it is empty.

    Attributes:
        replicas: The instances that serve a model now.
        flights: Requests under way.
        drain: Empties an instance.
        turn: Swaps an empty instance to a model, and opens it.
        alias: Has new requests for the first model served by the second.
        adapter: The new model's adapter of the name that one of the old model has, if it has one.
    """

    replicas: Callable[[ModelId], list[Instance]]
    flights: Callable[[], Iterable[Flight]]
    drain: Callable[[Instance], Awaitable[object]]
    turn: Callable[[Instance, ModelId], Awaitable[object]]
    alias: Callable[[ModelId, ModelId], None]
    adapter: Callable[[Adapter], Adapter | None]

    async def run(self, model: ModelId, to: ModelId, streams: Streams) -> tuple[InstanceId, ...]:
        """Return the instances that were turned, in order."""
        turned: list[InstanceId] = []
        if self.replicas(to):
            self.alias(model, to)
        while replicas := [instance for instance in self.replicas(model) if instance.id not in turned]:
            instance = replicas[0]
            if streams == "moved" and self.replicas(to):
                self._move(instance, to)
            await self.drain(instance)
            await self.turn(instance, to)
            turned.append(instance.id)
            self.alias(model, to)
        self.alias(model, to)
        return tuple(turned)

    def _move(self, instance: Instance, to: ModelId) -> None:
        """Have an instance's requests go on with the new weights, at once.

        Those whose adapter has no new weights, as it was removed, end with the old ones.
        """
        for flight in list(self.flights()):
            adapter = None if flight.adapter is None else self.adapter(flight.adapter)
            if flight.instance is instance and (adapter is None) == (flight.adapter is None):
                flight.becomes = to, adapter
                flight.cut()
