"""What clients ask of a fleet: streams, samples, whole generations and answers to chats."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import anyio

from hotswap.chat import Chat
from hotswap.runtime.completion import Completion
from hotswap.runtime.core import Core
from hotswap.runtime.flow import FleetStream
from hotswap.sampling import Sampling

if TYPE_CHECKING:
    from anyio.abc import TaskGroup

__all__ = ["Requests"]


class Requests:
    """The verbs of a `Fleet` for its clients."""

    _core: Core

    @asynccontextmanager
    async def stream(
        self,
        model: str,
        prompt: str | Sequence[int] | Chat,
        sampling: Sampling | None = None,
        *,
        adapter: str | None = None,
        priority: int = 0,
        deadline_s: float | None = None,
        add_special_tokens: bool | None = None,
        request_id: str | None = None,
    ) -> AsyncGenerator[FleetStream]:
        """Ask a model to continue `prompt` and lend its stream; leaving the block ends the request.

        A text prompt needs a tokenizer beside the model's weights, a `Chat` a chat template; token ids work
        always. Texts get the special tokens that the model wants around them (a start token, mostly) unless
        they begin with them, chats those of their template; `add_special_tokens` says otherwise. A higher
        `priority` leaves the queue earlier, ahead of at most 64 earlier requests for each level. After
        `deadline_s` seconds the stream ends by `DeadlineExceeded`. `request_id` is what `Fleet.cancel`,
        records and spans call it; by default the fleet makes one.

        A stream is one sample: `samples` lends those of a request with `Sampling.n` of more.

        Raises:
            UnknownModel: the model is not registered.
            UnknownAdapter, UnsupportedAdapter: the model has no such adapter, or lacks tokens of it.
            InvalidRequest: the prompt is empty, or cannot be written or encoded, or an argument is wrong,
                `Sampling.n` included, or another request under way has the `request_id`.
            PromptTooLong: the prompt leaves no room in the model's context.
            ModelTooLarge: no engine could ever hold the model.
            QueueFull: it would have to wait and too many do, or it asks for log-probabilities of its prompt
                and too many are kept; it says when to come back.
            FleetClosed: the fleet is not open, or closes gracefully.
            WrongLoop: the fleet is open on another event loop.
        """
        async with self._core.running(
            model,
            prompt,
            sampling,
            adapter=adapter,
            priority=priority,
            deadline_s=deadline_s,
            add_special_tokens=add_special_tokens,
            request_id=request_id,
            most_samples=1,
        ) as (request,):
            yield FleetStream(request, self._core.lifetime)

    @asynccontextmanager
    async def samples(
        self,
        model: str,
        prompt: str | Sequence[int] | Chat,
        sampling: Sampling | None = None,
        *,
        adapter: str | None = None,
        priority: int = 0,
        deadline_s: float | None = None,
        add_special_tokens: bool | None = None,
        request_id: str | None = None,
    ) -> AsyncGenerator[tuple[FleetStream, ...]]:
        """Ask a model to continue `prompt` in `Sampling.n` ways, and lend a stream of each.

        The prompt is computed once: one sample runs ahead to its first token, and the others begin on its
        instance, whose prefix cache has the prompt then. If that has no room, one of those that are left goes
        where the router says, and computes the prompt for the others there. From then on each is a request
        like any other, which swaps, moves and losses take elsewhere by itself; samples that are sent on
        together go where one of them has computed the prompt, too.

        Leaving the block ends all. They have one priority and one deadline, and the id of the request with
        `-` and a number each. Either all are taken or, by
        `QueueFull`, none: all count as waiting where the first would have to wait. Other arguments and errors
        are those of `stream`.
        """
        async with self._core.running(
            model,
            prompt,
            sampling,
            adapter=adapter,
            priority=priority,
            deadline_s=deadline_s,
            add_special_tokens=add_special_tokens,
            request_id=request_id,
        ) as requests:
            yield tuple(FleetStream(request, self._core.lifetime) for request in requests)

    async def generate(
        self,
        model: str,
        prompt: str | Sequence[int] | Chat,
        sampling: Sampling | None = None,
        *,
        adapter: str | None = None,
        priority: int = 0,
        deadline_s: float | None = None,
        add_special_tokens: bool | None = None,
        request_id: str | None = None,
    ) -> Completion:
        """Return the whole generation at once, with all its samples.

        Arguments and errors are those of `samples`; an error of one sample ends all.
        """
        async with self.samples(
            model,
            prompt,
            sampling,
            adapter=adapter,
            priority=priority,
            deadline_s=deadline_s,
            add_special_tokens=add_special_tokens,
            request_id=request_id,
        ) as streams:
            done = await _completed(streams)
            samples = tuple(sample for one in done for sample in one.samples)
            return Completion.of(samples, prompt_logprobs=done[0].prompt_logprobs)

    async def chat(
        self,
        model: str,
        messages: Sequence[Mapping[str, Any]],
        sampling: Sampling | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        adapter: str | None = None,
        priority: int = 0,
        deadline_s: float | None = None,
        add_special_tokens: bool | None = None,
        request_id: str | None = None,
    ) -> Completion:
        """Return a model's answer to a conversation, which the model's own chat template writes.

        Arguments and errors are those of `Chat` and `samples`; with `continue_final_message` the answer is
        what comes after the last message. `stream(model, Chat(messages))` gives tokens.

        A conversation of thousands of values, or a million characters, is checked and copied in a worker
        thread, while streams go on; change it only after the call.
        """
        chat = await self._core.texts.chat(
            messages,
            tools=tools,
            documents=documents,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            chat_template_kwargs=chat_template_kwargs,
        )
        return await self.generate(
            model,
            chat,
            sampling,
            adapter=adapter,
            priority=priority,
            deadline_s=deadline_s,
            add_special_tokens=add_special_tokens,
            request_id=request_id,
        )


async def _completed(streams: Sequence[FleetStream]) -> list[Completion]:
    """Read streams to their ends, side by side; the first error ends all."""
    if len(streams) == 1:
        return [await streams[0].complete()]
    done: dict[int, Completion] = {}
    errors: list[Exception] = []

    async def read(number: int, tasks: TaskGroup) -> None:
        try:
            done[number] = await streams[number].complete()
        except Exception as exc:
            errors.append(exc)
            tasks.cancel_scope.cancel()

    async with anyio.create_task_group() as tasks:
        for number in range(len(streams)):
            tasks.start_soon(read, number, tasks)
    if errors:
        raise errors[0]
    return [done[number] for number in range(len(streams))]
