"""What answers of completions and of chats have in common, in OpenAI's form."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hotswap.door.errors import Refusal
from hotswap.door.generation import Answer, UsageTotal
from hotswap.door.wire import DONE, event

__all__ = ["OpenAIAnswer", "openai_usage"]


class OpenAIAnswer(Answer):
    """An answer of choices.

    Args:
        base: The fields that all chunks have.
        include_usage: Whether a stream ends with its usage.
    """

    def __init__(self, base: Mapping[str, Any], *, include_usage: bool) -> None:
        self.base, self._include_usage = dict(base), include_usage
        self._usage_so_far: dict[str, Any] = {"usage": None} if include_usage else {}

    @property
    def chunk_end(self) -> bytes:
        """The JSON behind the choices of a chunk."""
        return b',"usage":null' if self._include_usage else b""

    def choice_event(self, choice: Mapping[str, Any]) -> bytes:
        """Return a chunk of one choice that no template makes."""
        return event({**self.base, "choices": [choice], **self._usage_so_far})

    def end(self, usage: UsageTotal) -> bytes:
        if not self._include_usage:
            return DONE
        none: list[object] = []
        return event({**self.base, "choices": none, "usage": openai_usage(usage)}) + DONE

    def failure(self, refusal: Refusal) -> bytes:
        return event(refusal.body)


def openai_usage(usage: UsageTotal) -> dict[str, Any]:
    """Return the usage of a request in OpenAI's form."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.generated_tokens,
        "total_tokens": usage.prompt_tokens + usage.generated_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.reused_tokens},
    }
