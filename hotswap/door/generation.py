"""Endpoints that generate: a request of a fleet for each, written as it comes or as a whole."""

from __future__ import annotations

import logging
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial

import anyio
from anyio.abc import TaskGroup
from starlette.types import Receive, Scope, Send

from hotswap import Chat, Fleet, FleetStream, HotswapError, Sampling, Token
from hotswap.door.body import ClientLeft, in_own_task, read_body, while_connected
from hotswap.door.errors import Refusal, invalid, refusal_of
from hotswap.door.keys import KeyRing, KeyUse, use_of
from hotswap.door.limits import Limits
from hotswap.door.served import Name, Served, resolve
from hotswap.door.settings import Settings, Setup
from hotswap.door.wire import STREAM_HEADERS, comment, send_json

__all__ = ["Answer", "Door", "Endpoint", "Generation", "UsageTotal", "log_fault", "new_id"]

log = logging.getLogger("hotswap")

# Between two comments of a stream whose model is still loading.
COMMENT_S = 2.0


class Door:
    """What all endpoints share: the fleet that serves requests, and what it is served by.

    Args:
        fleet: Serves the requests.
        settings: What holds at first; `use` others at any time.
        setup: What operators may have read again.
    """

    def __init__(self, fleet: Fleet, settings: Settings | None = None, setup: Setup | None = None) -> None:
        self.fleet, self.setup = fleet, setup
        self.settings = settings or Settings()
        self.ring = KeyRing(self.settings.keys, self.settings.hosts)

    @property
    def limits(self) -> Limits:
        """What one request may take."""
        return self.settings.limits

    def use(self, settings: Settings) -> None:
        """Have these settings hold from now on; requests under way go on as they began."""
        self.settings = settings
        self.ring.use(settings.keys, settings.hosts)

    def now(self) -> int:
        """Return the time in seconds since the epoch, as answers tell it."""
        return time.time_ns() // 10**9

    def how(self, name: Name) -> Served:
        """Return how a model is served."""
        served = self.settings.served
        return served.get(name.id) or served.get(name.model) or Served()


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageTotal:
    """The tokens of a request, of all its prompts and of all its choices, and what has ended it.

    Attributes:
        prompt_tokens: Those of its prompts.
        generated_tokens: Those of its choices.
        reused_tokens: Those of its prompts that need not be computed.
        stop: The stop string that ended its first choice; `None` if none did.
    """

    prompt_tokens: int
    generated_tokens: int
    reused_tokens: int
    stop: str | None = None

    @classmethod
    def of(cls, streams: Sequence[FleetStream], *, samples: int) -> UsageTotal:
        """Add up streams, of which each `samples` in a row share a prompt."""
        usages = [stream.usage for stream in streams]
        prompts = [usages[at : at + samples] for at in range(0, len(usages), samples)]
        return cls(
            prompt_tokens=sum(of[0].prompt_tokens for of in prompts),
            generated_tokens=sum(usage.generated_tokens for usage in usages),
            reused_tokens=sum(min(usage.reused_tokens for usage in of) for of in prompts),
            stop=stop if streams and isinstance(stop := streams[0].matched_stop, str) else None,
        )


