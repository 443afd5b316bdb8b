"""`ControlLink`: the controller's end of the link to a host: calls, streams, and the host's status."""

from __future__ import annotations

import itertools
from collections.abc import AsyncGenerator, Awaitable, Generator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import TypeVar

import anyio
from anyio.lowlevel import checkpoint, current_token

from hotswap.backends.fields import Fields
from hotswap.backends.remote.failures import error_of
from hotswap.backends.remote.messages import MAX_PAYLOAD_BYTES, VERSION, Message, taking
from hotswap.backends.remote.outbox import Inbox, Outbox
from hotswap.backends.remote.reach import Reach
from hotswap.backends.remote.status import RemoteStatus
from hotswap.backends.remote.streams import RemoteStream
from hotswap.backends.remote.traces import with_trace
from hotswap.backends.remote.values import status_of, texts
from hotswap.backends.transports import wire
from hotswap.backends.transports.link_errors import ProtocolError, link_broken
from hotswap.backends.transports.silence import silence_fields, silence_in
from hotswap.errors import HotswapError, InstanceError, InstanceLost, PromptTooLong, UnsupportedModel
from hotswap.model import ModelCard
from hotswap.request import Request
from hotswap.transport import Channel

__all__ = ["Answer", "ControlLink"]

_T = TypeVar("_T")

# A host ends a cancelled call when its engine has gone back; after so long it counts as lost.
_CANCEL_S = 150.0
_OPEN_S = 30.0  # an engine admits or refuses a request at once


@dataclass(frozen=True, slots=True)
class Answer:
    """What a host answers to a call."""

    fields: Fields
    payload: bytes


class _Call:
    """A call that waits for its answer."""

    def __init__(self) -> None:
        self.answered = anyio.Event()
        self.result: Answer | HotswapError | None = None

    def end(self, result: Answer | HotswapError) -> None:
        self.result = result
        self.answered.set()


