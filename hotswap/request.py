"""`Request` and `Token`: the input and the output of a generation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NewType

from hotswap.errors import InvalidRequest
from hotswap.sampling import Sampling

__all__ = [
    "AdapterId",
    "FinishReason",
    "ModelId",
    "PromptLogprobs",
    "Request",
    "RequestId",
    "Token",
    "TokenLogprob",
]

ModelId = NewType("ModelId", str)
AdapterId = NewType("AdapterId", str)
RequestId = NewType("RequestId", str)

FinishReason = Literal["stop", "length"]

_MOST_PROMPT_LOGPROBS = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One generation: a prompt, the tokens generated so far, and how to continue.

    An engine prefills `prompt + generated` and continues at position `len(generated)`; it need not know that
    another engine has generated tokens before. A higher `priority` goes first, in the fleet's queue and in
    those of engines.
    """

    id: RequestId
    model: ModelId
    prompt: tuple[int, ...]
    sampling: Sampling = field(default_factory=Sampling)
    generated: tuple[int, ...] = ()
    adapter: AdapterId | None = None
    priority: int = 0
    arrived_s: float = 0.0

    def __post_init__(self) -> None:
        if not self.prompt:
            raise InvalidRequest("The prompt is empty; give at least one token (a start token will do).")

    @property
    def tokens(self) -> tuple[int, ...]:
        """All tokens so far: the prompt, then what was generated."""
        return self.prompt + self.generated

    @property
    def num_tokens(self) -> int:
        """`len(tokens)` without building them."""
        return len(self.prompt) + len(self.generated)

    @property
    def remaining_tokens(self) -> int:
        """How many tokens may still be generated."""
        return self.sampling.max_tokens - len(self.generated)

    def continued(self, tokens: Sequence[int]) -> Request:
        """Return the same request after generating `tokens` more; the next engine prefills them."""
        return replace(self, generated=self.generated + tuple(tokens))

    def check_vocabulary(self, size: int) -> None:
        """Refuse token ids that a model of so many does not have, wherever the request names one.

        Raises:
            InvalidRequest: naming the field, the id and the largest that there is.
        """
        others = self.sampling.token_ids if self.sampling.largest_token >= size else ()
        for name, ids in (("prompt", self.tokens), *others):
            if ids and (max(ids) >= size or min(ids) < 0):
                wrong = min(ids) if min(ids) < 0 else max(ids)
                raise InvalidRequest(
                    f"{name} of request {self.id!r} has token {wrong}, but the largest id in the vocabulary "
                    f"of {self.model!r} is {size - 1}; use the model's own tokenizer."
                )

    def check_prompt_logprobs(self) -> None:
        """Refuse to tell more log-probabilities of a prompt than 1,048,576, some hundreds of megabytes.

        Raises:
            InvalidRequest: `prompt_logprobs` asks for more.
        """
        count = self.sampling.prompt_logprobs
        if count is not None and (told := len(self.prompt) * (count + 1)) > _MOST_PROMPT_LOGPROBS:
            raise InvalidRequest(
                f"prompt_logprobs of {count} for a prompt of {len(self.prompt):,} tokens are {told:,} "
                f"log-probabilities, over {_MOST_PROMPT_LOGPROBS:,}; ask for fewer, or of a shorter prompt."
            )

    def __repr__(self) -> str:
        tokens = f"{len(self.prompt)}+{len(self.generated)}/{self.sampling.max_tokens}"
        adapter = f" adapter {self.adapter}" if self.adapter else ""
        return f"<Request {self.id} {self.model}{adapter} [tokens: {tokens}]>"


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprob:
    """A token that could have come, its natural log-probability, and its text if there is a tokenizer."""

    id: int
    logprob: float
    text: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptLogprobs:
    """A token of a prompt, its log-probability (`None` for the first), and the most probable tokens there."""

    id: int
    logprob: float | None = None
    top_logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Token:
    """One generated token.

    Attributes:
        id: Its id.
        index: Its position in the generation, from 0.
        text: The text that it completes: empty while a character or a possible stop string is incomplete, for
            an end token, and always for a model without a tokenizer.
        finish_reason: Of the last token only: `"stop"` for an end token or a stop string, `"length"` for
            `max_tokens` or the end of the context.
        logprob: Its natural log-probability; `None` unless `Sampling.logprobs` asks for it.
        top_logprobs: The most probable tokens at its position, as many as were asked for.
    """

    id: int
    index: int
    text: str = ""
    finish_reason: FinishReason | None = None
    logprob: float | None = None
    top_logprobs: tuple[TokenLogprob, ...] = ()
