"""One request as its client sees it, and the one task that carries it from instance to instance."""

from __future__ import annotations

import logging
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass

import anyio
from opentelemetry.trace import Span

from hotswap import telemetry as tm
from hotswap.errors import DeadlineExceeded, FleetClosed, HotswapError, InstanceError, InstanceLost
from hotswap.loop_time import current_time
from hotswap.model import Adapter
from hotswap.request import FinishReason, Request, ScoredPrompt, Token
from hotswap.runtime.active import ActiveRequest, Hop
from hotswap.runtime.adapter_cache import AdapterCaches
from hotswap.runtime.admission import Admission
from hotswap.runtime.completion import Completion, Sample, Usage
from hotswap.runtime.instance import Instance
from hotswap.runtime.kv_restoring import NO_RESTORE, NoRestore, Restore
from hotswap.runtime.lifecycle import End, Event, Finished, Interrupted, Next, Requeue, departure
from hotswap.runtime.lifetime import Lifetime
from hotswap.runtime.losses import Losses
from hotswap.runtime.offload import Offload
from hotswap.runtime.queue import Standing, Ticket
from hotswap.runtime.samples import SampleGroup
from hotswap.runtime.state import FleetState
from hotswap.runtime.texts import ModelText
from hotswap.stray_cancellation import no_stray_cancellation
from hotswap.stream import TokenQueue, TokenStream
from hotswap.telemetry import Telemetry

__all__ = ["ClientRequest", "FleetStream", "Flow"]

log = logging.getLogger("hotswap")


