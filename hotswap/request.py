"""`Request` and `Token`: the input and the output of a generation."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NewType, cast, overload

from hotswap.errors import InvalidRequest
from hotswap.sampling import Sampling

__all__ = [
    "AdapterId",
    "FinishReason",
    "InstanceId",
    "ModelId",
    "PromptLogprobs",
    "Request",
    "RequestId",
    "ScoredPrompt",
    "Token",
    "TokenLogprob",
    "new_token",
]

ModelId = NewType("ModelId", str)
AdapterId = NewType("AdapterId", str)
InstanceId = NewType("InstanceId", str)
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

    @property
    def num_prompt_logprobs(self) -> int:
        """How many log-probabilities of its prompt it asks for."""
        count = self.sampling.prompt_logprobs
        return 0 if count is None else len(self.prompt) * (count + 1)

    def check_prompt_logprobs(self) -> None:
        """Refuse to tell more log-probabilities of a prompt than 1,048,576, some ten megabytes.

        Raises:
            InvalidRequest: `prompt_logprobs` asks for more.
        """
        if (asked := self.num_prompt_logprobs) > _MOST_PROMPT_LOGPROBS:
            raise InvalidRequest(
                f"prompt_logprobs of {self.sampling.prompt_logprobs} for a prompt of {len(self.prompt):,} "
                f"tokens are {asked:,} log-probabilities, over {_MOST_PROMPT_LOGPROBS:,}; ask for fewer, or "
                "of a shorter prompt."
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


class ScoredPrompt(Sequence[PromptLogprobs]):
    """What is told of the tokens of a prompt: a sequence of `PromptLogprobs`, each made when it is asked for.

    It keeps numbers, 12 bytes for each log-probability. As many objects would take ten times the memory, and
    Python's garbage collector would hold all threads for a second to look at a million of them. A slice is a
    tuple. It is equal to another of the same entries and texts. For JSON, whose library takes no sequences of
    other types, write its entries: `[dataclasses.asdict(entry) for entry in scored]`.

    Args:
        first: The first token of the prompt, of which nothing more is told.
    """

    __slots__ = ("_ends", "_ids", "_logprobs", "_texts", "_top_ids", "_top_logprobs")

    def __init__(self, first: int) -> None:
        self._ids, self._logprobs = array("i", (first,)), array("d", (0.0,))
        self._top_ids, self._top_logprobs = array("i"), array("d")
        self._ends = array("q", (0,))  # of each entry, where its tokens end in `_top_ids`
        self._texts: Mapping[int, str] = {}

    def add(self, id: int, logprob: float, top_ids: Sequence[int], top_logprobs: Sequence[float]) -> None:
        """Add the next token of the prompt, and the most probable ones there; for engines."""
        self._ids.append(id)
        self._logprobs.append(logprob)
        self._top_ids.extend(top_ids)
        self._top_logprobs.extend(top_logprobs)
        self._ends.append(len(self._top_ids))

    @property
    def num_top(self) -> int:
        """How many most probable tokens it tells, at all positions together."""
        return len(self._top_ids)

    def top_ids(self) -> set[int]:
        """Return the ids of these, each once."""
        return set(self._top_ids)

    def with_texts(self, texts: Mapping[int, str]) -> ScoredPrompt:
        """Return the same with the texts of tokens by their ids."""
        made = object.__new__(ScoredPrompt)
        for name in self.__slots__:
            setattr(made, name, getattr(self, name))
        made._texts = texts
        return made

    def __len__(self) -> int:
        return len(self._ids)

    @overload
    def __getitem__(self, index: int) -> PromptLogprobs: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[PromptLogprobs, ...]: ...
    def __getitem__(self, index: int | slice) -> PromptLogprobs | tuple[PromptLogprobs, ...]:
        if isinstance(index, slice):
            return tuple(self[at] for at in range(*index.indices(len(self))))
        at = range(len(self))[index]
        if not at:
            return PromptLogprobs(id=self._ids[0])
        top = slice(self._ends[at - 1], self._ends[at])
        told = zip(self._top_ids[top], self._top_logprobs[top], strict=True)
        return PromptLogprobs(
            id=self._ids[at],
            logprob=self._logprobs[at],
            top_logprobs=tuple(
                TokenLogprob(id=id, logprob=logprob, text=self._texts.get(id, "")) for id, logprob in told
            ),
        )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ScoredPrompt):
            return NotImplemented
        return all(getattr(self, name) == getattr(other, name) for name in self.__slots__)

    def __hash__(self) -> int:
        return hash((self._ids.tobytes(), self._top_ids.tobytes()))  # -0.0 equals 0.0, and has other bytes

    def __repr__(self) -> str:
        return f"<ScoredPrompt [{len(self):,} tokens, {self.num_top:,} most probable ones]>"


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

    def with_text(
        self, text: str, finish_reason: FinishReason | None, top_logprobs: tuple[TokenLogprob, ...]
    ) -> Token:
        """Return it as its client is given it; `replace` would take twice as long."""
        return new_token(self.id, self.index, finish_reason, text, self.logprob, top_logprobs)


class _Draft:
    """A `Token` of which the fields are being set."""

    __slots__ = Token.__slots__

    id: int
    index: int
    text: str
    finish_reason: FinishReason | None
    logprob: float | None
    top_logprobs: tuple[TokenLogprob, ...]


def new_token(
    id: int,
    index: int,
    finish_reason: FinishReason | None = None,
    text: str = "",
    logprob: float | None = None,
    top_logprobs: tuple[TokenLogprob, ...] = (),
) -> Token:
    """Return a token as `Token(...)` does, in a third of the time: that sets each field by a call."""
    token = _Draft()
    token.id, token.index, token.finish_reason = id, index, finish_reason
    token.text, token.logprob, token.top_logprobs = text, logprob, top_logprobs
    token.__class__ = Token  # type: ignore[assignment]  # the slots of both are the same
    return cast("Token", token)
