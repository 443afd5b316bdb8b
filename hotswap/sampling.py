"""`Sampling`: how the tokens of a request are chosen, when it ends, and what it tells of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, TypeVar, cast

from hotswap.checks import (
    MAX_TOKEN_ID,
    check_unicode,
    is_set,
    shown,
    to_entries,
    to_flag,
    to_float,
    to_int,
    to_token_ids,
)
from hotswap.errors import InvalidRequest

__all__ = ["AS_MANY_AS_FIT", "MAX_ENTRIES", "Sampling", "to_sampling", "with_checked"]

AS_MANY_AS_FIT = MAX_TOKEN_ID
"""The `max_tokens` of a request that may fill the model's context."""

MAX_ENTRIES = 1024
"""The most entries of a list of tokens or words, and the most token ids of one forbidden word."""

_SEED_BITS = 64
_MAX_SAMPLES = 128
_MAX_LOGPROBS = 20
_MAX_STOPS, _MAX_STOP_CHARACTERS = 64, 1024
# A grammar takes up to 0.3 kB of memory for each of its characters.
_MAX_GRAMMAR_CHARACTERS = 1 << 17

T = TypeVar("T")


class _Remembered:
    """What is found out about sampling parameters once; no field, so it is neither compared nor pickled."""

    __slots__ = ("_largest_token",)
    _largest_token: int


