"""`Session`: one controller of an engine, at the host: its streams, its calls, and what it is told."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

import anyio
from anyio.lowlevel import checkpoint

from hotswap import telemetry as tm
from hotswap.backends.remote.failures import failure
from hotswap.backends.remote.messages import Message, taking
from hotswap.backends.remote.outbox import Inbox
from hotswap.backends.remote.streams import REUSED
from hotswap.backends.remote.telling import HostOutbox
from hotswap.backends.remote.traces import traced
from hotswap.backends.remote.values import FINISH_REASONS, prompt_parts, scored, tokens_in
from hotswap.backends.remote.verbs import Call, Verbs
from hotswap.backends.transports import wire
from hotswap.backends.transports.link_errors import ProtocolError, first_reason_in
from hotswap.errors import HotswapError, InstanceError, MigrationAborted, PromptTooLong
from hotswap.request import Request, ScoredPrompt, Token
from hotswap.stray_cancellation import no_stray_cancellation
from hotswap.stream import TokenQueue, TokenStream
from hotswap.transport import Channel

if TYPE_CHECKING:
    from anyio.abc import TaskGroup

__all__ = ["Session"]

log = logging.getLogger("hotswap")

_KINDS: Final = {reason: kind for kind, reason in enumerate(FINISH_REASONS)}
_MAX_PENDING = 1 << 16  # streams and calls of a controller
_CLOSED_S = 10.0  # a stream that was closed ends within a step


class _Stream:
    """A request that runs for the controller."""

    def __init__(self) -> None:
        self.scope = anyio.CancelScope()
        self.is_closed = False  # by the controller
        self.ended = anyio.Event()


class _Teller:
    """Says the tokens of a stream."""

    def __init__(self, number: int, tokens: TokenStream, outbox: HostOutbox) -> None:
        self.has_begun = False
        self._number, self._tokens, self._outbox = number, tokens, outbox
        self._row = 4 * number

    def put(self, token: Token) -> None:
        """See `TokenReceiver`."""
        if not self.has_begun:
            self.has_begun = True
            if self._tokens.num_reused_tokens:
                self._outbox.say_row(self._row + REUSED, self._tokens.num_reused_tokens)
        kind = _KINDS[token.finish_reason]
        if token.logprob is None:
            self._outbox.say_row(self._row + kind, token.id)
        else:
            self._outbox.say("scored", self._number, scored(token), kind=kind)


class Session:
    """Serves one controller until its link ends.

    Args:
        verbs: What calls do.
        channel: The link.
        inbox: What comes over it.
        max_tokens: The most tokens of a request.
        heard_within_s: The silence after which the controller ends the link.
    """

    def __init__(
        self, verbs: Verbs, channel: Channel, inbox: Inbox, max_tokens: int, heard_within_s: float
    ) -> None:
        self.ended = anyio.Event()
        self._verbs, self._engine, self._inbox, self._max_tokens = verbs, verbs.engine, inbox, max_tokens
        self._outbox = HostOutbox(self._engine, channel, inbox.silence_s)
        self._outbox.heard_within_s = heard_within_s
        self._streams: dict[int, _Stream] = {}
        self._calls: dict[int, Call] = {}
        self._last_number = 0
        self._started: TaskGroup  # of `run`

    async def run(self) -> str:
        """Serve, and return why the link has ended; "" if the controller said goodbye."""
        because = ""
        try:
            async with anyio.create_task_group() as self._started:
                self._outbox.welcome(self._inbox.silence_s)
                self._started.start_soon(self._outbox.run)
                self._started.start_soon(self._inbox.watch)
                await self._listen()
                self._started.cancel_scope.cancel()
        except* MigrationAborted as errors:
            because = first_reason_in(errors)
        finally:
            self.ended.set()
        return because

    async def supersede(self, error: HotswapError) -> None:
        """End the session for another controller, and return when nothing is left of it."""
        self._outbox.say("superseded", error=failure(error))
        self._outbox.fail("another controller has the engine now")
        await self.ended.wait()

    async def _listen(self) -> None:
        while True:
            for message in await self._inbox.receive():
                if message.verb == "goodbye":
                    return
                with taking(message):
                    self._take(message)

    def _take(self, message: Message) -> None:
        """Do what the controller asks for.

        Raises:
            ProtocolError: it cannot be asked for.
        """
        match message.verb:
            case "close":
                if (stream := self._streams.get(message.number)) is not None:
                    stream.is_closed = True
                    stream.scope.cancel()
            case "cancel":
                if (call := self._calls.get(message.number)) is not None:
                    call.scope.cancel()
            case "open":
                self._begin(message)
                stream = self._streams[message.number] = _Stream()
                self._started.start_soon(
                    self._serve_stream, stream, message, bytes(message.payload), self._leaving()
                )
            case _:
                self._begin(message)
                call = self._calls[message.number] = Call(message.number, self._outbox)
                self._started.start_soon(
                    self._serve_call, call, message, bytes(message.payload), self._leaving()
                )

    def _begin(self, message: Message) -> None:
        if message.number <= self._last_number:
            raise ProtocolError(f"number {message.number} was used twice, or out of order")
        if len(self._streams) + len(self._calls) >= _MAX_PENDING:
            raise ProtocolError(f"there are {_MAX_PENDING:,} streams and calls, and there may be no more")
        self._last_number = message.number

    def _leaving(self) -> list[anyio.Event]:
        """The ends of streams that were closed, for which what follows waits: the engine must have let go."""
        return [stream.ended for stream in self._streams.values() if stream.is_closed]

    # ------------------------------------------------------------------ streams

    async def _serve_stream(
        self, stream: _Stream, message: Message, payload: bytes, leaving: list[anyio.Event]
    ) -> None:
        number, error = message.number, None
        try:
            with stream.scope, traced(message.fields):
                error = await self._stream(message, payload, leaving)
        finally:
            del self._streams[number]
            stream.ended.set()
        self._outbox.say_status()
        if not stream.is_closed:
            self._outbox.say("ended", number, error=error)

    async def _stream(
        self, message: Message, payload: bytes, leaving: list[anyio.Event]
    ) -> dict[str, object] | None:
        """Run a request to its end; return the error that ended it early."""
        try:
            if len(payload) > self._max_tokens * wire.TOKEN_BYTES:
                raise PromptTooLong(
                    f"A request has {len(payload) // wire.TOKEN_BYTES:,} tokens, and the host of engine "
                    f"{self._engine.id!r} takes {self._max_tokens:,}; shorten it, or raise its max_tokens."
                )
            request = wire.request_of(message, await tokens_in(payload))
            await _ended(leaving)
            with no_stray_cancellation("the stream"):
                async with self._engine.stream(request) as tokens:
                    self._outbox.say_status()
                    self._outbox.say("opened", message.number)
                    await self._tell(message.number, request, tokens)
        except ProtocolError as exc:
            self._outbox.fail(str(exc))
        except Exception as exc:
            return self._failure(exc, f"a request of model {message.fields.get('model')!r}")
        return None

    async def _tell(self, number: int, request: Request, tokens: TokenStream) -> None:
        """Tell the tokens of a stream until it ends."""
        teller = _Teller(number, tokens, self._outbox)
        if isinstance(tokens, TokenQueue) and request.sampling.prompt_logprobs is None:
            tokens.forward(teller)  # so that no task is woken for each token
        async for token in tokens:
            if not teller.has_begun and isinstance(tokens.prompt_logprobs, ScoredPrompt):
                await self._tell_prompt(number, tokens.prompt_logprobs)
            teller.put(token)

    async def _tell_prompt(self, number: int, prompt: ScoredPrompt) -> None:
        for num_entries, payload in prompt_parts(prompt):
            self._outbox.say("prompt", number, payload, num_entries=num_entries)
            await checkpoint()

    # ------------------------------------------------------------------ calls

    async def _serve_call(
        self, call: Call, message: Message, payload: bytes, leaving: list[anyio.Event]
    ) -> None:
        error = None
        try:
            with call.scope, traced(message.fields):
                error = await self._call(call, message, payload, leaving)
            if call.scope.cancelled_caught:
                error = failure(InstanceError(f"The call to {message.verb} was cancelled."))
        finally:
            del self._calls[call.number]
            call.ended.set()
        if error is not None:
            call.answer(error=error)

    async def _call(
        self, call: Call, message: Message, payload: bytes, leaving: list[anyio.Event]
    ) -> dict[str, object] | None:
        """Do what a call asks for and answer it; return the error of one that failed."""
        try:
            await _ended(leaving)
            with no_stray_cancellation(f"the call to {message.verb[:40]}"):
                await self._verbs.do(call, message, payload)
        except ProtocolError as exc:
            self._outbox.fail(str(exc))
        except Exception as exc:
            return self._failure(exc, f"a call to {message.verb[:40]}")
        return None

    def _failure(self, error: Exception, what: str) -> dict[str, object]:
        if not isinstance(error, HotswapError):  # the controller is told its type and text alone
            log.error("Engine %r failed in %s.\n%s", self._engine.id, what, tm.traceback_of(error))
        return failure(error)


async def _ended(streams: list[anyio.Event]) -> None:
    with anyio.move_on_after(_CLOSED_S, shield=True):
        for ended in streams:
            await ended.wait()
