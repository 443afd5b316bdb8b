"""`/v1/completions`: texts that continue prompts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from hotswap import Token
from hotswap.door.body import checked
from hotswap.door.errors import invalid
from hotswap.door.generation import Endpoint, Generation, UsageTotal, new_id
from hotswap.door.keys import KeyUse
from hotswap.door.logprobs import legacy_logprobs
from hotswap.door.openai_answer import OpenAIAnswer, openai_usage
from hotswap.door.protocol import CompletionBody
from hotswap.door.sampling import schema_of, to_sampling
from hotswap.door.wire import TextChunks

__all__ = ["Completions"]


class Completions(Endpoint):
    """Continues texts or token ids."""

    async def prepare(self, body: bytes, use: KeyUse) -> Generation:
        asked = await checked(CompletionBody, body)
        name = self.named(use, asked.model, asked.adapter, priority=asked.priority)
        if asked.best_of not in (None, asked.n or 1):
            raise invalid("best_of", "best_of is not n; all samples are returned.")
        if asked.echo:
            raise invalid("echo", "echo is true; answers have no prompts, so leave it out.")
        sampling = to_sampling(
            self.door,
            name,
            asked,
            max_tokens=asked.max_tokens,
            logprobs=asked.logprobs,
            json_schema=schema_of(asked.response_format),
        )
        prompts = _prompts(asked.prompt)
        self.check_choices(len(prompts) * sampling.n)
        id = new_id("cmpl")
        base = {
            "id": id,
            "object": "text_completion",
            "created": self.door.now(),
            "model": asked.model,
        }
        return Generation(
            id=id,
            name=name,
            prompts=prompts,
            sampling=sampling,
            stream=asked.stream,
            answer=_CompletionAnswer(
                base, include_usage=asked.include_usage, logprobs=asked.logprobs is not None
            ),
            priority=asked.priority,
            timeout_s=asked.timeout_s,
            add_special_tokens=asked.add_special_tokens,
        )


def _prompts(given: str | list[int] | list[str] | list[list[int]]) -> tuple[str | list[int], ...]:
    """Return the prompts of a body, each of which is text or token ids."""
    if isinstance(given, str):
        return (given,)
    nested = [prompt for prompt in given if not isinstance(prompt, int)]
    return tuple(nested) if nested else ([token for token in given if isinstance(token, int)],)


class _CompletionAnswer(OpenAIAnswer):
    def __init__(self, base: dict[str, Any], *, include_usage: bool, logprobs: bool) -> None:
        super().__init__(base, include_usage=include_usage)
        self._logprobs = logprobs
        self._chunks = TextChunks(
            base, before=b',"text":', after=b',"logprobs":null,"finish_reason":', end=self.chunk_end
        )
        self._num_characters = Counter[int]()

    def chunk(self, index: int, tokens: Sequence[Token]) -> bytes:
        last = tokens[-1]
        text = last.text if len(tokens) == 1 else "".join([token.text for token in tokens])
        finish = last.finish_reason
        if not self._logprobs:
            return self._chunks.chunk(index, text, finish) if text or finish else b""
        told = legacy_logprobs(tokens, self._num_characters[index])
        self._num_characters[index] += len(text)
        return self.choice_event(_choice(index, text, finish, told))

    def whole(self, choices: Sequence[Sequence[Token]], usage: UsageTotal) -> object:
        written = [
            _choice(
                index,
                "".join([token.text for token in tokens]),
                tokens[-1].finish_reason,
                legacy_logprobs(tokens, 0) if self._logprobs else None,
            )
            for index, tokens in enumerate(choices)
        ]
        return {**self.base, "choices": written, "usage": openai_usage(usage)}


def _choice(index: int, text: str, finish_reason: str | None, logprobs: object) -> dict[str, object]:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}
