"""Text of models: `Tokenizer`, `ChatTemplate`, and `TextStream`, which decodes and finds stop strings."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, runtime_checkable

from hotswap.chat import Chat

__all__ = [
    "ChatTemplate",
    "SupportsLeastTokens",
    "SupportsLiteralText",
    "SupportsSource",
    "TextSettings",
    "TextStream",
    "Tokenizer",
]

_UNFINISHED = "\N{REPLACEMENT CHARACTER}"


@runtime_checkable
class Tokenizer(Protocol):
    """Text to token ids and back."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> Sequence[int]:
        """Return the token ids of `text`; called in worker threads, several at a time.

        With `add_special_tokens` those that the model wants around it are added (a start token, mostly), but
        for start tokens that the text begins with.
        """
        ...

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of `tokens`, special ones left out by default, incomplete characters as U+FFFD."""
        ...


@runtime_checkable
class SupportsLeastTokens(Protocol):
    """Tells that a text is too long without encoding it; an optional ability of a `Tokenizer`."""

    def least_tokens(self, text: str) -> int:
        """Return a number of tokens that `text` surely has, 0 if none is known; called in worker threads.

        It takes no longer for a longer text.
        """
        ...


@runtime_checkable
class ChatTemplate(Protocol):
    """Writes conversations as a model has learnt to read them."""

    def render(self, chat: Chat) -> str:
        """Return the text of `chat`, with the start token if the model wants one; called in worker threads.

        Time and memory that it takes are bounded, whatever the messages say.

        Raises:
            InvalidRequest: the template refuses the messages, or takes too long or too much for them.
        """
        ...


@runtime_checkable
class SupportsSource(Protocol):
    """Tells what it may write; an optional ability of a `ChatTemplate`."""

    @property
    def source(self) -> str:
        """The text that the template is made of."""
        ...


@runtime_checkable
class SupportsLiteralText(Protocol):
    """Keeps what clients write from becoming control tokens; an optional ability of a `Tokenizer`."""

    def guarding(self, template: ChatTemplate) -> ChatTemplate:
        """Return a template that writes the same, in texts of which `encode` knows who has written what.

        What the messages, tools and documents of a chat have is encoded as text, also what reads like a
        control token or is made to be a part of one. The texts have to go to `encode` as they are. It is
        called in a worker thread, and may take as long as reading a tokenizer.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TextSettings:
    """What the files beside weights say of text.

    Attributes:
        tokenizer: That of an adapter which has one of its own; `None` if it is the model's.
        chat_template: How conversations are written; `None` if that is not said.
        generation_config: The model's own sampling parameters, by transformers' names.
    """

    tokenizer: Tokenizer | None = None
    chat_template: ChatTemplate | None = None
    generation_config: Mapping[str, Any] = field(default_factory=dict[str, Any])