class ClientRequest(ActiveRequest):
    """A request that a client reads: every token that it was given is kept, each once."""

    def __init__(
        self,
        request: Request,
        *,
        adapter: Adapter | None,
        arrival: int,
        operation: str,
        telemetry: Telemetry,
        text: ModelText,
        deadline_s: float | None,
        samples: SampleGroup | None = None,
        index: int = 0,
    ) -> None:
        span = telemetry.start(f"{operation} {request.model}", _attributes(request, operation))
        super().__init__(request, adapter, arrival, span, samples)
        self._index = index
        self._operation = operation
        self.tokens = TokenQueue()
        self.scope = anyio.CancelScope()
        self.ended = anyio.Event()
        self.deadline_at_s = float("inf") if deadline_s is None else request.arrived_s + deadline_s
        self._given: list[int] = []
        self.num_reused_tokens = 0
        self.matched_stop: str | int | None = None
        self.prompt_logprobs: ScoredPrompt | tuple[()] = ()
        self.queue_s: float | None = None
        self.ttft_s: float | None = None
        self._model_text = text
        self._text = text.stream(request)
        self._telemetry = telemetry
        self._hop_scope: anyio.CancelScope | None = None
        self._error: BaseException | None = None

    @property
    def finished(self) -> bool:
        return self.tokens.closed

    @property
    def tokens_so_far(self) -> tuple[int, ...]:
        return tuple(self._given)

    @property
    def num_generated(self) -> int:
        return len(self._given)

    @contextmanager
    def hop(self, instance: Instance) -> Generator[anyio.CancelScope]:
        """Bracket a stay on an instance, which `interrupt` ends."""
        self.begin_hop(instance)
        if self.queue_s is None:
            self.queue_s = current_time() - self.request.arrived_s
        with anyio.CancelScope() as self._hop_scope:
            yield self._hop_scope

    def interrupt(self) -> None:
        if self._hop_scope is not None:
            self._hop_scope.cancel()

    def deliver(self, token: Token) -> None:
        """Give the client a token, with the text that it completes.

        Raises:
            InstanceError: the engine skipped or repeated a position.
        """
        if token.index != len(self._given):
            raise InstanceError(
                f"An engine gave position {token.index} of request {self.request.id!r} when "
                f"{len(self._given)} was due; the engine breaks its contract."
            )
        self._given.append(token.id)
        if self.ttft_s is None:
            self.ttft_s = current_time() - self.request.arrived_s
        text, finish = "", token.finish_reason
        if finish == "stop":
            self.matched_stop = token.id
        if self._text is not None:
            text = self._text.push(token.id, last=finish is not None, is_end=finish == "stop")
            if self._text.matched_stop is not None:
                self.matched_stop, finish = self._text.matched_stop, "stop"
        top = self._model_text.with_text(token.top_logprobs) if token.top_logprobs else ()
        self.tokens.put(token.with_text(text, finish, top))
        if finish is not None:
            self.finish_reason = finish
            self.tokens.close()

    async def note_first_token(self, stream: TokenStream) -> None:
        """Keep what an engine tells of the prompt, before the request's first token.

        Cancelled, it keeps no log-probabilities: another engine tells them again with the same token.

        Raises:
            FleetClosed: the fleet closed meanwhile.
        """
        self.num_reused_tokens = min(stream.num_reused_tokens, len(self.request.prompt))
        self.prompt_logprobs = await self._model_text.with_prompt_texts(stream.prompt_logprobs)

    def fail(self, error: BaseException) -> None:
        """Give the client its error, unless it has all that it asked for."""
        if not self.finished:
            self._error = error
        self.tokens.close(error)

    def abort(self, error: Exception) -> None:
        self.fail(error)
        self.scope.cancel()

    def end(self) -> None:
        """Let everything that waits for the request go on, and record it."""
        cause = "block of the stream was left" if self.scope.cancel_called else "fleet closed"
        self.tokens.close(FleetClosed(f"The {cause} before the request had finished; ask again elsewhere."))
        self.ended.set()
        if self.arrived is not None:
            self.arrived.set()
        try:
            self._measure()
            self.span.set_attribute(tm.OUTPUT_TOKENS, len(self._given))
            self.span.set_attribute(tm.NUM_HOPS, self.num_hops)
            if self.finish_reason is not None:
                self.span.set_attribute(tm.FINISH_REASONS, (self.finish_reason,))
            self._telemetry.finish(self.span, self._error)
        except Exception:  # a telemetry provider's own fault
            log.exception("The end of request %r was not recorded.", self.request.id)

    def _measure(self) -> None:
        telemetry, request_s = self._telemetry, current_time() - self.request.arrived_s
        labels = {tm.OPERATION: self._operation, tm.PROVIDER: "hotswap", tm.MODEL: self.request.model}
        ended = {} if self._error is None else {tm.ERROR_TYPE: type(self._error).__name__}
        outcome = self.finish_reason or ("left" if self._error is None else "error")
        telemetry.requests.add(1, {**labels, **ended, tm.REQUEST_OUTCOME: outcome})
        telemetry.request_seconds.record(request_s, {**labels, **ended})
        if self.queue_s is not None:
            telemetry.queue_seconds.record(self.queue_s, labels)
            telemetry.token_usage.record(len(self._given), {**labels, tm.TOKEN_TYPE: "output"})
            if not self._index:  # the prompt of all samples counts once
                telemetry.token_usage.record(len(self.request.prompt), {**labels, tm.TOKEN_TYPE: "input"})
                telemetry.reused.add(self.num_reused_tokens, labels)
        if self.ttft_s is not None:
            telemetry.ttft.record(self.ttft_s, labels)
            if (gaps := len(self._given) - 1) > 0:
                telemetry.tpot.record((request_s - self.ttft_s) / gaps, labels)

    def __repr__(self) -> str:
        where = self.instance.id if self.instance is not None else "waiting"
        return (
            f"<ClientRequest {self.request.id} {self.request.model} at {where} [{len(self._given)} tokens, "
            f"{self.num_hops} hops]>"
        )


