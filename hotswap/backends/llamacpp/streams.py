"""The requests of one server: they wait for a slot, then each has a task that asks for token after token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import anyio
from anyio.abc import TaskGroup
from anyio.lowlevel import checkpoint

from hotswap.backends.llamacpp.http import RefusedByServer
from hotswap.backends.llamacpp.params import Steps
from hotswap.backends.llamacpp.server import Server
from hotswap.backends.llamacpp.settings import KV_BLOCK_TOKENS, Settings
from hotswap.backends.llamacpp.slots import Slots
from hotswap.backends.notifier import StatusNotifier
from hotswap.errors import HotswapError, InstanceError, InvalidRequest
from hotswap.request import FinishReason, Request, TokenLogprob, new_token
from hotswap.stream import TokenQueue

__all__ = ["Stream", "Streams"]

_GRACE_S = 1.0


@dataclass(slots=True, eq=False, kw_only=True)
class Stream:
    """A request of a server.

    Attributes:
        request: The request as it was admitted.
        steps: What the server is asked for.
        ends: The tokens that end it.
        most_tokens: How long it may grow, prompt included.
        tokens: The queue of its tokens.
        sequence: All its tokens so far.
        slot: Its slot, and how many of its tokens that had before; `None` while it waits.
        scope: Cancels its task.
    """

    request: Request
    steps: Steps
    ends: frozenset[int]
    most_tokens: int
    tokens: TokenQueue = field(default_factory=TokenQueue)
    sequence: list[int] = field(default_factory=list[int])
    slot: tuple[int, int] | None = None
    scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)
    _knows_reuse: bool = False

    def __post_init__(self) -> None:
        self.sequence = list(self.request.tokens)

    @property
    def num_blocks(self) -> int:
        """The KV blocks that it may grow to; the last token is sampled and never computed."""
        return -(-(self.most_tokens - 1) // KV_BLOCK_TOKENS)

    @property
    def has_begun(self) -> bool:
        """Whether a token was generated here."""
        return len(self.sequence) > self.request.num_tokens

    def note_reuse(self, answer: dict[str, Any]) -> None:
        """Keep how many tokens the first answer found in the slot."""
        if not self._knows_reuse:
            self._knows_reuse = True
            self.tokens.num_reused_tokens = int(answer["timings/cache_n"])

    def lacks_logprobs(self, answer: dict[str, Any]) -> bool:
        """Whether an answer tells no log-probabilities, though the request asks for them."""
        return self.request.sampling.logprobs is not None and "completion_probabilities" not in answer

    def add(self, answer: dict[str, Any]) -> None:
        """Pass on the token of a server's answer."""
        (token,) = answer["tokens"]
        if not self.steps.allows(token):
            self.tokens.close(
                InvalidRequest(
                    f"Suppressed, forced and bad words of request {self.request.id!r} leave no token that "
                    "may come; allow at least one."
                )
            )
            return
        logprob, top = _logprobs(self.request, answer)
        index = len(self.sequence) - len(self.request.prompt)
        self.sequence.append(token)
        self.steps.add(token)
        stops = token in self.ends and index + 1 >= self.request.sampling.min_tokens
        is_last = len(self.sequence) == self.most_tokens
        reason: FinishReason | None = "stop" if stops else "length" if is_last else None
        self.tokens.put(new_token(token, index, reason, "", logprob, top))
        if reason is not None:
            self.tokens.close()


def _logprobs(request: Request, answer: dict[str, Any]) -> tuple[float | None, tuple[TokenLogprob, ...]]:
    """Return the log-probability of a token and those of the most probable ones, if they were asked for."""
    count = request.sampling.logprobs
    if count is None:
        return None, ()
    (told,) = answer["completion_probabilities"]
    top = told["top_logprobs"][:count]
    return float(told["logprob"]), tuple(TokenLogprob(id=t["id"], logprob=float(t["logprob"])) for t in top)


