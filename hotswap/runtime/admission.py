"""The waiting room: requests that no instance has taken yet, in order, and who may go next."""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Container
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import anyio

from hotswap.errors import ConfigError, QueueFull
from hotswap.request import AdapterId, ModelId, Request
from hotswap.runtime.instance import Instance
from hotswap.view import WaitingView

__all__ = ["Seat", "WaitingRoom"]

Lane: TypeAlias = tuple[ModelId, AdapterId | None]


class Bell(Protocol):
    """What a seat rings when it has its answer."""

    def set(self) -> None:
        """Ring."""
        ...

    def is_set(self) -> bool:
        """Whether it has."""
        ...

    async def wait(self) -> object:
        """Return once it has."""
        ...


@dataclass(slots=True, eq=False)
class Seat:
    """One waiting request and, later, the answer it waits for."""

    order: tuple[int, float, int]
    request: Request
    view: WaitingView
    answered: Bell
    instance: Instance | None = None
    error: Exception | None = None
    risen: bool = False

    def __lt__(self, other: Seat) -> bool:
        return self.order < other.order


class WaitingRoom:
    """Admits requests to instances: by priority, then by arrival, first come first served within a lane.

    A lane is a model with an adapter. Only the first of a lane is asked about, so a thousand requests that
    wait for one model cost one question, and none while no instance serves it (`served`). `route` answers
    with an instance that has already been charged with the request; who gets the answer gives it back by
    `release`. `on_wait` is told of a model for which somebody begins to wait.
    """

    def __init__(
        self,
        *,
        max_waiting: int,
        served: Callable[[], Container[ModelId]],
        route: Callable[[Request], Instance | None],
        release: Callable[[Request, Instance], None],
        on_wait: Callable[[ModelId], None],
    ) -> None:
        if max_waiting < 0:
            raise ConfigError(f"max_waiting is {max_waiting!r}; give 0 (nobody may wait) or more requests.")
        self._max_waiting = max_waiting
        self._served = served
        self._route = route
        self._release = release
        self._on_wait = on_wait
        self._lanes: dict[Lane, list[Seat]] = {}
        self._seats: list[Seat] = []
        self._views: tuple[WaitingView, ...] | None = None
        self._num_seats = 0
        self._usual_wait_s = 1.0

    def __len__(self) -> int:
        return len(self._seats)

    def enter(self, request: Request, *, refusable: bool = False, bell: Bell | None = None) -> Seat:
        """Seat a request and ask for it at once, if none of its lane is before it; `bell` tells its answer.

        Whoever enters goes on to `answer`, which is what gives the seat back.

        Raises:
            QueueFull: it is refusable and would have to wait, and as many as may wait do; with the time
                a request has usually waited of late as `retry_after_s`.
        """
        seat = self._sit(request, anyio.Event() if bell is None else bell)
        if self._lanes[_lane(request)][0] is seat:
            self._ask([seat])
        if seat.answered.is_set():
            return seat
        if refusable and len(self._seats) > self._max_waiting:
            self._rise(seat)
            raise QueueFull(
                f"{len(self._seats)} requests wait already, the most this fleet lets wait; try again later.",
                retry_after_s=self._usual_wait_s,
            )
        self._on_wait(request.model)
        return seat

    async def answer(self, seat: Seat) -> Instance:
        """Return the instance that the request may go to, waiting for one if need be.

        Cancelling gives up the seat, and an instance already granted is released.
        """
        try:
            await seat.answered.wait()
            return self.take(seat)
        except BaseException:
            if seat.instance is not None:
                self._release(seat.request, seat.instance)
            raise
        finally:
            self._rise(seat)

    def take(self, seat: Seat) -> Instance:
        """Return the answer of a seat whose bell has rung, which is an instance or else raised."""
        if seat.error is not None:
            raise seat.error
        assert seat.instance is not None
        self._learn(anyio.current_time() - seat.view.waiting_since_s)
        return seat.instance

    def wake(self) -> None:
        """Ask again for the first of every lane, in order, until nobody moves."""
        served = self._served()
        self._ask([lane[0] for (model, _), lane in self._lanes.items() if model in served])

    def _ask(self, heads: list[Seat]) -> None:
        heapq.heapify(heads)
        while heads:
            seat = heapq.heappop(heads)
            try:
                seat.instance = self._route(seat.request)
            except Exception as exc:  # a router's fault belongs to the request it was asked about
                seat.error = exc
            if seat.instance is None and seat.error is None:
                continue
            self._rise(seat)
            seat.answered.set()
            if lane := self._lanes.get(_lane(seat.request)):
                heapq.heappush(heads, lane[0])

    def refuse(self, model: ModelId, error: Callable[[], Exception]) -> int:
        """Answer everyone who waits for `model` with an error; return how many that were."""
        seats = [seat for lane, seats in self._lanes.items() if lane[0] == model for seat in seats]
        for seat in seats:
            seat.error = error()
            self._rise(seat)
            seat.answered.set()
        return len(seats)

    def views(self) -> tuple[WaitingView, ...]:
        """Everyone who waits, in order."""
        if self._views is None:
            self._views = tuple(seat.view for seat in self._seats)
        return self._views

    def counts(self) -> Counter[ModelId]:
        """How many wait for each model, whatever their adapter."""
        counts: Counter[ModelId] = Counter()
        for (model, _), seats in self._lanes.items():
            counts[model] += len(seats)
        return counts

    def num_waiting(self, model: ModelId, adapter: AdapterId | None) -> int:
        """How many wait for a model with one adapter, or with none."""
        return len(self._lanes.get((model, adapter), ()))

    def _sit(self, request: Request, bell: Bell) -> Seat:
        self._num_seats += 1
        view = WaitingView(
            id=request.id,
            model=request.model,
            adapter=request.adapter,
            num_tokens=request.num_tokens,
            num_generated=len(request.generated),
            priority=request.priority,
            arrived_s=request.arrived_s,
            waiting_since_s=anyio.current_time(),
        )
        seat = Seat((-request.priority, request.arrived_s, self._num_seats), request, view, bell)
        insort(self._seats, seat)
        self._views = None
        insort(self._lanes.setdefault(_lane(request), []), seat)
        return seat

    def _rise(self, seat: Seat) -> None:
        """Take a seat out of its lane; harmless when it has left already."""
        if seat.risen:
            return
        seat.risen = True
        lane = self._lanes[_lane(seat.request)]
        del lane[bisect_left(lane, seat)]
        del self._seats[bisect_left(self._seats, seat)]
        self._views = None
        if not lane:
            del self._lanes[_lane(seat.request)]

    def _learn(self, waited_s: float) -> None:
        self._usual_wait_s += 0.1 * (max(waited_s, 0.1) - self._usual_wait_s)

    def __repr__(self) -> str:
        lanes = ", ".join(f"{len(seats)} for {model}" for (model, _), seats in self._lanes.items())
        return f"<WaitingRoom [{len(self)}/{self._max_waiting}: {lanes or 'empty'}]>"


def _lane(request: Request) -> Lane:
    return request.model, request.adapter
