"""Admission: which requests of the queue go to which instances, as the router says."""

from __future__ import annotations

import heapq
from copy import copy

import anyio

from hotswap.checks import check_counts, shown
from hotswap.errors import ConfigError, QueueFull
from hotswap.request import ModelId, Request
from hotswap.router import Router
from hotswap.runtime.change import Change
from hotswap.runtime.instance import Instance
from hotswap.runtime.queue import ORDINARY, Answered, Standing, Ticket
from hotswap.runtime.samples import SampleGroup
from hotswap.runtime.state import FleetState
from hotswap.runtime.views import lend
from hotswap.view import InstanceId

__all__ = ["Admission"]

# Of all requests under way together: 100 MB.
_MOST_PROMPT_LOGPROBS = 1 << 23


class Admission:
    """Asks the router about waiting requests, and assigns each to the instance that it names.

    The router is asked about the first request of each model and adapter alone, and only while an instance of
    the model is open: a thousand requests that wait for one model cost one question. It is not asked about a
    sample that may begin where another sample of the same request has computed the prompt. What has stalled
    goes to no instance that a swap has: one that is staged beside the model there would evict it once more.

    Args:
        state: Of the fleet.
        router: Chooses instances.
        max_waiting: How many requests may wait before new ones are refused.
    """

    def __init__(self, state: FleetState, router: Router, *, max_waiting: int) -> None:
        check_counts(ConfigError, 0, max_waiting=max_waiting)
        self._state, self._router, self._max_waiting = state, router, max_waiting
        self._usual_wait_s = 1.0
        state.subscribe(self)

    def enter(
        self,
        request: Request,
        arrival: int,
        *,
        refusable: bool = False,
        num_behind: int = 0,
        standing: Standing = ORDINARY,
        answered: Answered | None = None,
    ) -> Ticket:
        """Queue a request, and ask for it at once if no other of its kind is ahead; `answered` is set then.

        The caller goes on to `answer`, which gives the ticket back. `num_behind` requests are to follow it.

        Raises:
            QueueFull: it is refusable and would have to wait, and with those behind it more requests would
                than may wait, or too many log-probabilities of prompts are kept already; with the time that
                a request has usually waited of late as `retry_after_s`.
        """
        state = self._state
        if refusable and request.num_prompt_logprobs:
            self._check_prompt_logprobs(request)
        answered = anyio.Event() if answered is None else answered
        ticket = state.enqueue(request, arrival, answered, standing)
        state.refresh()
        if state.queue.is_first(ticket) and self._may_ask(ticket):
            self._ask(ticket)
        if not ticket.waiting:
            return ticket
        if refusable and len(state.queue) + num_behind > self._max_waiting:
            state.dequeue(ticket)
            would = f"{num_behind + 1} samples would have to wait, and " if num_behind else ""
            raise QueueFull(
                f"{would}{len(state.queue)} requests wait already of {self._max_waiting} that may; try again "
                f"later{', or ask for fewer' if num_behind else ''}.",
                retry_after_s=self._usual_wait_s,
            )
        if not state.index.has_replica(request.model):
            state.tell(Change.WAITING)
        return ticket

    def _check_prompt_logprobs(self, request: Request) -> None:
        """Refuse log-probabilities of a prompt beside too many of other requests."""
        asked = request.num_prompt_logprobs
        kept = sum(active.request.num_prompt_logprobs for active in self._state.requests.values())
        if kept + asked > _MOST_PROMPT_LOGPROBS:
            raise QueueFull(
                f"prompt_logprobs of the request are {asked:,} log-probabilities, and requests under way "
                f"have asked for {kept:,} of the {_MOST_PROMPT_LOGPROBS:,} that a fleet keeps; try again "
                "once others have ended, or ask for fewer.",
                retry_after_s=self._usual_wait_s,
            )

    async def answer(self, ticket: Ticket) -> Instance:
        """Return the instance that the request is assigned to, waiting for one if need be.

        Cancelling gives the ticket back, and releases an instance that was assigned already.
        """
        try:
            await ticket.answered.wait()
            return self.take(ticket)
        except BaseException:
            if ticket.instance is not None:
                if ticket.standing.follows is not None:
                    ticket.standing.follows.left(ticket.request.id)
                self._state.release(ticket.request, ticket.instance)
            raise
        finally:
            self._state.dequeue(ticket)

    def take(self, ticket: Ticket) -> Instance:
        """Return the answer of a ticket that has one: an instance, or an error that is raised."""
        if ticket.error is not None:
            raise ticket.error
        assert ticket.instance is not None
        return ticket.instance

    def state_changed(self, change: Change) -> None:
        """Ask for waiting requests again when there may be room for one."""
        if change is not Change.WAITING:
            self._ask_all()

    def choose(self, request: Request, standing: Standing = ORDINARY) -> Instance | None:
        """Return where a request would go as of the last `refresh`, assigning it to nothing.

        `None` if it would have to wait.
        """
        state = self._state
        if not state.index.has_host(request.model):
            return None
        only_adapting = request.adapter is not None and not state.index.all_adapt(request.model)
        chosen = lend(state, lambda fleet: self._router.route(request, fleet), adapters=only_adapting)
        if chosen is None:
            return None
        try:
            is_known = chosen in state.instances
        except TypeError:  # not even a name
            is_known = False
        if not is_known:
            raise ConfigError(
                f"Router {self._router!r} chose {shown(chosen)} for request {request.id!r}; the fleet has no "
                "such instance. A router returns the id of one in its view."
            )
        return self._if_open(chosen, request, standing)

    def _if_open(self, instance: InstanceId, request: Request, standing: Standing) -> Instance | None:
        view = self._state.index.counted(instance)
        if view is None or not view.open or view.model != request.model:
            return None
        if standing.stalled and view.swapping:
            return None
        return self._state.instances[view.id] if request.adapter is None or view.max_adapters else None

    def _choose_for_sample(
        self, request: Request, standing: Standing, samples: SampleGroup
    ) -> Instance | None:
        """Return where a sample may go: to an instance that has the prompt, or to any if none computes it."""
        for ready in samples.ready:
            view = self._state.index.counted(ready)
            if view is None or view.hosted != request.model:
                samples.forget(ready)
            elif (instance := self._if_open(ready, request, standing)) is not None and not view.swapping:
                return instance
        return self.choose(request, standing) if samples.leader is None else None

    def refuse(self, model: ModelId, error: Exception) -> int:
        """Answer every request that waits for a model with an error; return how many they were."""
        tickets = self._state.queue.of(model)
        for ticket in tickets:
            ticket.error = copy(error)
            self._state.dequeue(ticket)
            ticket.answered.set()
        return len(tickets)

    def _ask_all(self) -> None:
        """Ask about the first requests of every model, in the order of the queue, until none can go."""
        state = self._state
        if not state.queue.models:
            return
        state.refresh()
        heads = [state.queue.heads(model) for model in state.index.open_among(state.queue.models)]
        firsts = [
            (ticket.order, number, ticket) for number, of in enumerate(heads) if (ticket := next(of, None))
        ]
        heapq.heapify(firsts)
        while firsts:
            _, number, ticket = heapq.heappop(firsts)
            if self._may_ask(ticket):
                self._ask(ticket)
            if state.index.has_open(ticket.request.model) and (following := next(heads[number], None)):
                heapq.heappush(firsts, (following.order, number, following))

    def _may_ask(self, ticket: Ticket) -> bool:
        if ticket.standing.suspect and self._state.suspect is not None:
            return False
        request = ticket.request
        return self._state.index.has_open(request.model, adapters=request.adapter is not None)

    def _ask(self, ticket: Ticket) -> None:
        request, standing = ticket.request, ticket.standing
        try:
            ticket.instance = (
                self.choose(request, standing)
                if (samples := standing.follows) is None
                else self._choose_for_sample(request, standing, samples)
            )
        except Exception as exc:  # a router's fault belongs to the request that it was asked about
            ticket.error = exc
        if ticket.instance is None and ticket.error is None:
            return
        if ticket.instance is not None:
            assigned_s = self._state.assign(request, ticket.instance, suspect=standing.suspect)
            waited_s = max(assigned_s - ticket.waiting_since_s, 0.1)
            self._usual_wait_s += 0.1 * (waited_s - self._usual_wait_s)
            if ticket.standing.follows is not None:
                ticket.standing.follows.assigned(ticket.request.id, ticket.instance.id)
        self._state.dequeue(ticket)
        ticket.answered.set()

    def __repr__(self) -> str:
        return f"<Admission [{len(self._state.queue)} of {self._max_waiting} waiting: {self._state.queue!r}]>"
