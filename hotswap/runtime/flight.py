"""One request's life in the fleet: its journal, its client's stream, and its way across instances."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import anyio

from hotswap import telemetry as tm
from hotswap.errors import (
    DeadlineExceeded,
    FleetClosed,
    InstanceError,
    InstanceLost,
    RequestEvicted,
)
from hotswap.model import Adapter
from hotswap.request import FinishReason, ModelId, Request, Token
from hotswap.runtime.admission import Seat, WaitingRoom
from hotswap.runtime.instance import Instance
from hotswap.runtime.shelves import Shelves
from hotswap.stream import TokenQueue, TokenStream
from hotswap.telemetry import Telemetry
from hotswap.text import TextStream
from hotswap.view import InstanceId

if TYPE_CHECKING:
    from opentelemetry.trace import SpanContext

__all__ = ["FleetStream", "Flight", "Hop", "fly"]

log = logging.getLogger("hotswap")

MAX_INSTANCE_ERRORS = 3
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.01, 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Hop:
    """One stay of a request on an instance; `first_index` is the index of the first token it was to give."""

    instance: InstanceId
    first_index: int


class Flight:
    """A request under way. Its journal holds every token the client was given, each exactly once."""

    def __init__(
        self,
        request: Request,
        *,
        adapter: Adapter | None,
        telemetry: Telemetry,
        text: TextStream | None,
        deadline_s: float | None,
    ) -> None:
        self.request, self.adapter = request, adapter
        self.span = telemetry.start(tm.SPAN_REQUEST, _describe(request))
        self.tokens = TokenQueue()
        self.scope = anyio.CancelScope()
        self.ended = anyio.Event()
        self.number = 0
        self.instance: Instance | None = None
        self.hops: list[Hop] = []
        self.num_stalls = 0
        self.num_instance_errors = 0
        self.evicted_by: SpanContext | None = None
        self.moving = False
        self.on_left: Callable[[], None] | None = None
        self.becomes: tuple[ModelId, Adapter | None] | None = None
        self.heading: Instance | None = None
        self.arrived = anyio.Event()
        self.arrived_s: float | None = None
        self._hop_scope: anyio.CancelScope | None = None
        self.deadline_at_s = float("inf") if deadline_s is None else request.arrived_s + deadline_s
        self.finish_reason: FinishReason | None = None
        self._journal: list[int] = []
        self._text = text
        self._telemetry = telemetry
        self._first_token_s: float | None = None
        self._error: BaseException | None = None

    @property
    def landed(self) -> bool:
        """Whether the client has been given its last token or its error."""
        return self.tokens.closed

    @property
    def journal(self) -> tuple[int, ...]:
        """The tokens delivered so far."""
        return tuple(self._journal)

    @property
    def num_generated(self) -> int:
        """How many tokens were delivered so far."""
        return len(self._journal)

    @property
    def num_hops(self) -> int:
        """On how many instances, one after another, it has run so far."""
        return len(self.hops)

    @property
    def remaining(self) -> Request:
        """The request as the next instance must see it."""
        return self.request.continued(self._journal)

    def board(self, instance: Instance) -> None:
        """Begin a stay on an instance."""
        self.instance = instance
        instance.flights[self.request.id] = self

    def alight(self, instance: Instance) -> None:
        """End it."""
        self.instance = None
        del instance.flights[self.request.id]

    def deliver(self, token: Token) -> None:
        """Write a token into the journal and hand it to the client, with the text it completes.

        Raises:
            InstanceError: the engine skipped or repeated a position.
        """
        if token.index != len(self._journal):
            raise InstanceError(
                f"An engine gave position {token.index} of request {self.request.id!r} when "
                f"{len(self._journal)} was due; the engine breaks its contract."
            )
        self._journal.append(token.id)
        self.num_stalls = self.num_instance_errors = 0
        if self.heading is None and not self.arrived.is_set():
            self.arrived_s = anyio.current_time()
            self.arrived.set()
        if self._first_token_s is None:
            self._first_token_s = anyio.current_time()
        text, finish = "", token.finish_reason
        if self._text is not None:
            text = self._text.push(token.id, last=finish is not None)
            finish = "stop" if self._text.stopped else finish
        self.tokens.put(Token(id=token.id, index=token.index, text=text, finish_reason=finish))
        if finish is not None:
            self.finish_reason = finish
            self.tokens.close()

    def head_for(self, instance: Instance, by: SpanContext) -> None:
        """Go to an instance, which is charged with the request already, as soon as this one lets go of it."""
        self.heading, self.evicted_by = instance, by
        self.arrived, self.arrived_s = anyio.Event(), None

    def turn_back(self) -> Instance | None:
        """Take back what `head_for` said, and return the instance; `None` if it is too late or never was."""
        heading, self.heading = self.heading, None
        return heading

    @contextmanager
    def hop(self) -> Generator[anyio.CancelScope]:
        """Bracket a stay on an instance, which `cut` ends."""
        with anyio.CancelScope() as self._hop_scope:
            yield self._hop_scope

    def cut(self) -> None:
        """End the present hop where it is, to go on elsewhere."""
        if self._hop_scope is not None:
            self._hop_scope.cancel()

    def turn(self) -> None:
        """Go on as a request for the model that it is to become, if there is one."""
        if self.becomes is not None:
            model, self.adapter = self.becomes
            version = None if self.adapter is None else self.adapter.version
            self.request, self.becomes = replace(self.request, model=model, adapter=version), None

    def divert(self, by: SpanContext | None) -> None:
        """Note that the request left an instance unfinished, and which swap sent it away."""
        if self.heading is not None:  # it was meant to
            return
        self.arrived.set()
        self.num_stalls += 1
        self.evicted_by = by
        if by is not None:
            self.span.add_link(by)

    def fail(self, error: BaseException) -> None:
        """Give the client its error, unless it has all it asked for."""
        if not self.landed:
            self._error = error
        self.tokens.close(error)

    def end(self) -> None:
        """Close the books: metrics and the request's span."""
        self.tokens.close(FleetClosed("The fleet closed before the request finished; ask another fleet."))
        self.ended.set()
        self.arrived.set()
        try:
            self._measure()
            self._describe()
            self._telemetry.finish(self.span, self._error)
        except Exception:  # a telemetry provider's own fault
            log.exception("The end of request %r was not recorded.", self.request.id)

    def _describe(self) -> None:
        self.span.set_attribute(tm.OUTPUT_TOKENS, len(self._journal))
        self.span.set_attribute(tm.NUM_HOPS, self.num_hops)
        if self.finish_reason is not None:
            self.span.set_attribute(tm.FINISH_REASONS, (self.finish_reason,))

    def _measure(self) -> None:
        if self._first_token_s is None:
            return
        attributes = {tm.MODEL: self.request.model}
        self._telemetry.ttft.record(self._first_token_s - self.request.arrived_s, attributes)
        gaps = len(self._journal) - 1
        if gaps > 0:
            self._telemetry.tpot.record((anyio.current_time() - self._first_token_s) / gaps, attributes)

    def __repr__(self) -> str:
        where = self.instance.id if self.instance is not None else "waiting"
        return (
            f"<Flight {self.request.id} {self.request.model} at {where} [{len(self._journal)} tokens, "
            f"{self.num_hops} hops]>"
        )


