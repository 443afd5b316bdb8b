"""The streams of one engine: each has a task that passes on the tokens of vLLM's core."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import anyio
from anyio.abc import TaskGroup
from anyio.lowlevel import checkpoint

from hotswap.backends.notifier import StatusNotifier
from hotswap.backends.servable import most_tokens
from hotswap.backends.vllm.core import Core
from hotswap.backends.vllm.inside.connector import ARRIVAL
from hotswap.backends.vllm.inside.resume import RESUMED
from hotswap.backends.vllm.names import named
from hotswap.errors import InstanceError, InvalidRequest
from hotswap.model import ModelCard
from hotswap.request import Request, RequestId, Token
from hotswap.sampling import Sampling
from hotswap.stream import TokenQueue

__all__ = ["Stream", "Streams", "sampling_params"]


def sampling_params(
    request: Request, card: ModelCard, context: int, *, resumes: bool, arrival: str | None = None
) -> Any:
    """Return vLLM's sampling parameters of a request; the fleet, not vLLM, matches stop strings.

    If the core `resumes`, vLLM is asked for the whole generation, with the tokens that there are so far;
    otherwise for the rest, with those tokens as part of the prompt. `arrival` is the id of the sink that has
    its KV blocks.
    """
    sampling, begun = request.sampling, len(request.generated)
    free = sampling.ignore_eos and not sampling.has_grammar
    ends = {*sampling.stop_token_ids, *(() if free else card.eos_token_ids)}
    passed = 0 if resumes else begun
    extra: dict[str, Any] = {RESUMED: list(request.generated)} if begun and resumes else {}
    if arrival is not None:
        extra["kv_transfer_params"] = {ARRIVAL: arrival}
    max_tokens = most_tokens(request, context) - len(request.prompt) - passed
    return named("vllm.sampling_params:SamplingParams")(
        max_tokens=max_tokens,
        min_tokens=min(max(0, sampling.min_tokens - passed), max_tokens),
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        seed=(sampling.seed or 0) if sampling.is_random else None,
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        logit_bias=dict(sampling.logit_bias) or None,
        stop_token_ids=sorted(ends),
        ignore_eos=True,
        detokenize=False,
        output_kind=named("vllm.sampling_params:RequestOutputKind").DELTA,
        extra_args=extra or None,
        structured_outputs=_grammar(sampling),
    )


def _grammar(sampling: Sampling) -> Any:
    """Return vLLM's parameters of a grammar; `None` without one."""
    if not sampling.has_grammar:
        return None
    return named("vllm.sampling_params:StructuredOutputsParams")(
        json=sampling.json_schema or None, regex=sampling.regex or None
    )


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
        inside = await llm.add_request(
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
                self._pass_on(output)
        finally:
            self._inside = None
            inside.close()

    async def abort(self, core: Core) -> None:
        """Have the core abort it."""
        if self._inside is not None:
            await core.llm.abort(self._inside.request_id, internal=True)

    def _pass_on(self, output: Any) -> None:
        completion = output.outputs[0]
        ids: list[int] = list(completion.token_ids)
        reason = completion.finish_reason if output.finished else None
        if not self.begun:
            self.tokens.num_reused_tokens = int(output.num_cached_tokens or 0)
        for place, id in enumerate(ids, start=1):
            ended = reason if place == len(ids) and reason in ("stop", "length") else None
            index = self.num_tokens - len(self.request.prompt)
            self.tokens.put(Token(id=int(id), index=index, finish_reason=ended))
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
