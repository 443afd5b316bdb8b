"""The queue of a fleet: requests that no instance has taken yet, in order."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass
from itertools import chain
from typing import Protocol, TypeAlias

from hotswap.kv_lookup import KVLookup
from hotswap.loop_time import current_time
from hotswap.request import AdapterId, ModelId, Request, RequestId
from hotswap.runtime.active import ActiveRequest
from hotswap.runtime.instance import Instance
from hotswap.runtime.samples import SampleGroup
from hotswap.view import WaitingView

__all__ = ["ORDINARY", "Answered", "Queue", "QueueKey", "Standing", "Ticket"]

# How many later arrivals a request goes ahead of for each level of its priority; engines have the same.
PRIORITY_PLACES = 64


@dataclass(frozen=True, slots=True)
class Standing:
    """By what else than its model and adapter a request may have to wait.

    Attributes:
        suspect: Whether it may run beside no other suspect.
        stalled: Whether it may go to no instance that a swap has, since it would be evicted there once more.
        follows: The samples of its request, if it may go where one of them has computed the prompt, and waits
            while one does.
    """

    suspect: bool = False
    stalled: bool = False
    follows: SampleGroup | None = None


ORDINARY = Standing()

# Requests of one key are interchangeable for a router: what it declines for the first, it declines for all.
QueueKey: TypeAlias = tuple[ModelId, AdapterId | None, Standing]


class Answered(Protocol):
    """What a ticket sets when it has its answer; an `anyio.Event` is one."""

    def set(self) -> object:
        """Note the answer."""
        ...

    def is_set(self) -> bool:
        """Whether there is an answer."""
        ...

    async def wait(self) -> object:
        """Return once there is an answer."""
        ...


@dataclass(slots=True, eq=False)
class Ticket:
    """One waiting request and, later, the answer it waits for.

    Attributes:
        order: Its place: the number of its arrival, less 64 for each level of priority, then a number that no
            other ticket has.
        request: The request.
        waiting_since_s: The loop time at which it came to the queue.
        answered: Set when there is an answer.
        instance: The answer, which the request has been assigned to.
        error: The answer, if the request cannot be served.
        standing: By what else it may have to wait.
        waiting: Whether the queue still has it.
        seen: Its `view`, once it was asked for.
        active: The request under way, once it has begun.
        kv_lookup: Tells what is stored of it.
    """

    order: tuple[int, int]
    request: Request
    answered: Answered
    waiting_since_s: float
    standing: Standing = ORDINARY
    instance: Instance | None = None
    error: Exception | None = None
    waiting: bool = True
    seen: WaitingView | None = None
    active: ActiveRequest | None = None
    kv_lookup: KVLookup | None = None

    @property
    def view(self) -> WaitingView:
        """What schedulers see of it; most requests find an instance before a scheduler looks."""
        if self.seen is None:
            request, active = self.request, self.active
            last = active.hops[-1] if active is not None and active.hops else None
            stored_tokens, stored_node = (0, "") if self.kv_lookup is None else self.kv_lookup.stored(request)
            self.seen = WaitingView(
                id=request.id,
                model=request.model,
                adapter=request.adapter,
                num_tokens=request.num_tokens,
                num_generated=len(request.generated),
                priority=request.priority,
                arrived_s=request.arrived_s,
                waiting_since_s=self.waiting_since_s,
                num_evicted=0 if active is None else active.num_evicted,
                num_stalls=0 if active is None else active.history.num_stalls,
                stored_tokens=stored_tokens,
                stored_node=stored_node,
                last_instance=last.instance if last and last.first_index < len(request.generated) else None,
            )
        return self.seen

    @property
    def key(self) -> QueueKey:
        """What it has in common with the requests that the router cannot tell from it."""
        return self.request.model, self.request.adapter, self.standing


class Queue:
    """Waiting requests by model, in order: first come first served, but for a bounded lead of priority.

    A request goes ahead of lower priorities that arrived at most 64 requests before it for each level, so
    that none waits for ever.
    """

    def __init__(self, kv_lookup: KVLookup | None = None) -> None:
        self._kv_lookup = kv_lookup
        self._by_model: dict[ModelId, _ModelQueue] = {}
        self._by_request: dict[RequestId, Ticket] = {}
        self._views: tuple[WaitingView, ...] | None = None
        self._num_tickets = 0

    def __len__(self) -> int:
        return sum(len(queue.tickets) for queue in self._by_model.values())

    def add(
        self,
        request: Request,
        arrival: int,
        answered: Answered,
        standing: Standing = ORDINARY,
        *,
        active: ActiveRequest | None = None,
    ) -> Ticket:
        """Append a request that was the fleet's `arrival`th, and return its ticket.

        `active` is the request under way, once that has begun.
        """
        self._num_tickets += 1
        order = (arrival - PRIORITY_PLACES * request.priority, self._num_tickets)
        ticket = Ticket(order, request, answered, current_time(), standing, active=active)
        ticket.kv_lookup = self._kv_lookup
        self._append(ticket)
        return ticket

    def _append(self, ticket: Ticket) -> None:
        model = ticket.request.model
        if model not in self._by_model:
            self._by_model[model] = _ModelQueue()
        self._by_model[model].add(ticket)
        self._by_request[ticket.request.id] = ticket
        self._views = None

    def retarget(self, requests: Mapping[Ticket, Request]) -> None:
        """Have tickets wait for their requests as other models' requests, each in its place."""
        for ticket, request in requests.items():
            self.remove(ticket)
            ticket.request, ticket.waiting, ticket.seen = request, True, None
            self._append(ticket)
        for model in {request.model for request in requests.values()}:
            self._by_model[model].sort()

    def remove(self, ticket: Ticket) -> None:
        """Take a ticket out; nothing happens when it has left already."""
        if ticket.waiting:
            ticket.waiting = False
            queue = self._by_model[ticket.request.model]
            queue.remove(ticket)
            self._by_request.pop(ticket.request.id, None)
            self._views = None
            if not queue.tickets:
                del self._by_model[ticket.request.model]

    @property
    def models(self) -> Set[ModelId]:
        """The models that requests wait for."""
        return self._by_model.keys()

    def heads(self, model: ModelId) -> Iterator[Ticket]:
        """Yield the tickets of a model to ask about, in order; one that is still there has been declined.

        Of the tickets with a key that was declined none follows.
        """
        queue = self._by_model.get(model)
        return iter(()) if queue is None else queue.heads()

    def of(self, model: ModelId) -> tuple[Ticket, ...]:
        """Return the tickets of a model, those that have waited longest first."""
        queue = self._by_model.get(model)
        return () if queue is None else tuple(queue.tickets.values())

    def oldest_s(self, model: ModelId) -> float | None:
        """Return the loop time since which a request has waited for a model; `None` if none waits."""
        queue = self._by_model.get(model)
        return None if queue is None else next(iter(queue.tickets.values())).waiting_since_s

    def count(self, model: ModelId) -> int:
        """Return how many requests wait for a model."""
        queue = self._by_model.get(model)
        return 0 if queue is None else len(queue.tickets)

    def count_with(self, model: ModelId, adapter: AdapterId) -> int:
        """Return how many requests wait for a model with one adapter."""
        queue = self._by_model.get(model)
        return 0 if queue is None else queue.num_with[adapter]

    def is_first(self, ticket: Ticket) -> bool:
        """Return whether no ticket of the same key is ahead of this one."""
        return self._by_model[ticket.request.model].keys[ticket.key][0] == ticket.order

    def view(self, request: RequestId) -> WaitingView | None:
        """Return one waiting request."""
        ticket = self._by_request.get(request)
        return None if ticket is None else ticket.view

    def views(self) -> tuple[WaitingView, ...]:
        """Return every waiting request, in order."""
        if self._views is None:
            tickets = chain.from_iterable(queue.tickets.values() for queue in self._by_model.values())
            self._views = tuple(ticket.view for ticket in sorted(tickets, key=lambda ticket: ticket.order))
        return self._views

    def __repr__(self) -> str:
        models = ", ".join(f"{len(queue.tickets)} for {model}" for model, queue in self._by_model.items())
        return f"<Queue [{models or 'empty'}]>"


