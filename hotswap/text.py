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
    string. The text released is, put together, the decoded generation up to the stop string. Because it is
    fed from the request's journal it goes on unchanged when the request moves to another instance.

    Each `push` decodes a short window of recent tokens, not the whole generation, so its cost does not grow.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        prompt: Sequence[int] = (),
        stop: Sequence[str] = (),
        min_tokens: int = 0,
    ) -> None:
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._min_tokens = min_tokens
        self._window = list(prompt[-_CONTEXT:])
        self._prefix = tokenizer.decode(self._window)
        self._fresh = 0
        self._held = ""
        self._num_tokens = 0
        self.stopped = False

    def push(self, token: int, *, last: bool = False) -> str:
        """Take the next token and return the text that is now certain; `last` releases all that is held.

        After a stop string is complete, `stopped` is true and the stop string and what follows it is dropped.
        """
        self._num_tokens += 1
        self._held += self._decode(token, last=last)
        end = self._find_stop()
        if end is not None:
            self.stopped = True
            text, self._held = self._held[:end], ""
            return text
        keep = 0 if last else self._possible_stop()
        cut = len(self._held) - keep
        text, self._held = self._held[:cut], self._held[cut:]
        return text

    def _decode(self, token: int, *, last: bool) -> str:
        self._window.append(token)
        self._fresh += 1
        text = self._tokenizer.decode(self._window)
        if text.endswith(_UNFINISHED) and not last and self._fresh < _LONGEST_CHARACTER:
            return ""
        delta = text[len(self._prefix) :]
        self._window = self._window[-_CONTEXT:]
        self._prefix = self._tokenizer.decode(self._window)
        self._fresh = 0
        return delta

    def _find_stop(self) -> int | None:
        if self._num_tokens <= self._min_tokens:
            return None
        found = [at for stop in self._stop if (at := self._held.find(stop)) >= 0]
        return min(found, default=None)

    def _possible_stop(self) -> int:
        """Length of the longest suffix of the held text that a stop string begins with."""
        longest = max((len(stop) for stop in self._stop), default=0)
        for length in range(min(longest, len(self._held)), 0, -1):
            if any(stop.startswith(self._held[-length:]) for stop in self._stop):
                return length
        return 0


_CONTEXT = 8
_LONGEST_CHARACTER = 16
