"""The streams of one engine: each has a task that passes on the tokens of vLLM's core."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import anyio
from anyio.abc import TaskGroup
from anyio.lowlevel import checkpoint

from hotswap.backends.notifier import StatusNotifier
from hotswap.backends.vllm.core import Core
from hotswap.backends.vllm.logprobs import error_in, of_prompt, of_token
from hotswap.errors import InstanceError, InvalidRequest
from hotswap.request import Request, RequestId, new_token
from hotswap.stream import TokenQueue
from hotswap.worker_threads import run_in_thread

__all__ = ["Stream", "Streams"]

# The log-probabilities of so many tokens of a prompt are read in a millisecond.
_FEW_TOKENS = 100


@dataclass(slots=True, eq=False)
class Stream:
    """A request inside vLLM.

    Attributes:
        request: The request as it was admitted.
        tokens: The queue of its tokens.
        num_tokens: How many tokens it has, prompt included.
        begun: Whether a token was generated here.
        notifier: Told when tokens have come.
    """

    request: Request
    tokens: TokenQueue = field(default_factory=TokenQueue)
    num_tokens: int = 0
    begun: bool = False
    notifier: StatusNotifier = field(default_factory=StatusNotifier)
    _left: bool = False
    _inside: Any = None
    _more: anyio.Event = field(default_factory=anyio.Event)

    @property
    def is_open(self) -> bool:
        """Whether it is still read, and has not ended."""
        return not self._left and not self.tokens.closed

    @property
    def inside_id(self) -> str | None:
        """Its id in the core; `None` while the core does not have it."""
        return None if self._inside is None else self._inside.request_id

    def wake(self) -> None:
        """Wake the tasks that wait for its tokens."""
        self._more.set()

    async def has(self, num_tokens: int) -> None:
        """Wait until it has so many tokens, prompt included, or is not open any more."""
        while self.num_tokens < num_tokens and self.is_open:
            self._more = anyio.Event()
            await self._more.wait()

    def leave(self) -> bool:
        """Mark that its reader has left; true if the core must abort it."""
        self._left = True
        self._more.set()
        return self._inside is not None

    async def run(self, core: Core, params: Any, adapter: Any) -> None:
        """Pass tokens on until the request ends or its reader leaves."""
        request, llm = self.request, core.llm
        tokens = request.prompt if core.resumes else request.tokens
        prompt = {"prompt_token_ids": list(tokens), "cache_salt": core.weights}
        inside = await core.add_request(
            request.id,
            prompt,
            params,
            lora_request=adapter,
            priority=-request.priority,
            trace_headers=core.trace_headers(),
        )
        if self._left:
            await llm.abort(inside.request_id, internal=True)
            return
        self._inside = inside
        try:
            finished = False
            while not finished:
                output = inside.get_nowait() or await inside.get()
                finished = output.finished or self._left
                if not self.begun:
                    await self._note_prompt(output)
                self._pass_on(output)
        finally:
            self._inside = None
            inside.close()

    async def abort(self, core: Core) -> None:
        """Have the core abort it."""
        if self._inside is not None:
            await core.llm.abort(self._inside.request_id, internal=True)

    async def _note_prompt(self, output: Any) -> None:
        """Keep what the core tells of the prompt; of a long one it is read in a worker thread."""
        told: list[dict[int, Any]] = output.prompt_logprobs or []
        if len(told) <= _FEW_TOKENS:
            scored = of_prompt(self.request, told)
        else:
            scored = await run_in_thread(of_prompt, self.request, told, abandon_on_cancel=True)
        self.tokens.num_reused_tokens = int(output.num_cached_tokens or 0)
        self.tokens.prompt_logprobs = scored or ()

    def _pass_on(self, output: Any) -> None:
        completion = output.outputs[0]
        reason = completion.finish_reason if output.finished else None
        ids: list[int] = [int(id) for id in completion.token_ids]
        for place, id in enumerate(ids):
            ended = reason if place == len(ids) - 1 and reason in ("stop", "length") else None
            told: dict[int, Any] = completion.logprobs[place] if completion.logprobs else {}
            if (error := error_in(told, id)) is not None:
                self.tokens.close(error)
                break
            logprob, top = of_token(self.request, told, id)
            index = self.num_tokens - len(self.request.prompt)
            self.tokens.put(new_token(id, index, ended, "", logprob, top))
            self.num_tokens += 1
            self.begun = True
        if reason in ("stop", "length"):
            self.tokens.close()
        self._more.set()
        self.notifier.load_changed()


class Streams:
    """The open streams of one core; belongs to the event loop. `len` counts them.

    Args:
        notifier: Told when a stream is opened, goes on or is closed.
    """

    def __init__(self, notifier: StatusNotifier) -> None:
        self._notifier = notifier
        self._open: list[Stream] = []
        self._drained = anyio.Event()
        self._gone = anyio.Event()
        self._num_tasks = 0

    def __len__(self) -> int:
        return len(self._open)

    @property
    def num_begun(self) -> int:
        """How many streams have got a token."""
        return sum(stream.begun for stream in self._open)

    @property
    def num_prefill_tokens(self) -> int:
        """Tokens of the streams without one: vLLM does not report how far a prompt is computed."""
        return sum(stream.num_tokens for stream in self._open if not stream.begun)

    @property
    def num_next_tokens(self) -> int:
        """Tokens of the first stream that has got none; 0 if there is none."""
        return next((stream.num_tokens for stream in self._open if not stream.begun), 0)

    def num_blocks(self, block_tokens: int) -> int:
        """KV blocks of the streams that have got a token; a shared block counts for each of them."""
        return sum(-(-stream.num_tokens // block_tokens) for stream in self._open if stream.begun)

    def open(self, request: Request) -> Stream:
        """Open a stream."""
        stream = Stream(request, num_tokens=request.num_tokens, notifier=self._notifier)
        self._open.append(stream)
        self._notifier.load_changed()
        return stream

    def find(self, request: RequestId) -> Stream | None:
        """Return the open stream of a request."""
        return next((stream for stream in reversed(self._open) if stream.request.id == request), None)

    def give_up(self, tasks: TaskGroup, stream: Stream, core: Core, error: Exception) -> bool:
        """End a stream with an error, after the tokens it holds; false if it had ended before."""
        if stream not in self._open:
            return False
        stream.tokens.close(error)
        self.leave(tasks, stream, core)
        return True

    def start(self, tasks: TaskGroup, stream: Stream, core: Core, params: Any, adapter: Any) -> None:
        """Have the core generate it."""
        self._num_tasks += 1
        tasks.start_soon(self._run, stream, core, params, adapter, name=f"stream {stream.request.id}")

    async def _run(self, stream: Stream, core: Core, params: Any, adapter: Any) -> None:
        try:
            await stream.run(core, params, adapter)
        except Exception as exc:
            # If the core has ended, its engine ends all streams.
            if not core.is_dead:
                stream.tokens.close(InvalidRequest(f"vLLM refused {stream.request!r}: {exc}"))
                self._forget(stream)
        else:
            if stream.is_open:  # vLLM ended it for another reason
                stream.tokens.close(
                    InstanceError(f"vLLM ended {stream.request!r} by an error; its log says which.")
                )
            if stream.tokens.closed:
                self._forget(stream)
        finally:
            stream.wake()
            self._num_tasks -= 1
            if not self._num_tasks:
                self._gone.set()

    def leave(self, tasks: TaskGroup, stream: Stream, core: Core) -> None:
        """Forget a stream whose reader has left, and have the core abort its request."""
        if stream.leave():
            tasks.start_soon(self._abort, stream, core)
        self._forget(stream)

    async def _abort(self, stream: Stream, core: Core) -> None:
        try:
            await stream.abort(core)
        except Exception:
            if not core.is_dead:
                raise

    def close_all(self, tasks: TaskGroup, core: Core | None, error: Callable[[], Exception]) -> int:
        """End every stream, after the tokens it holds, with an error of its own; return how many."""
        closed = list(self._open)
        for stream in closed:
            stream.tokens.close(error())
            if core is not None:
                self.leave(tasks, stream, core)
        self._open.clear()
        self._notifier.load_changed()
        self._drained.set()
        return len(closed)

    async def wait_until_drained(self, deadline_s: float) -> None:
        """Return once none is open, or after `deadline_s`."""
        await checkpoint()
        with anyio.move_on_after(deadline_s):
            while self._open:
                self._drained = anyio.Event()
                await self._drained.wait()

    async def wait_until_gone(self) -> None:
        """Return once the task of every stream has ended."""
        while self._num_tasks:
            self._gone = anyio.Event()
            await self._gone.wait()

    def _forget(self, stream: Stream) -> None:
        if stream in self._open:
            self._open.remove(stream)
            self._notifier.load_changed()
        if not self._open:
            self._drained.set()