class FleetStream(TokenStream):
    """A client's end of a request: iterate it for tokens with text, across however many instances.

    What it tells of the request is complete with the last token.

    Raises while iterating: a `RequestError` when the request cannot be served, an `InstanceError` when
    engines failed it repeatedly, `FleetClosed` when the fleet ended first, `WrongLoop` on another event loop
    than the fleet's.
    """

    def __init__(self, request: ClientRequest, lifetime: Lifetime) -> None:
        self._request, self._lifetime = request, lifetime

    async def __anext__(self) -> Token:
        self._lifetime.check_loop()
        token = await self._request.tokens.__anext__()
        self._note_prompt()
        return token

    async def take(self) -> list[Token]:
        self._lifetime.check_loop()
        tokens = await self._request.tokens.take()
        if not tokens or not tokens[0].index:  # all of it is known by the first token
            self._note_prompt()
        return tokens

    def _note_prompt(self) -> None:
        self.num_reused_tokens = self._request.num_reused_tokens
        self.prompt_logprobs = self._request.prompt_logprobs

    async def complete(self) -> Completion:
        """Read the stream to its end; tokens and text of the completion are those read by this call."""
        tokens = await self.collect()
        assert self.finish_reason is not None, "a stream that ends without an error has a reason"
        sample = Sample(
            text="".join(token.text for token in tokens),
            tokens=tuple(tokens),
            finish_reason=self.finish_reason,
            matched_stop=self.matched_stop,
            usage=self.usage,
            seed=self.seed,
            hops=self.hops,
            queue_s=self.queue_s or 0.0,
            ttft_s=self.ttft_s or 0.0,
        )
        return Completion.of((sample,), prompt_logprobs=self.prompt_logprobs)

    @property
    def request(self) -> Request:
        """The request as the fleet has made it of what was asked for; generated tokens are not in it.

        `id` is what `Fleet.migrate` takes, `model` what serves it now, which a roll may change, and `adapter`
        the version that it got. `prompt` is in token ids; `sampling` has the seed and the `max_tokens` that
        were filled in.
        """
        return self._request.request

    @property
    def usage(self) -> Usage:
        """How many tokens the request has had computed for it so far."""
        return Usage(
            prompt_tokens=len(self.request.prompt),
            generated_tokens=self._request.num_generated,
            reused_tokens=self._request.num_reused_tokens,
        )

    @property
    def seed(self) -> int | None:
        """What chance depends on: asking again with it draws the same; `None` of a greedy request."""
        return self.request.sampling.seed

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the generation ended; `None` before that, and after an error."""
        return self._request.finish_reason

    @property
    def matched_stop(self) -> str | int | None:
        """The stop string, or the end token, that ended the generation; `None` if none did."""
        return self._request.matched_stop

    @property
    def queue_s(self) -> float | None:
        """Seconds from the request's arrival until it first ran; `None` before that."""
        return self._request.queue_s

    @property
    def ttft_s(self) -> float | None:
        """Seconds from the request's arrival to its first token; `None` before that."""
        return self._request.ttft_s

    @property
    def num_hops(self) -> int:
        """On how many instances the request has run so far."""
        return self._request.num_hops

    @property
    def num_stalls(self) -> int:
        """The most times in a row that the request left an instance without a token in between."""
        return self._request.most_stalls

    @property
    def hops(self) -> tuple[Hop, ...]:
        """Where the request has run so far, in order, and from which token on."""
        return tuple(self._request.hops)

    def __repr__(self) -> str:
        return f"<FleetStream of {self._request!r}>"