class FleetStream(TokenStream):
    """A client's end of a request: iterate it for tokens with text, across however many instances.

    Raises while iterating: a `RequestError` when the request cannot be served, an `InstanceError` when
    engines failed it repeatedly, `FleetClosed` when the fleet ended first.
    """

    def __init__(self, flight: Flight) -> None:
        self._flight = flight

    async def __anext__(self) -> Token:
        return await self._flight.tokens.__anext__()

    @property
    def request(self) -> Request:
        """The request as it was made; its `adapter` is the version that it got."""
        return self._flight.request

    @property
    def num_hops(self) -> int:
        """On how many instances the request has run so far."""
        return self._flight.num_hops

    @property
    def hops(self) -> tuple[Hop, ...]:
        """Where the request has run so far, in order, and from which token on: where its seams are."""
        return tuple(self._flight.hops)

    def __repr__(self) -> str:
        return f"<FleetStream of {self._flight!r}>"


async def fly(
    flight: Flight,
    seat: Seat | None,
    *,
    room: WaitingRoom,
    shelves: Shelves,
    release: Callable[[Request, Instance], None],
    on_lost: Callable[[], None],
    telemetry: Telemetry,
) -> None:
    """Carry a flight from its first seat until it lands: the one task of its request, one of the fleet's.

    An eviction or a lost instance sends it round again with its journal as a longer prompt (Snowflake's
    eviction and ServerlessLLM's token migration are this one loop), a move straight to where it has made
    ready. Every other error is its client's, never the fleet's.
    """
    flight.scope.deadline = flight.deadline_at_s
    try:
        with flight.scope:
            while not flight.landed:
                await _pause(flight)
                instance = flight.turn_back() or await room.answer(seat or room.enter(flight.remaining))
                seat = None
                try:
                    flight.board(instance)
                    await _hop(flight, instance, shelves, telemetry)
                except RequestEvicted:
                    flight.divert(instance.swap_context)
                except InstanceLost:
                    flight.divert(None)
                    on_lost()
                except InstanceError as exc:
                    _blame(flight, exc)
                finally:
                    flight.alight(instance)
                    if flight.on_left is not None:
                        flight.on_left()
                    release(flight.request, instance)
                    flight.turn()
    except Exception as exc:
        flight.fail(exc)
    finally:
        if (heading := flight.turn_back()) is not None:
            release(flight.request, heading)
        if flight.scope.cancelled_caught and anyio.current_time() >= flight.deadline_at_s:
            flight.fail(
                DeadlineExceeded(f"Request {flight.request.id!r} passed its deadline; allow it more time.")
            )
        flight.end()