@dataclass(frozen=True, slots=True, kw_only=True, init=False)
class Sampling(_Remembered):
    """How the tokens of a request are chosen, when it ends, and what it tells of them. Greedy by default.

    The token at position *n* of a request depends on its tokens, `seed` and *n* alone, never on the batch: a
    request that moves to another engine gets the same tokens.

    Arguments are taken as JSON gives them, too: lists for tuples, whole numbers for floats, `{id: bias}` for
    `logit_bias`, an object for `json_schema`, one string for `stop`. `None` is the default of each. Anything
    else of another type, NaN or out of range is an `InvalidRequest` that names the field. A fleet and its
    engines refuse token ids that the model does not have in the same way.

    Args:
        n: How many samples to draw, at most 128: the prompt is computed once, and each has a seed of its own,
            `seed` plus its number. More than one takes a temperature, since greedy samples are equal.
        max_tokens: Most tokens to generate; `None` asks for as many as fit the model's context.
        min_tokens: No stop of any kind fires before so many tokens, and no end token comes.
        temperature: 0 takes the most probable token; else logits are divided by it.
        top_k: Sample among the *k* most probable tokens, and those as probable as the last of them; 0 (or -1)
            is off.
        top_p: Sample among the fewest tokens whose probabilities reach *p* (Holtzman et al.,
            arXiv:1904.09751, section 3.1), after `top_k`; 1 is off.
        min_p: Sample among tokens at least *p* times as probable as the most probable one (Nguyen et al.,
            arXiv:2407.01082, section 3), after `top_p`; 0 is off.
        repetition_penalty: Divides the positive and multiplies the negative logits of every token so far,
            prompt included (Keskar et al., CTRL, arXiv:1909.05858, section 4.1); 1 is off.
        presence_penalty: Subtracted once from the logits of tokens that were generated.
        frequency_penalty: Subtracted from them once for each time.
        logit_bias: Pairs of a token and what is added to its logit, before all penalties.
        suppress_tokens: Tokens that never come.
        begin_suppress_tokens: Tokens that do not come first.
        forced_end_tokens: Of these one comes last where `max_tokens` ends the generation; each is as likely.
            `min_tokens` does not forbid that.
            Beside a grammar only those come that it allows there, and what it allows if there are none.
        bad_words: Texts whose tokens never come in a row; a fleet makes `bad_words_ids` of them.
        bad_words_ids: The same as token ids.
        seed: What chance depends on. `None` has the fleet draw one for each request; a completion tells it.
        stop: Texts that end the generation; they are cut from its text.
        stop_token_ids: Tokens that end it, beside the model's own end tokens.
        ignore_eos: Whether the model's own end tokens are ordinary ones.
        include_stop: Whether the text keeps the stop string, or the end token's text, that ended it.
        skip_special_tokens: Whether special tokens have no text.
        truncate_prompt_tokens: Keep only so many tokens of the prompt, its last; `None` keeps all.
        logprobs: How many of the most probable tokens are told at each position with their log-probabilities,
            beside the chosen token's; 0 tells the chosen one's alone, `None` nothing.
        prompt_logprobs: The same of the prompt's tokens, but for the first.
        logprobs_of: Whether log-probabilities are those of the model (`"raw"`) or of the distribution that
            tokens are sampled from (`"sampled"`): after biases, penalties, temperature and cuts, where tokens
            that cannot come have `-inf`. Those of prompts are always the model's.
        json_schema: The generation is JSON of this schema (its text, or a dict).
        regex: The generation matches this expression as a whole (Rust's syntax).
        grammar: The generation is a sentence of this grammar (Lark's syntax).

    With a grammar of any kind the model's own end tokens end the generation even with `ignore_eos`, since no
    text may follow. `max_tokens` may end it before. A schema as deep as `{"type": "object"}` asks for any
    JSON object. Simulated engines, which have no text, ignore grammars.
    """

    n: int
    max_tokens: int
    min_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: tuple[tuple[int, float], ...]
    suppress_tokens: tuple[int, ...]
    begin_suppress_tokens: tuple[int, ...]
    forced_end_tokens: tuple[int, ...]
    bad_words: tuple[str, ...]
    bad_words_ids: tuple[tuple[int, ...], ...]
    seed: int | None
    stop: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    ignore_eos: bool
    include_stop: bool
    skip_special_tokens: bool
    truncate_prompt_tokens: int | None
    logprobs: int | None
    prompt_logprobs: int | None
    logprobs_of: Literal["raw", "sampled"]
    json_schema: str
    regex: str
    grammar: str

    def __init__(
        self,
        *,
        n: int | None = 1,
        max_tokens: int | None = 128,
        min_tokens: int | None = 0,
        temperature: float | None = 0.0,
        top_k: int | None = 0,
        top_p: float | None = 1.0,
        min_p: float | None = 0.0,
        repetition_penalty: float | None = 1.0,
        presence_penalty: float | None = 0.0,
        frequency_penalty: float | None = 0.0,
        logit_bias: Mapping[int, float] | Mapping[str, float] | Sequence[tuple[int, float]] | None = (),
        suppress_tokens: Sequence[int] | None = (),
        begin_suppress_tokens: Sequence[int] | None = (),
        forced_end_tokens: Sequence[int] | None = (),
        bad_words: str | Sequence[str] | None = (),
        bad_words_ids: Sequence[Sequence[int]] | None = (),
        seed: int | None = None,
        stop: str | Sequence[str] | None = (),
        stop_token_ids: Sequence[int] | None = (),
        ignore_eos: bool | None = False,
        include_stop: bool | None = False,
        skip_special_tokens: bool | None = True,
        truncate_prompt_tokens: int | None = None,
        logprobs: int | None = None,
        prompt_logprobs: int | None = None,
        logprobs_of: Literal["raw", "sampled"] | None = "raw",
        json_schema: str | Mapping[str, Any] | None = "",
        regex: str | None = "",
        grammar: str | None = "",
    ) -> None:
        max_tokens = AS_MANY_AS_FIT if max_tokens is None else max_tokens
        put = object.__setattr__
        put(self, "n", to_int("n", 1 if n is None else n, 1, _MAX_SAMPLES))
        put(self, "max_tokens", to_int("max_tokens", max_tokens, 1, AS_MANY_AS_FIT))
        min_tokens = 0 if min_tokens is None else min_tokens
        put(self, "min_tokens", to_int("min_tokens", min_tokens, 0, self.max_tokens))
        put(self, "temperature", _number("temperature", temperature, 0.0, 0.0, 1e6))
        put(self, "top_k", max(to_int("top_k", 0 if top_k is None else top_k, -1, MAX_TOKEN_ID), 0))
        put(self, "top_p", _number("top_p", top_p, 1.0, 0.0, 1.0, above=True))
        put(self, "min_p", _number("min_p", min_p, 0.0, 0.0, 1.0))
        put(
            self,
            "repetition_penalty",
            _number("repetition_penalty", repetition_penalty, 1.0, 0.0, 1e6, above=True),
        )
        put(self, "presence_penalty", _number("presence_penalty", presence_penalty, 0.0, -2.0, 2.0))
        put(self, "frequency_penalty", _number("frequency_penalty", frequency_penalty, 0.0, -2.0, 2.0))
        put(self, "logit_bias", _biases(logit_bias))
        for name, ids in (
            ("suppress_tokens", suppress_tokens),
            ("begin_suppress_tokens", begin_suppress_tokens),
            ("forced_end_tokens", forced_end_tokens),
            ("stop_token_ids", stop_token_ids),
        ):
            put(self, name, to_token_ids(name, () if ids is None else ids, most=MAX_ENTRIES, ordered=False))
        if self.forced_end_tokens:  # the last token may end it, whatever comes before
            put(self, "min_tokens", min(self.min_tokens, self.max_tokens - 1))
        put(self, "bad_words", _texts("bad_words", bad_words, MAX_ENTRIES))
        put(self, "bad_words_ids", _words(bad_words_ids))
        put(self, "seed", None if seed is None else to_int("seed", seed, -(1 << 63), (1 << _SEED_BITS) - 1))
        put(self, "stop", _texts("stop", stop, _MAX_STOPS))
        put(self, "ignore_eos", to_flag("ignore_eos", ignore_eos, False))
        put(self, "include_stop", to_flag("include_stop", include_stop, False))
        put(self, "skip_special_tokens", to_flag("skip_special_tokens", skip_special_tokens, True))
        put(self, "truncate_prompt_tokens", _limit("truncate_prompt_tokens", truncate_prompt_tokens, 1))
        put(self, "logprobs", _limit("logprobs", logprobs, 0, _MAX_LOGPROBS))
        put(self, "prompt_logprobs", _limit("prompt_logprobs", prompt_logprobs, 0, _MAX_LOGPROBS))
        logprobs_of = "raw" if logprobs_of is None else logprobs_of
        put(self, "logprobs_of", _one_of("logprobs_of", logprobs_of, ("raw", "sampled")))
        put(self, "json_schema", _schema(json_schema))
        put(self, "regex", _grammar("regex", regex))
        put(self, "grammar", _grammar("grammar", grammar))
        if self.n > 1 and not self.is_random:
            raise InvalidRequest(
                f"n is {self.n} at temperature 0, where all samples are equal; give a temperature or n=1."
            )
        if sum(map(bool, (self.json_schema, self.regex, self.grammar))) > 1:
            raise InvalidRequest("json_schema, regex and grammar are given together; give one of them.")
        if self.has_grammar and self.min_tokens:
            raise InvalidRequest(
                f"min_tokens is {self.min_tokens} beside a grammar, which decides where a generation ends; "
                "give 0."
            )

    @property
    def has_grammar(self) -> bool:
        """Whether the generation is constrained by a grammar."""
        return bool(self.grammar_field[0])

    @property
    def grammar_field(self) -> tuple[str, str]:
        """The name of the field that has the grammar, and its value; two empty strings without one."""
        fields = ("json_schema", self.json_schema), ("regex", self.regex), ("grammar", self.grammar)
        return next((field for field in fields if field[1]), ("", ""))

    @property
    def token_ids(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """The fields that name token ids, and all ids of each."""
        return (
            ("logit_bias", tuple(token for token, _ in self.logit_bias)),
            ("suppress_tokens", self.suppress_tokens),
            ("begin_suppress_tokens", self.begin_suppress_tokens),
            ("forced_end_tokens", self.forced_end_tokens),
            ("bad_words_ids", tuple(token for word in self.bad_words_ids for token in word)),
            ("stop_token_ids", self.stop_token_ids),
        )

    @property
    def largest_token(self) -> int:
        """The largest token id that a field names, -1 without any; found once, as there may be a million."""
        try:
            return self._largest_token
        except AttributeError:
            largest = max((max(ids) for _, ids in self.token_ids if ids), default=-1)
            object.__setattr__(self, "_largest_token", largest)
            return largest

    @property
    def is_random(self) -> bool:
        """Whether its tokens depend on the seed."""
        return self.temperature > 0

    def sample(self, index: int) -> Sampling:
        """Return the parameters of the sample number `index` alone, which has a seed of its own.

        Log-probabilities of the prompt are told with the first sample.
        """
        if not index:
            return self if self.n == 1 else with_checked(self, n=1)
        seed = None if self.seed is None else (self.seed + index) % (1 << _SEED_BITS)
        return with_checked(self, n=1, seed=seed, prompt_logprobs=None)

    def __repr__(self) -> str:
        default = Sampling()
        names = (
            field.name for field in fields(self) if getattr(self, field.name) != getattr(default, field.name)
        )
        return f"Sampling({', '.join(f'{name}={shown(getattr(self, name))}' for name in names)})"


def to_sampling(value: object) -> Sampling:
    """Return sampling parameters, the default for `None`.

    Raises:
        InvalidRequest: it is none.
    """
    if value is None:
        return Sampling()
    if not isinstance(value, Sampling):
        raise InvalidRequest(f"sampling is {shown(value)}; give a Sampling, made of the same fields.")
    return value


def with_checked(sampling: Sampling, **values: Any) -> Sampling:
    """Return a copy with other values of fields that name no tokens, without checking any field again.

    Lists of token ids may be long, and a fleet makes a copy for each sample. The caller sees to it that
    `Sampling` would take the values as they are, each by itself and beside the other fields.
    """
    made, put = object.__new__(Sampling), object.__setattr__
    for field in fields(sampling):
        put(made, field.name, getattr(sampling, field.name))
    put(made, "_largest_token", sampling.largest_token)
    for name, value in values.items():
        put(made, name, value)
    return made


def _number(
    name: str, value: object, default: float, least: float, most: float, *, above: bool = False
) -> float:
    return to_float(name, default if value is None else value, least, most, above=above)


def _limit(name: str, value: object, least: int, most: int = MAX_TOKEN_ID) -> int | None:
    return None if value is None else to_int(name, value, least, most)


def _one_of(name: str, value: object, choices: tuple[str, ...]) -> str:
    if isinstance(value, str) and (choice := str.__str__(value)) in choices:
        return choice
    raise InvalidRequest(f"{name} is {shown(value)}; give {' or '.join(map(repr, choices))}.")


def _entries(
    name: str, value: object, what: str, most: int, parse: Callable[[str, object], T]
) -> tuple[T, ...]:
    entries = () if value is None else to_entries(name, value, f"a list of {what}", most)
    return tuple(parse(f"{name}[{at}]", entry) for at, entry in enumerate(entries))


def _texts(name: str, value: object, most: int) -> tuple[str, ...]:
    return _entries(name, (value,) if isinstance(value, str) else value, "strings", most, _text)


def _text(name: str, value: object) -> str:
    if not isinstance(value, str) or not value or len(value) > _MAX_STOP_CHARACTERS:
        raise InvalidRequest(
            f"{name} is {shown(value)}; give a string of 1 to {_MAX_STOP_CHARACTERS:,} characters."
        )
    check_unicode(name, value)
    return str.__str__(value)  # without the methods of a subclass


def _words(value: object) -> tuple[tuple[int, ...], ...]:
    return _entries("bad_words_ids", value, "lists of token ids", MAX_ENTRIES, _word)


def _word(name: str, value: object) -> tuple[int, ...]:
    ids = to_token_ids(name, value, most=MAX_ENTRIES)
    if not ids:
        raise InvalidRequest(f"{name} is empty; give at least one token id.")
    return ids


def _biases(value: object) -> tuple[tuple[int, float], ...]:
    if isinstance(value, Mapping):  # JSON's keys are strings
        value = [(_key(key), bias) for key, bias in cast("Mapping[object, object]", value).items()]
    biases = _entries(
        "logit_bias", value, "pairs of a token and what is added to its logit", MAX_ENTRIES, _bias
    )
    if len({token for token, _ in biases}) < len(biases):
        raise InvalidRequest("logit_bias names a token twice; give one bias for each.")
    return biases


def _key(key: object) -> object:
    return int(key) if isinstance(key, str) and key.isascii() and key.isdecimal() and len(key) < 12 else key


def _bias(name: str, value: object) -> tuple[int, float]:
    what = "a pair of a token id and a number"
    pair = () if is_set(value) else to_entries(name, value, what, 2)
    if len(pair) != 2:
        raise InvalidRequest(f"{name} is {shown(value)}; give {what}.")
    token, bias = pair
    return to_int(f"The token of {name}", token, 0, MAX_TOKEN_ID), to_float(name, bias, -100.0, 100.0)


def _schema(value: object) -> str:
    if isinstance(value, Mapping):
        try:
            value = json.dumps(dict(cast("Mapping[str, Any]", value)), ensure_ascii=False, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as exc:
            raise InvalidRequest(f"json_schema cannot be written as JSON: {shown(str(exc))}.") from exc
    if value is not None and not isinstance(value, str):
        raise InvalidRequest(f"json_schema is {shown(value)}; give an object, or its JSON text.")
    text = _grammar("json_schema", value)
    if text:
        try:
            parsed: object = json.loads(text)
        except (ValueError, RecursionError) as exc:
            raise InvalidRequest(f"json_schema is no JSON: {shown(str(exc))}.") from exc
        if not isinstance(parsed, dict):
            raise InvalidRequest(f"json_schema is {shown(text)}; give an object, or its JSON text.")
    return text


def _grammar(name: str, value: object) -> str:
    if value is None:
        return ""
    if not isinstance(value, str) or len(value) > _MAX_GRAMMAR_CHARACTERS:
        raise InvalidRequest(
            f"{name} is {shown(value)}; give a string of at most {_MAX_GRAMMAR_CHARACTERS:,} characters."
        )
    check_unicode(name, value)
    return str.__str__(value)  # without the methods of a subclass
