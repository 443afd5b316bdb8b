"""One request under way, as the fleet knows it: what it has, where it runs, and where it goes next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

import anyio

from hotswap.loop_time import current_time
from hotswap.model import Adapter
from hotswap.request import FinishReason, ModelId, Request
from hotswap.runtime.lifecycle import (
    DECODED_TOKENS,
    NEW,
    Event,
    Evicted,
    GotToken,
    History,
    Interrupted,
    Lost,
    Moved,
    Next,
    step,
)
from hotswap.runtime.samples import SampleGroup
from hotswap.view import InstanceId

if TYPE_CHECKING:
    from opentelemetry.trace import Span, SpanContext

    from hotswap.runtime.instance import Instance

__all__ = ["ActiveRequest", "Hop", "MoveListener"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Hop:
    """One stay of a request on an instance, since `since_s` of the loop.

    `first_index` is the index of the first token that it was to give there. `restored_tokens` of the tokens
    before it were copied there from a KV store.
    """

    instance: InstanceId
    first_index: int
    since_s: float = 0.0
    restored_tokens: int = 0


class MoveListener(Protocol):
    """A move that is told when its request leaves the source."""

    def source_left(self) -> None:
        """The request has left the instance that the move takes it from."""
        ...


class ActiveRequest:
    """A request under way.

    It is driven from outside: by a task (`flow.ClientRequest`) or by the events of a simulation.

    Attributes:
        request: The request as it was made, but for a model that took the place of the first.
        adapter: The version of the adapter that it names.
        arrival: The number of its arrival in the fleet.
        span: The span of the whole request.
        samples: The samples that it is one of; `None` if it is the only one.
        instance: Where it runs.
        hops: Where it has run.
        history: Of its failures.
        num_evicted: How often engines gave it back.
        most_stalls: The most times in a row that it left an instance without a token in between.
        evicted_by: The span of what sent it away last.
        moving: Whether a move is under way; `move` is told when it leaves its instance.
        next_instance: Where it goes when it leaves, assigned to that already.
        arrived: Set when a move has brought it to its first token there, or has come to nothing.
        arrived_s: When that token came.
        next_model: What it goes on as when it leaves, with the adapter there.
        finish_reason: Of its last token.
        stored_tokens: How many of its first tokens the KV store had when they were saved or restored last.
    """

    __slots__ = ("adapter", "arrival", "arrived", "arrived_s", "evicted_by", "finish_reason", "history",
        "hops", "instance", "most_stalls", "move", "moving", "next_instance", "next_model", "num_evicted",
        "request", "samples", "span", "stored_tokens")  # fmt: skip

    def __init__(
        self,
        request: Request,
        adapter: Adapter | None,
        arrival: int,
        span: Span,
        samples: SampleGroup | None = None,
    ) -> None:
        self.request, self.adapter, self.arrival, self.span = request, adapter, arrival, span
        self.samples = samples
        self.instance: Instance | None = None
        self.hops: list[Hop] = []
        self.history: History = NEW
        self.num_evicted = self.most_stalls = 0
        self.evicted_by: SpanContext | None = None
        self.moving = False
        self.move: MoveListener | None = None
        self.next_instance: Instance | None = None
        self.arrived: anyio.Event | None = None
        self.arrived_s: float | None = None
        self.next_model: tuple[ModelId, Adapter | None] | None = None
        self.finish_reason: FinishReason | None = None
        self.stored_tokens = 0

    # ------------------------------------------------------------------ what it has

    @property
    def finished(self) -> bool:
        """Whether the client has been given its last token or its error."""
        raise NotImplementedError

    @property
    def tokens_so_far(self) -> Sequence[int]:
        """The ids of the tokens that the client was given, each once."""
        raise NotImplementedError

    @property
    def num_generated(self) -> int:
        """How many they are."""
        return len(self.tokens_so_far)

    @property
    def remaining(self) -> Request:
        """The request as the next instance must see it."""
        return self.request.continued(self.tokens_so_far)

    @property
    def num_hops(self) -> int:
        """On how many instances, one after another, it has run so far."""
        return len(self.hops)

    # ------------------------------------------------------------------ its states

    def interrupt(self) -> None:
        """End the present stay where it is, to go on elsewhere."""
        raise NotImplementedError

    def abort(self, error: Exception) -> None:
        """End it by an error, wherever it is."""
        raise NotImplementedError

    def redirect(self, instance: Instance, by: SpanContext) -> None:
        """Have it go to an instance, which it is assigned to already, as soon as it leaves this one."""
        self.next_instance, self.evicted_by = instance, by
        self.arrived, self.arrived_s = anyio.Event(), None

    def take_next(self) -> Instance | None:
        """Return the instance of `redirect`, once; `None` if there is none."""
        instance, self.next_instance = self.next_instance, None
        return instance

    def take_model(self) -> None:
        """Go on as `next_model`, once; it must be assigned to no instance."""
        if self.next_model is not None:
            model, self.adapter = self.next_model
            version = None if self.adapter is None else self.adapter.version
            self.request, self.next_model = replace(self.request, model=model, adapter=version), None

    def begin_hop(self, instance: Instance) -> None:
        """Note a stay that begins."""
        now_s = current_time()
        self.hops.append(Hop(instance=instance.id, first_index=self.num_generated, since_s=now_s))

    def note_restored(self, num_tokens: int, stored_tokens: int) -> None:
        """Note that so many tokens were copied to where it is, of those that are stored."""
        self.stored_tokens = stored_tokens
        if self.hops:
            self.hops[-1] = replace(self.hops[-1], restored_tokens=num_tokens)

    def stay(self) -> tuple[int, float]:
        """Return how many tokens it has got where it is, and the seconds since it came there."""
        if not self.hops or self.instance is None or self.hops[-1].instance != self.instance.id:
            return 0, 0.0
        hop = self.hops[-1]
        return self.num_generated - hop.first_index, current_time() - hop.since_s

    def note_token(self) -> bool:
        """Note a token: a move that brought the request here has succeeded.

        Returns whether other samples of its request may begin that could not before.
        """
        if self.history is not NEW:
            self.history, _ = step(self.history, GotToken())
        if self.arrived is not None and self.next_instance is None and not self.arrived.is_set():
            self.arrived_s = current_time()
            self.arrived.set()
        samples, instance = self.samples, self.instance
        return bool(samples and instance and samples.got_token(self.request.id, instance.id))

    def departing(self, instance: InstanceId, event: Event) -> None:
        """Have other samples of its request know that an event takes this one from its instance."""
        if self.samples is not None:
            self.samples.left(self.request.id)
            if isinstance(event, Evicted | Lost):
                self.samples.forget(instance)

    def departed(self, event: Event, by: SpanContext | None = None) -> Next:
        """Return what it does next, now that an event has taken it from its instance.

        `by` is the span of what evicted it. It is attached to no instance any more, and assigned to none but
        its next.
        """
        if self.next_instance is not None and not self.finished:
            event = Moved()
        elif not isinstance(event, Interrupted):
            if self.arrived is not None:
                self.arrived.set()
            if isinstance(event, Evicted) and by is not None:
                self.span.add_link(by)
            self.evicted_by = by
        self.num_evicted += isinstance(event, Evicted)
        self.take_model()
        if self.hops and self.num_generated - self.hops[-1].first_index >= DECODED_TOKENS:
            self.history = NEW
        self.history, decision = step(self.history, event)
        self.most_stalls = max(self.most_stalls, self.history.num_stalls)
        return decision