async def _hop(flight: Flight, instance: Instance, shelves: Shelves, telemetry: Telemetry) -> None:
    links = [flight.evicted_by] if flight.evicted_by is not None else []
    attributes = {tm.INSTANCE: instance.id, tm.REQUEST_ID: flight.request.id}
    flight.hops.append(Hop(instance=instance.id, first_index=len(flight.journal)))
    with (
        telemetry.span(tm.SPAN_HOP, attributes, parent=flight.span, links=links) as span,
        flight.hop() as scope,
    ):
        async with (
            shelves.held(flight.adapter, flight.request.id, instance, span),
            instance.engine.stream(flight.remaining) as tokens,
        ):
            async for token in tokens:
                if token.index == flight.hops[-1].first_index and tokens.num_reused_tokens:
                    span.set_attribute(tm.REUSED_TOKENS, tokens.num_reused_tokens)
                instance.settle_first_token(telemetry)
                flight.deliver(token)
                if flight.landed:
                    return
    if not flight.landed and not scope.cancelled_caught:
        raise InstanceError(
            f"Instance {instance.id!r} ended the stream of request {flight.request.id!r} "
            "without a finish reason."
        )


def _blame(flight: Flight, error: InstanceError) -> None:
    """Try elsewhere a few times, then tell the client."""
    flight.divert(None)
    flight.num_instance_errors += 1
    if flight.num_instance_errors >= MAX_INSTANCE_ERRORS:
        flight.fail(error)


async def _pause(flight: Flight) -> None:
    """Wait a little, and longer each time, for a flight that was sent away again before it got a token."""
    if flight.num_stalls > 1:
        await anyio.sleep(min(FIRST_PAUSE_S * 2 ** (flight.num_stalls - 2), LONGEST_PAUSE_S))


def _describe(request: Request) -> tm.Attributes:
    adapter = {tm.ADAPTER: request.adapter} if request.adapter else {}
    return {
        tm.OPERATION: "text_completion",
        tm.MODEL: request.model,
        tm.REQUEST_ID: request.id,
        tm.INPUT_TOKENS: len(request.prompt),
        tm.MAX_TOKENS: request.sampling.max_tokens,
        tm.TEMPERATURE: request.sampling.temperature,
        tm.PRIORITY: request.priority,
        **adapter,
    }