class TextStream:
    """Decodes tokens as they arrive, and detects stop strings.

    Text that may still change is held back: an incomplete character, and the beginning of a possible stop
    string. The released texts, joined, are the decoded generation up to the first complete stop string,
    however the tokens split it; released text is never changed. The stream is fed from the request's journal,
    so it continues unchanged when the request moves to another instance.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        prompt: Sequence[int] = (),
        stop: Sequence[str] = (),
        min_tokens: int = 0,
        include_stop: bool = False,
        skip_special_tokens: bool = True,
    ) -> None:
        self._characters = _Characters(
            partial(tokenizer.decode, skip_special_tokens=skip_special_tokens), prompt
        )
        self._stop = tuple(stop)
        self._min_tokens = min_tokens
        self._include_stop = include_stop
        self._held = ""
        self._num_unstoppable = 0  # how much of the held text came with the first `min_tokens` tokens
        self._num_tokens = 0
        self.matched_stop: str | None = None

    @property
    def stopped(self) -> bool:
        """Whether a stop string is complete."""
        return self.matched_stop is not None

    def push(self, token: int, *, last: bool = False, is_end: bool = False) -> str:
        """Add the next token and return the text that is now final; `last` releases all held text.

        Once a stop string is complete, `matched_stop` names it; all text after it is dropped, and so is the
        stop string itself unless `include_stop`. One that is complete within the first `min_tokens` tokens is
        ordinary text. A token that `is_end` has ended the generation; its own text is dropped likewise.
        """
        if self.stopped:
            return ""
        if not self._stop:  # no text is held back
            if is_end and not self._include_stop:
                return self._characters.flush()
            return self._characters.push(token, last=last or is_end)
        self._num_tokens += 1
        if is_end and not self._include_stop:
            self._held += self._characters.flush()
        else:
            self._held += self._characters.push(token, last=last or is_end)
        end = self._find_stop()
        if end is None:
            end = len(self._held) if last or is_end else len(self._held) - self._possible_stop()
        text, self._held = self._held[:end], self._held[end:]
        may_stop = self._num_tokens > self._min_tokens
        self._num_unstoppable = max(0, self._num_unstoppable - end) if may_stop else len(self._held)
        return text

    def _find_stop(self) -> int | None:
        """Where the text ends: at the stop string that ends first, of those that end together the longest."""
        if self._num_tokens <= self._min_tokens:
            return None
        least = self._num_unstoppable + 1  # where one may end
        found = [
            (at + len(stop), at, stop)
            for stop in self._stop
            if (at := self._held.find(stop, max(0, least - len(stop)))) >= 0
        ]
        if not found:
            return None
        end, start, self.matched_stop = min(found)
        return end if self._include_stop else start

    def _possible_stop(self) -> int:
        """Length of the longest suffix of the held text that is a proper prefix of a stop string."""
        longest = max((len(stop) - 1 for stop in self._stop), default=0)
        for length in range(min(longest, len(self._held)), 0, -1):
            end = self._held[-length:]
            if any(len(stop) > length and stop.startswith(end) for stop in self._stop):
                return length
        return 0


class _Characters:
    """Decodes tokens one by one into whole characters, each with a few tokens before it as context.

    `_context` is the last group of tokens that made up whole characters. Without it a decoder would strip the
    space of the next token, as at the start of a text, and would decode a run of byte tokens in parts.
    `_pending` are the tokens after it, `_shown` is the part of their text that was released.

    If a run of byte tokens (as of SentencePiece) is not UTF-8, some decoders show each of its bytes as
    U+FFFD, also of characters that were complete before; those stay as they were released.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], prompt: Sequence[int]) -> None:
        self._decode = decode
        tail = self._context_of(prompt)
        split = self._last_whole(tail)
        self._context, self._pending = tail[:split], tail[split:]
        self._before = self._decode(self._context)
        self._shown = self._text()

    def push(self, token: int, *, last: bool) -> str:
        """Add a token and return the characters that no later token can change; all of them if `last`."""
        self._pending.append(token)
        text = self._text()
        whole = last or not text.endswith(_UNFINISHED)
        # One character is at most four bytes. With more tokens than that only the last of them is open.
        end = len(text) if whole else len(text) - 1 if len(self._pending) > _MOST_PENDING else 0
        new = text[_common(self._shown, text) : end]
        self._shown = text[:end] if new else self._shown
        if whole:
            self._become_context(text)
        elif len(self._pending) > _MOST_GARBAGE:
            self._shorten()
        return new

    def flush(self) -> str:
        """Return what was held back of the tokens so far."""
        text = self._text()
        new, self._shown = text[_common(self._shown, text) :], text
        return new

    def _text(self) -> str:
        """The text of the pending tokens."""
        text = self._decode(self._context + self._pending)
        if text.startswith(self._before):
            return text[len(self._before) :]
        # The new tokens change the text of the context: a run of byte tokens is not UTF-8, or incomplete.
        return self._decode(self._pending)

    def _become_context(self, text: str) -> None:
        """Make the pending tokens the context of the next ones."""
        if text:
            self._context = self._pending
        elif not self._before:
            self._context = self._context + self._pending
        # Else they are special tokens without text: the context stays the last group with text.
        self._before = self._decode(self._context)
        self._pending, self._shown = [], ""

    def _shorten(self) -> None:
        """Shorten a long run of bytes that are no text; a few are enough to decode the next character."""
        self._context = self._pending[-2 * _MOST_PENDING : -_MOST_PENDING]
        self._pending = self._pending[-_MOST_PENDING:]
        self._before = self._decode(self._context)
        self._shown = self._text()[:-1]

    def _context_of(self, prompt: Sequence[int]) -> list[int]:
        """The last tokens of the prompt, so many that they begin with a whole character and have text.

        If the last 64 have none, they are those that may be an incomplete character: the text begins anew.
        """
        for length in _CONTEXTS:
            if length >= len(prompt):
                return list(prompt)
            if self._is_context(prompt[-length:]):
                return list(prompt[-length:])
        # A long run of byte tokens that ends within a character: some decoders show none of it.
        for length in _CONTEXTS[-_MOST_BYTES:]:
            if any(self._is_context(prompt[-length:-cut]) for cut in range(1, _MOST_BYTES)):
                return list(prompt[-length:])
        return list(prompt[-_MOST_PENDING:])

    def _is_context(self, tokens: Sequence[int]) -> bool:
        """Whether tokens begin with a whole character and have text."""
        text = self._decode(tokens)
        return bool(text.strip(_UNFINISHED)) and not text.startswith(_UNFINISHED)

    def _last_whole(self, tokens: list[int]) -> int:
        """The number of tokens up to the end of the last whole character, if it is near."""
        least = max(len(tokens) - _MOST_GARBAGE, 0)
        ends = range(len(tokens), least, -1)
        return next((end for end in ends if not self._decode(tokens[:end]).endswith(_UNFINISHED)), least)


def _common(one: str, other: str) -> int:
    """Length of the common prefix of two texts."""
    if not one:
        return 0
    pairs = enumerate(zip(one, other, strict=False))
    return next((n for n, (a, b) in pairs if a != b), min(len(one), len(other)))


_MOST_BYTES = 4
# One of as many lengths in a row as a character has bytes begins with a whole one. The last bounds what is
# decoded for a prompt, however long it is.
_CONTEXTS = (8, 16, 32, 61, 62, 63, 64)
_MOST_PENDING = 3
_MOST_GARBAGE = 16
