"""JSON schemas, regular expressions and Lark grammars by llguidance: which tokens may come next.

The state of a grammar is a function of its text and the tokens so far. So a request that continues on another
engine has its tokens consumed anew, and gets the same masks.

Tested with llguidance 1.9.1.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
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
# A small model may write blanks for ever where any number may stand: here a line break and an indent at most.
_JSON: JsonCompileOptions = {"whitespace_pattern": r"\n?[ \t]{0,32}"}


class Grammar(Constraint):
    """The grammar of one request and its state.

    Args:
        matcher: Its state, without the tokens that the request has generated.
        vocabulary: The number of token ids.
        name: The field of `Sampling` that it comes from, for errors.
    """

    def __init__(self, matcher: LLMatcher, vocabulary: int, name: str) -> None:
        super().__init__(vocabulary)
        self._matcher, self._name = matcher, name
        self._new: deque[int] = deque()  # not consumed yet: only `fill` uses the matcher

    def add_token(self, token: int) -> None:
        self._new.append(token)

    def fill(self, words: Tensor) -> None:
        matcher = self._matcher
        while self._new:
            matcher.consume_token(self._new.popleft())
        if not matcher.is_error():
            matcher.unsafe_compute_mask_ptr(words.data_ptr(), words.numel() * words.element_size())
        if matcher.is_error():
            raise InvalidRequest(f"{self._name} cannot be followed further: {_first(matcher.get_error())}.")


class GrammarCompiler:
    """Makes grammars for the tokenizer of a model. Threads may share it.

    Making one takes about a second for a vocabulary of 128,000 tokens.

    Args:
        tokenizer: The tokenizer.
        vocabulary: The number of token ids that the model has logits for.
        end_ids: The model's end tokens, which may come where the grammar is complete.

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
            self._tokenizer = LLTokenizer(tokenizer.text, n_vocab=self._num_ids, eos_token=known)
        except ValueError as exc:
            raise InvalidRequest(f"Grammars cannot be used with the model's tokenizer: {exc}.") from exc
        self._limits = LLParserLimits(max_lexer_states=50_000, verbose_errors=False)

    def compile(self, sampling: Sampling, generated: Sequence[int]) -> Grammar:
        """Return the grammar of a request after the tokens that it has generated elsewhere.

        The library's limits bound its time and memory.

        Raises:
            InvalidRequest: the grammar is invalid or too complex, or the tokens are not of it.
        """
        name = next(field for field in ("json_schema", "regex", "grammar") if getattr(sampling, field))
        try:
            text = _to_text(name, getattr(sampling, name))
        except ValueError as exc:
            raise InvalidRequest(f"{name} cannot be used: {_first(str(exc))}.") from exc
        matcher = LLMatcher(self._tokenizer, text, log_level=0, limits=self._limits)
        if matcher.is_error():
            raise InvalidRequest(f"{name} cannot be used: {_first(matcher.get_error())}.")
        if generated and not matcher.consume_tokens(list(generated)):
            raise InvalidRequest(f"The tokens so far are not of {name}: {_first(matcher.get_error())}.")
        return Grammar(matcher, self._num_ids, name)


def _to_text(name: str, value: str) -> str:
    if name == "json_schema":
        return LLMatcher.grammar_from_json_schema(value, defaults=_JSON)
    return LLMatcher.grammar_from_regex(value) if name == "regex" else LLMatcher.grammar_from_lark(value)


def _first(message: str) -> str:
    """Return the message of the library on one line, without the state of the parser."""
    line = " ".join(message.partition("\n<")[0].split()).rstrip(".")
    return line if len(line) <= _MAX_MESSAGE else f"{line[:_MAX_MESSAGE]}..."