class _ModelQueue:
    """The waiting requests of one model.

    Attributes:
        tickets: By their number, those that have waited longest first.
        keys: The places of those of each key, in order.
        firsts: The first place of each key, in order.
        num_with: How many there are with each adapter.
    """

    def __init__(self) -> None:
        self.tickets: OrderedDict[int, Ticket] = OrderedDict()
        self.num_with: Counter[AdapterId | None] = Counter()
        self.keys: dict[QueueKey, list[tuple[int, int]]] = {}
        self.firsts: list[tuple[int, int]] = []

    def add(self, ticket: Ticket) -> None:
        self.tickets[ticket.order[1]] = ticket
        self.num_with[ticket.request.adapter] += 1
        places = self.keys.setdefault(ticket.key, [])
        if not places or ticket.order < places[0]:
            if places:
                del self.firsts[bisect_left(self.firsts, places[0])]
            insort(self.firsts, ticket.order)
        insort(places, ticket.order)

    def remove(self, ticket: Ticket) -> None:
        del self.tickets[ticket.order[1]]
        self.num_with[ticket.request.adapter] -= 1
        places = self.keys[ticket.key]
        place = bisect_left(places, ticket.order)
        del places[place]
        if not place:
            del self.firsts[bisect_left(self.firsts, ticket.order)]
            if places:
                insort(self.firsts, places[0])
            else:
                del self.keys[ticket.key]

    def sort(self) -> None:
        self.tickets = OrderedDict(sorted(self.tickets.items()))

    def heads(self) -> Iterator[Ticket]:
        place = 0
        while place < len(self.firsts):
            ticket = self.tickets[self.firsts[place][1]]
            yield ticket
            place += ticket.waiting  # else the next one has its place now
