"""Text at the edge: what a tokenizer must offer, and the text that leaves a stream token by token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

__all__ = ["TextStream", "Tokenizer"]

_UNFINISHED = "\N{REPLACEMENT CHARACTER}"


@runtime_checkable
class Tokenizer(Protocol):
    """Text to token ids and back."""

    def encode(self, text: str) -> Sequence[int]:
        """Return the token ids of `text`, start tokens included where the model wants them."""
        ...

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of `tokens`, special tokens left out, incomplete characters as U+FFFD."""
        ...


class TextStream:
    """Turns tokens into text as they come, and says when a stop string is complete.

    Holds back what may still change: a character split over tokens, and the beginning of a possible stop
    string. The text released is, put together, the decoded generation up to the stop string that is complete
    first, however the tokens split it; nothing is ever taken back. Because it is fed from the request's
    journal it goes on unchanged when the request moves to another instance.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        prompt: Sequence[int] = (),
        stop: Sequence[str] = (),
        min_tokens: int = 0,
    ) -> None:
        self._characters = _Characters(tokenizer, prompt)
        self._stop = tuple(stop)
        self._min_tokens = min_tokens
        self._held = ""
        self._num_tokens = 0
        self.stopped = False

    def push(self, token: int, *, last: bool = False) -> str:
        """Take the next token and return the text that is now certain; `last` releases all that is held.

        Once a stop string is complete `stopped` is true; the stop string and what follows it is dropped.
        One that is complete within the first `min_tokens` tokens is text like any other.
        """
        if self.stopped:
            return ""
        self._num_tokens += 1
        self._held += self._characters.push(token, last=last)
        end = self._find_stop()
        self.stopped = end is not None
        if end is None:
            end = len(self._held) if last else len(self._held) - self._possible_stop()
        text, self._held = self._held[:end], self._held[end:]
        return text

    def _find_stop(self) -> int | None:
        """Where the stop string begins that is complete first; of those that end together the longest."""
        if self._num_tokens <= self._min_tokens:
            return None
        found = [(at + len(stop), at) for stop in self._stop if (at := self._held.find(stop)) >= 0]
        return min(found)[1] if found else None

    def _possible_stop(self) -> int:
        """Length of the longest end of the held text that a stop string begins with, and goes on from."""
        longest = max((len(stop) - 1 for stop in self._stop), default=0)
        for length in range(min(longest, len(self._held)), 0, -1):
            end = self._held[-length:]
            if any(len(stop) > length and stop.startswith(end) for stop in self._stop):
                return length
        return 0


class _Characters:
    """Decodes tokens one by one into whole characters, each in the light of a few tokens before it.

    `_context` is the last group of tokens that made up whole characters: without it a decoder would take the
    next token for the first of a text and strip its space, and bytes that continue a run of byte tokens would
    be decoded apart from it. `_pending` are the tokens since, `_shown` what was released of their text.

    Where a run of byte tokens (as of SentencePiece) turns out not to be UTF-8, some decoders show every byte
    of it as U+FFFD, also the characters that were whole before; here those stay as they were released.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int]) -> None:
        self._decode = tokenizer.decode
        tail = self._tail(prompt)
        split = self._last_whole(tail)
        self._context, self._pending = tail[:split], tail[split:]
        self._before = self._decode(self._context)
        self._shown = self._text()

    def push(self, token: int, *, last: bool) -> str:
        """Take a token and return the characters that no later token will change; all of them if `last`."""
        self._pending.append(token)
        text = self._text()
        whole = last or not text.endswith(_UNFINISHED)
        # One character is at most four bytes. With more tokens than that only the last of them is open.
        end = len(text) if whole else len(text) - 1 if len(self._pending) > _MOST_PENDING else 0
        new = text[_common(self._shown, text) : end]
        self._shown = text[:end] if new else self._shown
        if whole:
            self._settle(text)
        elif len(self._pending) > _MOST_GARBAGE:
            self._forget()
        return new

    def _text(self) -> str:
        """The text of the pending tokens."""
        text = self._decode(self._context + self._pending)
        if text.startswith(self._before):
            return text[len(self._before) :]
        # What follows has changed how the context reads: a run of byte tokens is no UTF-8, or not yet.
        return self._decode(self._pending)

    def _settle(self, text: str) -> None:
        """Let the pending tokens be the context of the next."""
        if text:
            self._context = self._pending
        elif not self._before:
            self._context = self._context + self._pending
        # Else they are special tokens, which leave no trace: the context stays what showed something last.
        self._before = self._decode(self._context)
        self._pending, self._shown = [], ""

    def _forget(self) -> None:
        """Shorten a long run of bytes that are no text; a few are enough to tell the next character."""
        self._context = self._pending[-2 * _MOST_PENDING : -_MOST_PENDING]
        self._pending = self._pending[-_MOST_PENDING:]
        self._before = self._decode(self._context)
        self._shown = self._text()[:-1]

    def _tail(self, prompt: Sequence[int]) -> list[int]:
        """As many of the last tokens as begin with a whole character and show something."""
        length = _CONTEXT
        while length < len(prompt):
            text = self._decode(prompt[-length:])
            if text.strip(_UNFINISHED) and not text.startswith(_UNFINISHED):
                break
            length *= 2
        return list(prompt[-length:])

    def _last_whole(self, tokens: list[int]) -> int:
        """How many tokens there are up to the end of the last whole character, if it is near."""
        least = max(len(tokens) - _MOST_GARBAGE, 0)
        ends = range(len(tokens), least, -1)
        return next((end for end in ends if not self._decode(tokens[:end]).endswith(_UNFINISHED)), least)


def _common(one: str, other: str) -> int:
    """Length of the common beginning of two texts."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((n for n, (a, b) in pairs if a != b), min(len(one), len(other)))


_CONTEXT = 8
_MOST_PENDING = 3
_MOST_GARBAGE = 16