class Streams:
    """The open streams of an engine; belongs to the event loop. `len` counts them.

    Args:
        notifier: Told when a stream is opened, begins, goes on or is closed.
        settings: The engine's.
    """

    def __init__(self, notifier: StatusNotifier, settings: Settings) -> None:
        self._notifier, self._settings = notifier, settings
        self._turns = anyio.Semaphore(settings.num_at_once)
        self._open: list[Stream] = []
        self._slots = Slots(0, 0)
        self._server: Server | None = None
        self._changed = anyio.Event()
        self._num_tasks = 0

    def __len__(self) -> int:
        return len(self._open)

    def serve(self, server: Server) -> None:
        """Begin with a new server."""
        self._server = server
        self._slots = Slots(self._settings.max_requests, self._settings.num_blocks)

    @property
    def num_running(self) -> int:
        """How many streams have a slot."""
        return sum(stream.slot is not None for stream in self._open)

    @property
    def num_prefill_tokens(self) -> int:
        """Tokens of the streams without one: the server does not report how far a prompt is computed."""
        return sum(len(stream.sequence) for stream in self._open if not stream.has_begun)

    @property
    def num_free_blocks(self) -> int:
        """The blocks that a new stream could be given."""
        return self._slots.num_free_blocks

    @property
    def num_next_blocks(self) -> int:
        """The blocks that the next stream waits for; 0 if none waits."""
        waiting = self._next()
        return waiting.num_blocks if waiting else 0

    def open(self, tasks: TaskGroup, stream: Stream) -> None:
        """Open a stream, which begins once there is room."""
        self._open.append(stream)
        self._notifier.load_changed()
        self._begin(tasks)

    def leave(self, stream: Stream) -> None:
        """Forget a stream whose reader has left, and have the server stop."""
        stream.scope.cancel()
        self._forget(stream)

    def close_all(self, error: Callable[[], HotswapError]) -> int:
        """End every stream, after the tokens it holds, with an error of its own; return how many."""
        closed = tuple(self._open)
        for stream in closed:
            stream.tokens.close(error())
            self.leave(stream)
        return len(closed)

    async def wait_until_drained(self, deadline_s: float) -> None:
        """Return once none is open, or after `deadline_s`."""
        await checkpoint()
        with anyio.move_on_after(deadline_s):
            while self._open:
                await self._change()

    async def wait_until_gone(self) -> None:
        """Return once the task of every stream has ended."""
        while self._num_tasks:
            await self._change()

    # ------------------------------------------------------------------ private

    def _next(self) -> Stream | None:
        """Return the stream that begins next: the highest priority, then the first that came."""
        waiting = [stream for stream in self._open if stream.slot is None]
        return max(waiting, key=lambda stream: stream.request.priority, default=None)

    def _begin(self, tasks: TaskGroup) -> None:
        """Begin streams while there is room for the next."""
        while (stream := self._next()) is not None and self._server is not None:
            slot = self._slots.take(stream.sequence, stream.num_blocks)
            if slot is None:
                return
            stream.slot = slot
            self._num_tasks += 1
            self._notifier.load_changed()
            tasks.start_soon(
                self._run, tasks, stream, *slot, self._server, name=f"stream {stream.request.id}"
            )

    async def _run(
        self, tasks: TaskGroup, stream: Stream, slot: int, num_present: int, server: Server
    ) -> None:
        slots = self._slots
        try:
            with stream.scope:
                await self._generate(stream, slot, num_present, server)
        finally:
            slots.give_back(slot, stream.sequence[:-1], stream.num_blocks)
            self._num_tasks -= 1
            self._forget(stream)
            self._changed.set()
            self._notifier.load_changed()
            if self._slots is slots:
                self._begin(tasks)

    async def _generate(self, stream: Stream, slot: int, num_present: int, server: Server) -> None:
        try:
            for body in stream.steps.prefill(slot, num_present, self._settings.max_step_tokens):
                stream.note_reuse(await self._ask(server, body))
            while not stream.tokens.closed:
                answer = await self._ask(server, stream.steps.body(slot))
                stream.note_reuse(answer)
                if stream.lacks_logprobs(answer):
                    answer |= await self._ask_logprobs(server, stream, slot, answer)
                stream.add(answer)
                self._notifier.load_changed()
        except RefusedByServer as exc:
            stream.tokens.close(InstanceError(f"llama.cpp refused {stream.request!r}: {exc}."))
        except InstanceError as exc:
            with anyio.move_on_after(_GRACE_S):  # the engine hears of the server's end, and ends all streams
                await server.wait()
                await anyio.sleep_forever()
            stream.tokens.close(exc)

    async def _ask_logprobs(
        self, server: Server, stream: Stream, slot: int, answer: dict[str, Any]
    ) -> dict[str, Any]:
        """Ask for the log-probabilities that an answer lacks, as it would have them."""
        (token,) = answer["tokens"]
        end = min(server.end_tokens, default=0)
        for body in stream.steps.logprobs_bodies(slot, end):
            (told,) = (await self._ask(server, body))["completion_probabilities"]
            for entry in told["top_logprobs"]:
                if entry["id"] == token:
                    return {"completion_probabilities": [told | {"logprob": entry["logprob"]}]}
        raise InstanceError(f"llama.cpp tells no log-probability of token {token} of {stream.request!r}.")

    async def _ask(self, server: Server, body: bytes) -> dict[str, Any]:
        """Have a step computed; steps take turns."""
        async with self._turns:
            return await server.complete(body)

    def _forget(self, stream: Stream) -> None:
        if stream in self._open:
            self._open.remove(stream)
            self._changed.set()
            self._notifier.load_changed()

    async def _change(self) -> None:
        if self._changed.is_set():  # else another task waits on it
            self._changed = anyio.Event()
        await self._changed.wait()
