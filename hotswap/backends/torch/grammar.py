"""JSON schemas, regular expressions and Lark grammars by llguidance: which tokens may come next.

The state of a grammar is a function of its text and the tokens so far. So a request that continues on another
engine has its tokens consumed anew, and gets the same masks.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Generic, TypeAlias, TypeVar

import numpy as np
import torch
from torch import Tensor

from hotswap.backends.grammars import (
    LEXER,
    MAX_STATES,
    LLMatcher,
    LLTokenizer,
    first_line,
    limits,
    on_deep_stack,
    refusal,
    to_text,
)
from hotswap.backends.tokenizer import HfTokenizer
from hotswap.backends.torch.masks import Constraint
from hotswap.errors import InvalidRequest
from hotswap.sampling import Sampling

__all__ = ["Grammar", "GrammarCompiler"]

_MAX_SHARED_STATES = 4_000
_MAX_KEPT, _MAX_KEPT_CHARACTERS = 32, 1 << 18

_Key: TypeAlias = "tuple[str, str]"
T = TypeVar("T")


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

    def matcher(self, generated: Sequence[int] = (), *, max_states: int = MAX_STATES) -> LLMatcher:
        """Compile it, and consume tokens; what failed is an error of the matcher."""
        matcher = on_deep_stack(
            lambda: LLMatcher(self.tokenizer, self.text, log_level=0, limits=limits(max_states))
        )
        if generated and not matcher.is_error():
            matcher.consume_tokens(list(generated))
        return matcher

    def refusal(self, matcher: LLMatcher) -> InvalidRequest:
        """Return the error of a request whose matcher has failed."""
        return refusal(self.field, matcher.get_error())


class Grammar(Constraint):
    """The grammar of one request and its state.

    Requests of one grammar share the states of its lexer, which are made as they are needed and limited in
    number. Where they reach the limit, a request goes on with states of its own: what others have generated
    never ends it.

    Args:
        source: The grammar.
        matcher: Its state at the beginning, or its error.
        generated: The tokens that the request has generated.
        shared: Whether the matcher shares its lexer with others.
    """

    def __init__(
        self,
        source: _Source,
        matcher: LLMatcher,
        generated: Sequence[int] = (),
        *,
        shared: bool,
    ) -> None:
        super().__init__(source.vocabulary)
        self._source, self._matcher, self._shared = source, matcher, shared
        self._consumed: list[int] = []
        self._new = deque(generated)  # not consumed yet: only `prepare` and `fill` use the matcher
        self._ready: Tensor | None = None  # the next mask

    def prepare(self) -> Grammar:
        """Compute the mask of the next token for `fill`, before a step asks for it.

        Raises:
            InvalidRequest: the grammar matches no text or is too complex, or the tokens are not of it.
        """
        generated, words = bool(self._new), self._empty()
        self._consume()
        if generated and self._matcher.is_error() and not _failed_lexer(self._matcher):
            reason = first_line(self._matcher.get_error())
            raise InvalidRequest(f"The tokens so far are not of {self._source.field}: {reason}.")
        self._advance(words)
        if self._shared and _failed_lexer(self._ahead(words)):
            self._go_alone()
            self._advance(words)
        if (ahead := self._ahead(words)).is_error():
            raise self._source.refusal(ahead)
        self._ready = words
        return self

    def add_token(self, token: int) -> None:
        self._new.append(token)

    def fill(self, words: Tensor) -> None:
        if self._ready is not None and not self._new:
            words.copy_(self._ready)
            return
        self._ready = None
        self._advance(words)

    def _advance(self, words: Tensor) -> None:
        self._consume()
        self._compute(words)
        if self._shared and _failed_lexer(self._matcher):
            self._go_alone()
            self._compute(words)
        if self._matcher.is_error():
            raise self._source.refusal(self._matcher)

    def _go_alone(self) -> None:
        self._shared = False
        # Forced text that is too long fails a token late: so the last two get the fuel of a mask, which it
        # has from the first mask on, not that to compile.
        self._matcher = self._source.matcher(self._consumed[:-2])
        self._compute(self._empty())
        for token in self._consumed[-2:]:
            self._matcher.consume_token(token)

    def _ahead(self, words: Tensor) -> LLMatcher:
        """Return the state after the next token if there is one choice, else this one.

        A grammar that forces more text than can be followed fails only there.
        """
        packed = words.numpy().view(np.uint8)
        allowed = np.flatnonzero(np.unpackbits(packed, count=self.vocabulary, bitorder="little"))
        if len(allowed) != 1:
            return self._matcher
        ahead = self._matcher.deep_copy()
        ahead.consume_token(int(allowed[0]))
        return ahead

    def _empty(self) -> Tensor:
        return torch.zeros(-(-self.vocabulary // 32), dtype=torch.int32)

    def _consume(self) -> None:
        while self._new:
            self._consumed.append(token := self._new.popleft())
            self._matcher.consume_token(token)

    def _compute(self, words: Tensor) -> None:
        if not self._matcher.is_error():
            self._matcher.unsafe_compute_mask_ptr(words.data_ptr(), words.numel() * words.element_size())


class _Recent(Generic[T]):
    """What was made of the grammars that were used last, limited in number and in characters of all."""

    def __init__(self) -> None:
        self._kept: OrderedDict[_Key, T] = OrderedDict()

    def find(self, key: _Key) -> T | None:
        if key in self._kept:
            self._kept.move_to_end(key)
        return self._kept.get(key)

    def keep(self, key: _Key, made: T) -> None:
        self._kept[key] = made
        while len(self._kept) > _MAX_KEPT or sum(len(text) for _, text in self._kept) > _MAX_KEPT_CHARACTERS:
            self._kept.popitem(last=False)

    def __iter__(self) -> Iterator[_Key]:
        return iter(self._kept)

    def __len__(self) -> int:
        return len(self._kept)


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
        self._kept: _Recent[_Compiled] = _Recent()
        self._refused: _Recent[str] = _Recent()
        self._lock = Lock()

    def compile(self, sampling: Sampling, generated: Sequence[int]) -> Grammar:
        """Return the grammar of a request after the tokens so far, with its next mask.

        The grammars that were used last are kept compiled, and those that were refused last are remembered.
        The library's limits bound its time and memory.

        Raises:
            InvalidRequest: the grammar is invalid, too complex or empty, or the tokens are not of it.
            InstanceError: the process has no thread to compile it in.
        """
        field, value = sampling.grammar_field
        compiled = self._compiled(field, value)
        return _begin(compiled.source, compiled.first, generated)

    def matcher(self, field: str, value: str, generated: Sequence[int]) -> LLMatcher:
        """Return the state of a grammar after tokens, with a lexer of its own: for engines that keep it.

        Args:
            field: The field of `Sampling` that it comes from.
            value: The field's value.
            generated: The tokens.

        Raises:
            InvalidRequest: the grammar is invalid, too complex or empty, or the tokens are not of it.
            InstanceError: the process has no thread to compile it in.
        """
        matcher = self._compiled(field, value).source.matcher(generated)
        if matcher.is_error():
            raise InvalidRequest(f"The tokens so far are not of {field}: {first_line(matcher.get_error())}.")
        return matcher

    def _compiled(self, field: str, value: str) -> _Compiled:
        key = field, value
        with self._lock:
            if (found := self._kept.find(key)) is not None:
                return found
            if (reason := self._refused.find(key)) is not None:
                raise InvalidRequest(reason)
        try:
            compiled = self._make(field, value)
        except InvalidRequest as exc:
            with self._lock:
                self._refused.keep(key, str(exc))
            raise
        with self._lock:
            self._kept.keep(key, compiled)
        return compiled

    def _make(self, field: str, value: str) -> _Compiled:
        """Compile a grammar and compute its first mask."""
        try:
            source = _Source(self.tokenizer, self._num_ids, field, to_text(field, value))
        except ValueError as exc:
            raise refusal(field, str(exc)) from exc
        first = source.matcher(max_states=_MAX_SHARED_STATES)
        _begin(source, first)
        return _Compiled(source, first)


@dataclass(frozen=True, slots=True, eq=False)
class _Compiled:
    """A grammar and its first matcher, which is only copied: copies share its lexer."""

    source: _Source
    first: LLMatcher


def _begin(source: _Source, first: LLMatcher, generated: Sequence[int] = ()) -> Grammar:
    """Return a grammar that shares the lexer of `first`, unless that is too large for it."""
    if first.is_error():
        return Grammar(source, source.matcher(), generated, shared=False).prepare()
    return Grammar(source, first.deep_copy(), generated, shared=True).prepare()


def _failed_lexer(matcher: LLMatcher) -> bool:
    return LEXER in matcher.get_error()