class Answer(ABC):
    """How one answer is written, as a stream or as a whole; indices are those of its choices."""

    def begin(self) -> bytes:
        """Return what comes before all chunks."""
        return b""

    @abstractmethod
    def chunk(self, index: int, tokens: Sequence[Token]) -> bytes:
        """Return what some tokens of a choice add; nothing if that is held back."""

    @abstractmethod
    def end(self, usage: UsageTotal) -> bytes:
        """Return what comes after all chunks."""

    @abstractmethod
    def failure(self, refusal: Refusal) -> bytes:
        """Return how a stream that has begun ends by an error."""

    @abstractmethod
    def whole(self, choices: Sequence[Sequence[Token]], usage: UsageTotal) -> object:
        """Return the answer as JSON."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """What a client has asked for, ready for the fleet.

    Attributes:
        id: Of the request; of several prompts each gets a number behind it.
        name: The model, and the adapter.
        prompts: One or more.
        sampling: Of each.
        stream: Whether the answer is written as it comes.
        answer: How it is written.
        priority: Of the request.
        timeout_s: Within how many seconds the client wants it; `None` leaves it to the door.
        add_special_tokens: Whether prompts get special tokens round them.
    """

    id: str
    name: Name
    prompts: tuple[str | Sequence[int] | Chat, ...]
    sampling: Sampling
    stream: bool
    answer: Answer
    priority: int = 0
    timeout_s: float | None = None
    add_special_tokens: bool | None = None


class Endpoint(ABC):
    """One endpoint that generates, as an application of ASGI: streams go past Starlette's responses.

    A stream's head is sent with its first token, so that an error before it has a status of its own. All that
    has come until a write is written at once. A client that leaves ends its request in whatever state it is.
    """

    def __init__(self, door: Door) -> None:
        self.door = door

    @abstractmethod
    async def prepare(self, body: bytes, use: KeyUse) -> Generation:
        """Return what a body asks for, of a model that its key may name.

        What costs nothing to check is checked first: the model, the priority, the number of choices.

        Raises:
            ValidationError, Refusal, HotswapError: it asks for something wrong.
        """

    def named(self, use: KeyUse, model: str, adapter: str | None = None, *, priority: int = 0) -> Name:
        """Return what a name stands for, for a request of a priority.

        Raises:
            UnknownModel: the fleet has none of that name.
            Refusal: the key may not name it, or not give that priority.
        """
        name = resolve(self.door.fleet, model, adapter)
        use.check_model(name.model)
        use.check_priority(priority)
        return name

    def check_choices(self, number: int) -> None:
        """Raise a `Refusal` if one request asks for more choices than it may."""
        if number > self.door.limits.choices:
            most = self.door.limits.choices
            raise invalid("n", f"n of all prompts together is {number}; ask for at most {most}.")

    def refused(self, refusal: Refusal) -> object:
        """Return the body of an error that comes before any token."""
        return refusal.body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        writer, answer, use = _StreamWriter(send), None, use_of(scope)
        try:
            with use.request():
                body = await read_body(scope, receive, self.door.limits)
                async with while_connected(receive) as tasks:
                    generation = await self.prepare(body, use)
                    answer = generation.answer
                    await self._answer(generation, writer, tasks, use)
        except ClientLeft:
            return
        except Exception as exc:
            log_fault(exc)
            refusal = refusal_of(use.told(exc))
            if writer.begun and answer is not None:
                await writer.write(answer.failure(refusal), last=True)
            else:
                await send_json(send, refusal.status, self.refused(refusal), refusal.headers)

    async def _answer(
        self, generation: Generation, writer: _StreamWriter, tasks: TaskGroup, use: KeyUse
    ) -> None:
        most_s = self.door.limits.request_s
        several = len(generation.prompts) > 1
        async with AsyncExitStack() as stack:
            streams = list[FleetStream]()
            stack.callback(_spend, use, streams, generation.sampling.n)  # whatever ends the request
            for number, prompt in enumerate(generation.prompts):
                samples = self.door.fleet.samples(
                    generation.name.model,
                    prompt,
                    generation.sampling,
                    adapter=generation.name.adapter,
                    priority=generation.priority,
                    deadline_s=min(generation.timeout_s or most_s, most_s),
                    add_special_tokens=generation.add_special_tokens,
                    request_id=f"{generation.id}.{number}" if several else generation.id,
                )
                streams += await stack.enter_async_context(samples)
            reading = _Reading(streams, tasks)
            write = self._stream if generation.stream else self._whole
            await in_own_task(tasks, partial(write, generation, reading, writer))

    async def _whole(self, generation: Generation, reading: _Reading, writer: _StreamWriter) -> None:
        choices: list[list[Token]] = [[] for _ in reading.streams]
        while arrived := await reading.take():
            for index, tokens in arrived:
                choices[index] += tokens
        usage = UsageTotal.of(reading.streams, samples=generation.sampling.n)
        headers = {"x-request-id": generation.id}
        await send_json(writer.send, 200, generation.answer.whole(choices, usage), headers)

    async def _stream(self, generation: Generation, reading: _Reading, writer: _StreamWriter) -> None:
        answer, interval_s = generation.answer, self.door.limits.stream_interval_s
        writer.request_id = generation.id
        arrived = await self._first(generation, reading, writer)
        data = b"" if writer.begun else answer.begin()
        if arrived and len(reading.streams) == 1 and not interval_s:
            data = await self._one(answer, reading.streams[0], arrived[0][1], data, writer)
            arrived = []
        while arrived:
            data += b"".join([answer.chunk(index, tokens) for index, tokens in arrived])
            if reading.complete:
                break
            if data:
                await writer.write(data)
                data = b""
            if interval_s:
                await anyio.sleep(interval_s)
            arrived = await reading.take()
        usage = UsageTotal.of(reading.streams, samples=generation.sampling.n)
        await writer.write(data + answer.end(usage), last=True)

    async def _one(
        self, answer: Answer, stream: FleetStream, tokens: list[Token], data: bytes, writer: _StreamWriter
    ) -> bytes:
        """Write one stream as it comes, with as few coroutines as can be; return what is left at its end.

        The wait for a token resumes every coroutine that waits, and so does every write.
        """
        take, chunk, send = stream.take, answer.chunk, writer.send
        data += chunk(0, tokens)
        while tokens and tokens[-1].finish_reason is None:
            if not writer.begun:
                await writer.write(data)
            elif data:
                await send({"type": "http.response.body", "body": data, "more_body": True})
            tokens = await take()
            data = chunk(0, tokens) if tokens else b""
        return data

    async def _first(
        self, generation: Generation, reading: _Reading, writer: _StreamWriter
    ) -> list[tuple[int, list[Token]]]:
        """Return the first tokens; while they take long, tell of what is waited for by comments."""
        with anyio.move_on_after(self.door.limits.commit_after_s):
            return await reading.take()
        await writer.write(generation.answer.begin())
        while True:
            await writer.write(comment(_progress(self.door.fleet, generation.name)))
            with anyio.move_on_after(COMMENT_S):
                return await reading.take()


def _spend(use: KeyUse, streams: Sequence[FleetStream], samples: int) -> None:
    usage = UsageTotal.of(streams, samples=samples)
    use.spend(usage.prompt_tokens + usage.generated_tokens)


class _Reading:
    """The tokens of several streams, all that have come at once."""

    def __init__(self, streams: Sequence[FleetStream], tasks: TaskGroup) -> None:
        self.streams = streams
        self._num_open = len(streams)
        self._arrived: list[tuple[int, list[Token]]] = []
        self._error: Exception | None = None
        self._changed = anyio.Event()
        if len(streams) > 1:
            for index, stream in enumerate(streams):
                tasks.start_soon(self._read, index, stream)

    @property
    def complete(self) -> bool:
        """Whether all tokens have been taken, and no choice has ended by an error."""
        return not self._arrived and not self._num_open and self._error is None

    async def take(self) -> list[tuple[int, list[Token]]]:
        """Wait for a token, and return all that have come, by choice; none at the end."""
        if len(self.streams) == 1:
            tokens = await self.streams[0].take()
            self._num_open = 0 if _is_last(tokens) else 1
            return [(0, tokens)] if tokens else []
        while not self._arrived and self._num_open and self._error is None:
            self._changed = anyio.Event()
            await self._changed.wait()
        if not self._arrived and self._error is not None:
            raise self._error
        arrived, self._arrived = self._arrived, []
        return arrived

    async def _read(self, index: int, stream: FleetStream) -> None:
        try:
            is_last = False
            while not is_last:
                tokens = await stream.take()
                self._arrived += [(index, tokens)] if tokens else []
                is_last = _is_last(tokens)
                self._changed.set()
        except Exception as exc:
            self._error = exc
        self._num_open -= 1
        self._changed.set()


def _is_last(tokens: Sequence[Token]) -> bool:
    return not tokens or tokens[-1].finish_reason is not None


class _StreamWriter:
    """Sends a stream of events; its head goes with the first of them."""

    def __init__(self, send: Send) -> None:
        self.send = send
        self.begun = False
        self.request_id = ""

    async def write(self, data: bytes, *, last: bool = False) -> None:
        if not self.begun:
            self.begun = True
            headers = [*STREAM_HEADERS, (b"x-request-id", self.request_id.encode())]
            await self.send({"type": "http.response.start", "status": 200, "headers": headers})
        await self.send({"type": "http.response.body", "body": data, "more_body": not last})


def log_fault(error: Exception) -> None:
    """Log an error whose reason its client is not told."""
    refusal = refusal_of(error)
    if refusal.status >= 500 and refusal.message != str(error):
        foreign = None if isinstance(error, HotswapError) else error
        log.error("A request was answered by %d: %s", refusal.status, error, exc_info=foreign)


def new_id(prefix: str) -> str:
    """Return an id for a request, which its fleet and its client know it by."""
    return f"{prefix}-{secrets.token_hex(12)}"


def _progress(fleet: Fleet, name: Name) -> str:
    """Return what a request for a model waits for, as far as the fleet can tell."""
    for instance in fleet.view().replicas(name.id):
        if instance.swapping and (phase := instance.phase) is not None:
            return f"loading {name.model}: {phase.name}, {phase.share:.0%}"
    return f"waiting for {name.model}"
