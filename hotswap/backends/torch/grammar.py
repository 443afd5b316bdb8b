"""JSON schemas, regular expressions and Lark grammars by llguidance: which tokens may come next.

The state of a grammar is a function of its text and the tokens so far. So a request that continues on another
engine has its tokens consumed anew, and gets the same masks.

Tested with llguidance 1.9.1.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import TYPE_CHECKING

from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from torch import Tensor

from hotswap.backends.tokenizer import HfTokenizer
from hotswap.backends.torch.masks import Constraint
from hotswap.errors import InvalidRequest
from hotswap.sampling import Sampling

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

__all__ = ["Grammar", "GrammarCompiler"]

_MAX_MESSAGE = 300
# A state of a lexer takes one or two kB.
_MAX_STATES, _MAX_SHARED_STATES = 50_000, 4_000
_MAX_KEPT, _MAX_KEPT_CHARACTERS = 32, 1 << 18
# A small model may write blanks for ever where any number may stand: here a line break and an indent at most.
_JSON: JsonCompileOptions = {"whitespace_pattern": r"\n?[ \t]{0,32}"}


@dataclass(frozen=True, slots=True, eq=False)
class _Source:
    """A grammar in the library's form, and where it comes from.

    Attributes:
        tokenizer: The library's form of the tokenizer.
        vocabulary: The number of token ids.
        field: The field of `Sampling` that it comes from, for errors.
        text: The grammar.
    """

    tokenizer: LLTokenizer
    vocabulary: int
    field: str
    text: str

    def matcher(self, generated: Sequence[int] = (), *, max_states: int = _MAX_STATES) -> LLMatcher:
        """Compile it, and consume tokens; what failed is an error of the matcher."""
        limits = LLParserLimits(max_lexer_states=max_states, verbose_errors=False)
        matcher = LLMatcher(self.tokenizer, self.text, log_level=0, limits=limits)
        if generated and not matcher.is_error():
            matcher.consume_tokens(list(generated))
        return matcher


class Grammar(Constraint):
    """The grammar of one request and its state.

    Requests of one grammar share the states of its lexer, which are made as they are needed and limited in
    number. Where they reach the limit, a request goes on with states of its own: what others have generated
    never ends it.

    Args:
        source: The grammar.
        matcher: Its state after `generated`.
        generated: The tokens that the request has generated.
        shared: Whether the matcher shares its lexer with others.
    """

    def __init__(
        self, source: _Source, matcher: LLMatcher, generated: Sequence[int], *, shared: bool
    ) -> None:
        super().__init__(source.vocabulary)
        self._source, self._matcher, self._shared = source, matcher, shared
        self._consumed = list(generated)
        self._new: deque[int] = deque()  # not consumed yet: only `fill` uses the matcher

    def add_token(self, token: int) -> None:
        self._new.append(token)

    def fill(self, words: Tensor) -> None:
        while self._new:
            self._consumed.append(token := self._new.popleft())
            self._matcher.consume_token(token)
        self._compute(words)
        if self._shared and self._matcher.is_error():
            self._shared = False
            self._matcher = self._source.matcher(self._consumed)
            self._compute(words)
        if self._matcher.is_error():
            reason = _first(self._matcher.get_error())
            raise InvalidRequest(f"{self._source.field} cannot be followed further: {reason}.")

    def _compute(self, words: Tensor) -> None:
        if not self._matcher.is_error():
            self._matcher.unsafe_compute_mask_ptr(words.data_ptr(), words.numel() * words.element_size())


class GrammarCompiler:
    """Makes grammars for the tokenizer of a model. Threads may share it.

    Making one takes about a second for a vocabulary of 128,000 tokens.

    Args:
        tokenizer: The tokenizer.
        vocabulary: The number of token ids that the model has logits for.
        end_ids: The model's end tokens, which may come where the grammar is complete.

    Attributes:
        tokenizer: The library's form of the tokenizer.

    Raises:
        InvalidRequest: the library cannot use the tokenizer, or it has none of the end tokens.
    """

    def __init__(self, tokenizer: HfTokenizer, vocabulary: int, end_ids: Collection[int]) -> None:
        known = sorted(token for token in end_ids if tokenizer.piece(token) is not None)
        if not known:
            raise InvalidRequest(
                "The model's tokenizer has none of its end tokens, so a grammar could not end."
            )
        self._num_ids = max(vocabulary, tokenizer.num_ids)
        try:
            self.tokenizer = LLTokenizer(tokenizer.text, n_vocab=self._num_ids, eos_token=known)
        except ValueError as exc:
            raise InvalidRequest(f"Grammars cannot be used with the model's tokenizer: {exc}.") from exc
        self._kept: OrderedDict[tuple[str, str], _Compiled] = OrderedDict()
        self._lock = Lock()

    def compile(self, sampling: Sampling, generated: Sequence[int]) -> Grammar:
        """Return the grammar of a request after the tokens that it has generated elsewhere.

        The grammars that were used last are kept compiled. The library's limits bound its time and memory.

        Raises:
            InvalidRequest: the grammar is invalid or too complex, or the tokens are not of it.
        """
        field, value = sampling.grammar_field
        compiled = self._compiled(field, value)
        matcher = compiled.first.deep_copy()
        if generated and not matcher.is_error():
            matcher.consume_tokens(list(generated))
        if not matcher.is_error():
            return Grammar(compiled.source, matcher, generated, shared=True)
        matcher = self.matcher(field, value, generated)
        return Grammar(compiled.source, matcher, generated, shared=False)

    def matcher(self, field: str, value: str, generated: Sequence[int]) -> LLMatcher:
        """Return the state of a grammar after tokens, with a lexer of its own: for engines that keep it.

        Args:
            field: The field of `Sampling` that it comes from.
            value: The field's value.
            generated: The tokens.

        Raises:
            InvalidRequest: the grammar is invalid or too complex, or the tokens are not of it.
        """
        matcher = self._compiled(field, value).source.matcher(generated)
        if matcher.is_error():
            raise InvalidRequest(f"The tokens so far are not of {field}: {_first(matcher.get_error())}.")
        return matcher

    def _compiled(self, field: str, value: str) -> _Compiled:
        with self._lock:
            if (found := self._kept.get((field, value))) is not None:
                self._kept.move_to_end((field, value))
                return found
        try:
            source = _Source(self.tokenizer, self._num_ids, field, _to_text(field, value))
        except ValueError as exc:
            raise InvalidRequest(f"{field} cannot be used: {_first(str(exc))}.") from exc
        first = source.matcher(max_states=_MAX_SHARED_STATES)
        if first.is_error():
            alone = source.matcher()
            if alone.is_error():
                raise InvalidRequest(f"{field} cannot be used: {_first(alone.get_error())}.")
        compiled = _Compiled(source, first)
        with self._lock:
            self._kept[field, value] = compiled
            while len(self._kept) > _MAX_KEPT or sum(map(_size, self._kept)) > _MAX_KEPT_CHARACTERS:
                self._kept.popitem(last=False)
        return compiled


@dataclass(frozen=True, slots=True, eq=False)
class _Compiled:
    """A grammar and its first matcher, which is only copied: copies share its lexer."""

    source: _Source
    first: LLMatcher


def _to_text(name: str, value: str) -> str:
    if name == "json_schema":
        return LLMatcher.grammar_from_json_schema(value, defaults=_JSON)
    return LLMatcher.grammar_from_regex(value) if name == "regex" else LLMatcher.grammar_from_lark(value)


def _first(message: str) -> str:
    """Return the message of the library on one line, without the state of the parser."""
    line = " ".join(message.partition("\n<")[0].split()).rstrip(".")
    return line if len(line) <= _MAX_MESSAGE else f"{line[:_MAX_MESSAGE]}..."


def _size(key: tuple[str, str]) -> int:
    return len(key[1])