class ControlLink:
    """One link to the host of an engine, from its first message to its end; used by `RemoteEngine`.

    Args:
        channel: The link.
        status: Takes what the host tells.
        silence_s: The silence of the host that ends the link.

    Attributes:
        abilities: What the host's engine can do beside the verbs of every engine.
        loop: The event loop, for calls from threads.
        verdicts: What the host said of models that were asked about; `None` if it takes one, or has not said.
        kv_limits: How many tokens of a request it said that its KV blocks hold; `None` if it has not said.
        reach: Other hosts to which this one could not connect, by their links.
        lost: Why the link has ended; "" while it works.
        ended: Set when it has.
    """

    def __init__(self, channel: Channel, status: RemoteStatus, silence_s: float) -> None:
        self.abilities: frozenset[str] = frozenset()
        self.reach = Reach[ControlLink]()
        self.lost = ""
        self.ended = anyio.Event()
        self.loop = current_token()
        self.verdicts: dict[ModelCard, UnsupportedModel | None] = {}
        self.kv_limits: dict[ModelCard, int | None] = {}
        self._id = status.shown.id
        self._status = status
        self._outbox, self._inbox = Outbox(channel, silence_s), Inbox(channel, silence_s)
        self._numbers = itertools.count(1)
        self._calls: dict[int, _Call] = {}
        self._streams: dict[int, RemoteStream] = {}
        self._scopes: set[anyio.CancelScope] = set()

    # ------------------------------------------------------------------ life

    async def open(self, epoch: int) -> None:
        """Say who this is, and take the host's answer.

        Raises:
            MigrationAborted: the link is broken.
            ControllerSuperseded: the host has a newer controller.
        """
        silence = silence_fields(self._inbox.silence_s)
        self._outbox.say("control", version=VERSION, epoch=epoch, **silence)
        await self._outbox.flush()
        messages = await self._inbox.receive()  # when the host has ended what was before
        if not messages or messages[0].verb not in ("welcome", "refused"):
            raise link_broken(f"the host began with {[message.verb[:40] for message in messages[:1]]}")
        first, *rest = messages
        if first.verb == "refused":
            with taking(first):
                error = error_of(first.fields.record("error"))
            raise error
        with taking(first):
            self._outbox.heard_within_s = silence_in(first.fields)
            self.abilities = frozenset(texts(first.fields, "abilities"))
            self._status.tell(status_of(first.fields.record("status"), self._status.told))
        for message in rest:
            with taking(message):
                self._take(message)

    async def run(self) -> None:
        """Send and receive until cancelled.

        Raises:
            MigrationAborted: the link is broken.
        """
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._outbox.run, name=f"outbox of {self._id}")
            tasks.start_soon(self._inbox.watch, name=f"inbox of {self._id}")
            while True:
                for message in await self._inbox.receive():
                    with taking(message):
                        self._take(message)

    async def leave(self) -> None:
        """Tell the host that the controller leaves, and wait until it ends the link.

        What the host sends until then is received: a socket that is closed before would have the kernel reset
        the connection, so that the host fails to send, perhaps before it has read the goodbye.

        Raises:
            MigrationAborted: the link has ended, as it should.
        """
        self._outbox.say("goodbye")
        await self._outbox.flush()
        while True:
            await self._inbox.receive()

    def lose(self, because: str) -> None:
        """End all calls and streams: the link has ended."""
        self.lost = because
        for stream in self._streams.values():
            stream.end(self.error())
        for call in self._calls.values():
            call.end(self.error())
        for scope in self._scopes:
            scope.cancel()
        self._streams.clear()
        self._calls.clear()
        self.ended.set()

    def error(self) -> InstanceLost:
        """Return a new error that says why the engine cannot be reached."""
        return InstanceLost(f"Engine {self._id!r} is lost: {self.lost}. Unload it to reach its host again.")

    @contextmanager
    def reading(self) -> Generator[None]:
        """End the link if an answer cannot be read in the block, and raise `InstanceLost`."""
        try:
            with wire.protocol_errors():
                yield
        except ProtocolError as exc:
            self._outbox.fail(str(exc))
            raise InstanceLost(f"The host of engine {self._id!r} gave a wrong answer: {exc}.") from exc

    async def unless_lost(self, work: Awaitable[_T]) -> _T:
        """Return what `work` returns; interrupt it by `InstanceLost` when the link ends, or has ended."""
        with anyio.CancelScope() as scope:
            self._scopes.add(scope)
            if self.lost:
                scope.cancel()
            try:
                return await work
            finally:
                self._scopes.discard(scope)
        raise self.error()

    # ------------------------------------------------------------------ calls

    async def call(self, verb: str, payload: memoryview | None = None, /, **fields: object) -> Answer:
        """Have the host do something, and return its answer.

        A cancellation is sent to the host; this returns when it has gone back, or has done the work.

        Raises:
            InstanceLost: the link has ended.
            HotswapError: what the host's engine raised.
        """
        await checkpoint()  # cancelled here, the host hears nothing of it
        return await self.call_at_once(verb, payload, **fields)

    async def call_at_once(self, verb: str, payload: memoryview | None = None, /, **fields: object) -> Answer:
        """The same, but that the host hears of it although this is cancelled already."""
        number = self._say(verb, payload, fields)
        call = self._calls[number] = _Call()
        try:
            await call.answered.wait()
        except BaseException:
            await self._take_back(number, call)
            raise
        finally:
            self._calls.pop(number, None)
        if isinstance(call.result, HotswapError):
            raise call.result
        assert call.result is not None, "it was answered"
        return call.result

    async def _take_back(self, number: int, call: _Call) -> None:
        if not self.lost and not call.answered.is_set():
            self._outbox.say("cancel", number)
        with anyio.move_on_after(_CANCEL_S, shield=True):
            await call.answered.wait()
        if not call.answered.is_set():
            self._outbox.fail(f"its host did not end a cancelled call within {_CANCEL_S:g} s")

    def _say(self, verb: str, payload: memoryview | None, fields: dict[str, object]) -> int:
        if self.lost:
            raise self.error()
        number = next(self._numbers)
        try:
            self._outbox.say(verb, number, payload, **with_trace(fields))
        except ValueError as exc:
            raise InstanceError(f"Engine {self._id!r} was not asked to {verb}: {exc}.") from exc
        return number

    @asynccontextmanager
    async def stream(self, request: Request) -> AsyncGenerator[RemoteStream]:
        """Run a request at the host; see `Engine.stream`."""
        if request.num_tokens * wire.TOKEN_BYTES > MAX_PAYLOAD_BYTES:
            raise PromptTooLong(
                f"Request {request.id!r} has {request.num_tokens:,} tokens, and a link takes "
                f"{MAX_PAYLOAD_BYTES // wire.TOKEN_BYTES:,}; shorten it."
            )
        number = self._say("open", wire.pack_tokens(request.tokens), wire.request_fields(request))
        stream = self._streams[number] = RemoteStream(request)
        try:
            with anyio.move_on_after(_OPEN_S):
                await stream.opened.wait()
            if not stream.opened.is_set():
                self._outbox.fail(f"its host did not admit a request within {_OPEN_S:g} s")
                await stream.opened.wait()  # which the end of the link sets
            await stream.refuse()
            yield stream
        finally:
            if self._streams.pop(number, None) is not None:
                self._outbox.say("close", number)

    # ------------------------------------------------------------------ messages

    def _take(self, message: Message) -> None:
        """Take a message of the host.

        Raises:
            ProtocolError: it is none.
        """
        match message.verb:
            case "tokens":
                self._take_tokens(message.payload)
            case "status":
                with wire.protocol_errors():
                    self._status.tell(status_of(message.fields, self._status.told))
            case "answer":
                self._answer(message)
            case "opened" | "scored" | "prompt" | "ended":
                if (stream := self._streams.get(message.number)) is not None:
                    self._take_of(stream, message)
            case "superseded":
                with wire.protocol_errors():
                    raise ProtocolError(str(error_of(message.fields.record("error"))).removesuffix("."))
            case verb:
                raise ProtocolError(f"the host said {verb[:40]!r}")

    def _take_tokens(self, payload: memoryview) -> None:
        numbers = wire.tokens_of(payload)
        if len(numbers) % 2:
            raise ProtocolError(f"{len(numbers):,} numbers are no pairs")
        streams, pairs = self._streams, iter(numbers)
        for row, value in zip(pairs, pairs, strict=True):
            stream = streams.get(row >> 2)
            if stream is not None:  # else it was left
                stream.take_numbers(row & 3, value)

    def _take_of(self, stream: RemoteStream, message: Message) -> None:
        match message.verb:
            case "opened":
                stream.opened.set()
            case "scored":
                stream.take_scored(message)
            case "prompt":
                stream.take_prompt(message)
            case _:
                stream.end(_error_in(message))
                del self._streams[message.number]

    def _answer(self, message: Message) -> None:
        if (call := self._calls.get(message.number)) is not None:
            call.end(_error_in(message) or Answer(message.fields, bytes(message.payload)))
            del self._calls[message.number]


def _error_in(message: Message) -> HotswapError | None:
    with wire.protocol_errors():
        return None if message.fields.get("error") is None else error_of(message.fields.record("error"))