@dataclass(frozen=True, slots=True)
class Flow:
    """Carries requests through a fleet: each from its first ticket to its end, in one task of its own."""

    state: FleetState
    admission: Admission
    adapters: AdapterCaches
    losses: Losses
    telemetry: Telemetry
    offload: Offload | None

    async def run(self, request: ClientRequest, ticket: Ticket) -> None:
        """Carry a request that has begun (`FleetState.begin`) until it ends.

        What it does after each event says `lifecycle.step`. Its errors are its client's, never the fleet's.
        """
        request.scope.deadline = request.deadline_at_s
        try:
            with request.scope:
                error = await self._until_it_ends(request, ticket)
                if error is not None:
                    request.fail(error)
        except Exception as exc:  # of the runtime itself: still this request's alone
            log.exception("Request %r ended by a fault of the runtime.", request.request.id)
            request.fail(exc)
        finally:
            if (unused := request.take_next()) is not None:
                self.state.release(request.request, unused)
            if request.scope.cancelled_caught and current_time() >= request.deadline_at_s:
                request.fail(
                    DeadlineExceeded(
                        f"Request {request.request.id!r} passed its deadline; allow it more time."
                    )
                )
            self.state.end(request)
            request.end()

    async def _until_it_ends(self, request: ClientRequest, ticket: Ticket) -> Exception | None:
        while True:
            try:
                instance = request.take_next() or await self.admission.answer(ticket)
            except Exception as exc:  # a router's fault, or a model that cannot be loaded
                self._log_given_up(request, exc)
                return exc
            decision = await self._stay(request, instance)
            if isinstance(decision, End):
                if decision.error is not None:
                    self._log_given_up(request, decision.error)
                return decision.error
            if isinstance(decision, Requeue):
                if decision.pause_s:
                    await anyio.sleep(decision.pause_s)
                request.take_model()  # its model may have been rolled meanwhile
                standing = Standing(decision.suspect, decision.stalled, request.samples)
                ticket = self.admission.enter(request.remaining, request.arrival, standing=standing)

    def _log_given_up(self, request: ClientRequest, error: Exception) -> None:
        """Log what ended a request, unless that is the request's own fault."""
        if isinstance(error, InstanceError) or not isinstance(error, HotswapError):
            foreign = None if isinstance(error, HotswapError) else error
            log.warning(
                "Request %r was given up: %s: %s",
                request.request.id,
                type(error).__name__,
                error,
                exc_info=foreign,
            )

    async def _stay(self, request: ClientRequest, instance: Instance) -> Next:
        """Run the request on an instance that it is assigned to; return what it does next."""
        self.state.attach(request, instance)
        try:
            event = await self._hop(request, instance)
        except Exception as exc:
            event = departure(exc)
            if isinstance(exc, InstanceLost):
                self.losses.note(instance, exc)
        except BaseException:
            self.state.withdraw(request, instance)
            raise
        return self.state.depart(request, instance, event)

    async def _hop(self, request: ClientRequest, instance: Instance) -> Event:
        links = [request.evicted_by] if request.evicted_by is not None else []
        attributes = {tm.INSTANCE: instance.id, tm.REQUEST_ID: request.request.id}
        with (
            self.telemetry.span(tm.SPAN_HOP, attributes, parent=request.span, links=links) as span,
            request.hop(instance) as scope,
            no_stray_cancellation(f"The stay of request {request.request.id!r} on {instance.id!r}"),
        ):
            async with (
                self.adapters.held(request.adapter, request.request.id, instance, span),
                self._restored(request, instance, span) as restored,
                instance.engine.stream(request.remaining) as tokens,
            ):
                async for token in tokens:
                    if token.index == request.hops[-1].first_index:
                        if tokens.num_reused_tokens:
                            span.set_attribute(tm.REUSED_TOKENS, tokens.num_reused_tokens)
                        if self.offload is not None:
                            self.offload.learn_first(request, tokens.num_reused_tokens, restored)
                        restored.leave()
                    instance.end_first_token(self.telemetry)
                    if token.index == 0:
                        await request.note_first_token(tokens)
                    request.deliver(token)
                    self.state.note_token(request)
                    if request.finished:
                        return Finished()
        if request.finished:
            return Finished()
        if scope.cancelled_caught:
            return Interrupted()
        raise InstanceError(
            f"Instance {instance.id!r} ended the stream of request {request.request.id!r} "
            "without a finish reason."
        )

    def _restored(self, request: ClientRequest, instance: Instance, span: Span) -> Restore | NoRestore:
        return NO_RESTORE if self.offload is None else self.offload.restored(request, instance, span)


def _attributes(request: Request, operation: str) -> tm.Attributes:
    sampling = request.sampling
    given = {tm.ADAPTER: request.adapter, tm.SEED: _as_int64(sampling.seed), tm.TOP_K: sampling.top_k or None}
    return {
        tm.OPERATION: operation,
        tm.PROVIDER: "hotswap",
        tm.MODEL: request.model,
        tm.REQUEST_ID: request.id,
        tm.INPUT_TOKENS: len(request.prompt),
        tm.MAX_TOKENS: sampling.max_tokens,
        tm.TEMPERATURE: sampling.temperature,
        tm.TOP_P: sampling.top_p,
        tm.PRIORITY: request.priority,
        **{name: value for name, value in given.items() if value is not None},
    }


def _as_int64(seed: int | None) -> int | None:
    """A seed as exporters can write it; larger ones are told by the completion alone."""
    return seed if seed is not None and seed < 1 << 63 else None
