"""`Request`, `Sampling` and `Token`: the input and the output of a generation."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, NewType

from hotswap.errors import InvalidRequest

__all__ = ["AdapterId", "FinishReason", "ModelId", "Request", "RequestId", "Sampling", "Token"]

ModelId = NewType("ModelId", str)
AdapterId = NewType("AdapterId", str)
RequestId = NewType("RequestId", str)

FinishReason = Literal["stop", "length"]


def _check(holds: bool, otherwise: str) -> None:
    if not holds:
        raise InvalidRequest(otherwise)


def _is_bias(pair: object) -> bool:
    match pair:
        case (int(token), int() | float() as bias):
            return token >= 0 and -100.0 <= bias <= 100.0
        case _:
            return False


def _check_grammar(json_schema: object, regex: object, min_tokens: int) -> None:
    for name, text in (("json_schema", json_schema), ("regex", regex)):
        _check(
            isinstance(text, str), f"{name} is {text!r}, it must be text (of a schema, json.dumps makes it)."
        )
    _check(not (json_schema and regex), "Give a json_schema or a regex, not both.")
    _check(
        min_tokens == 0,
        "min_tokens must be 0 with a json_schema or a regex, which decide where a generation ends.",
    )
    if json_schema:
        try:
            parsed: object = json.loads(str(json_schema))
        except ValueError as exc:
            raise InvalidRequest(f"json_schema is no JSON: {exc}.") from exc
        _check(isinstance(parsed, dict), f"json_schema is {json_schema!r}, it must be a JSON object.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Sampling and stop parameters of a request; the default is greedy.

    The token at position `n` of a request depends on the logits, `seed` and `n` only, never on the batch:
    a request that moves to another engine gets the same tokens.

    `top_k=0` and `top_p=1.0` are off. `repetition_penalty` divides the positive and multiplies the negative
    logits of every token seen so far, prompt included (Keskar et al., CTRL, arXiv:1909.05858, section 4.1).
    `frequency_penalty` is subtracted from the logits of generated tokens for each occurrence,
    `presence_penalty` once. `logit_bias` adds to the logits of tokens, before all penalties.
    `stop` strings match the decoded text and are cut from it; `stop_token_ids` add to the model's own end
    tokens, which `ignore_eos` switches off. No stop of any kind fires before `min_tokens` tokens.

    `json_schema` (its text) and `regex` constrain the generation: it is JSON of that schema, or matches as a
    whole, unless `max_tokens` end it before. Engines without this ability refuse the request, except
    simulated ones, which have no text. The model's own end tokens stop it even with `ignore_eos`, because no
    text may follow.
    """

    max_tokens: int = 128
    min_tokens: int = 0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    json_schema: str = ""
    regex: str = ""

    def __post_init__(self) -> None:
        _check(self.max_tokens >= 1, f"max_tokens is {self.max_tokens!r}, it must be 1 or more.")
        _check(
            0 <= self.min_tokens <= self.max_tokens,
            f"min_tokens is {self.min_tokens!r}, it must lie between 0 and max_tokens ({self.max_tokens}).",
        )
        _check(
            0.0 <= self.temperature < float("inf"),
            f"temperature is {self.temperature!r}, it must be 0 (greedy) or more, and finite.",
        )
        _check(self.top_k >= 0, f"top_k is {self.top_k!r}, it must be 0 (off) or more.")
        _check(0.0 < self.top_p <= 1.0, f"top_p is {self.top_p!r}, it must be over 0 and at most 1 (off).")
        _check(
            0.0 < self.repetition_penalty < float("inf"),
            f"repetition_penalty is {self.repetition_penalty!r}, it must be over 0; 1 is off.",
        )
        for name in ("presence_penalty", "frequency_penalty"):
            penalty = getattr(self, name)
            in_range = -2.0 <= penalty <= 2.0
            _check(in_range, f"{name} is {penalty!r}, it must lie between -2 and 2; 0 is off.")
        _check(
            type(self.logit_bias) is tuple and all(map(_is_bias, self.logit_bias)),
            f"logit_bias is {self.logit_bias!r}, it must be a tuple of pairs: a token, and what is added to "
            "its logit, between -100 and 100.",
        )
        _check(
            type(self.stop) is tuple and all(self.stop),
            f"stop is {self.stop!r}, it must be a tuple of strings, none of them empty.",
        )
        if self.has_grammar:
            _check_grammar(self.json_schema, self.regex, self.min_tokens)

    @property
    def has_grammar(self) -> bool:
        """Whether the generation is constrained by a grammar."""
        return bool(self.json_schema or self.regex)


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
    sampling: Sampling = Sampling()
    generated: tuple[int, ...] = ()
    adapter: AdapterId | None = None
    priority: int = 0
    arrived_s: float = 0.0

    def __post_init__(self) -> None:
        _check(bool(self.prompt), "The prompt is empty; give at least one token (a start token will do).")

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

    def __repr__(self) -> str:
        tokens = f"{len(self.prompt)}+{len(self.generated)}/{self.sampling.max_tokens}"
        adapter = f" adapter {self.adapter}" if self.adapter else ""
        return f"<Request {self.id} {self.model}{adapter} [tokens: {tokens}]>"


@dataclass(frozen=True, slots=True, kw_only=True)
class Token:
    """One generated token: its id, its `index` in the generation from 0, and the text that it completes.

    `text` is empty while a character or a possible stop string is still incomplete, and always empty for a
    model without a tokenizer. `finish_reason` is set on the last token only: `"stop"` for an end token or a
    stop string, `"length"` for `max_tokens` or the end of the context.
    """

    id: int
    index: int
    text: str = ""
    finish_reason: FinishReason | None = None
