"""Words that a request may not generate: which tokens would complete one."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Sequence

__all__ = ["BadWords"]

_TOKEN_BYTES = 4


class BadWords:
    """The forbidden words of several tokens of one request, and what it has generated.

    A step looks only at words that go on from the token that came last, and compares their beginnings as
    bytes: a request may have a thousand words of a thousand tokens, and a step waits for it.

    Args:
        words: Words of two tokens or more.
        generated: The tokens that were generated so far; `add_token` adds the later ones.
    """

    def __init__(self, words: Iterable[Sequence[int]], generated: Iterable[int]) -> None:
        self._by_last: dict[int, list[Sequence[int]]] = {}
        for word in words:
            self._by_last.setdefault(word[-2], []).append(word)
        # Of the words that go on from a token, made when it first comes: all before their last token, and it.
        self._beginnings: dict[int, list[tuple[bytes, int]]] = {}
        tokens = array("i", generated) if self._by_last else array("i")
        self._last = tokens[-1] if tokens else -1
        self._generated = bytearray(tokens)

    def add_token(self, token: int) -> None:
        """Add a generated token."""
        if self._by_last:
            self._last = token
            self._generated += token.to_bytes(_TOKEN_BYTES, sys.byteorder)

    def completing(self) -> list[int]:
        """Return the last tokens of the words whose other tokens are the latest that were generated."""
        if (last := self._last) not in self._by_last:
            return []
        if (beginnings := self._beginnings.get(last)) is None:
            beginnings = [(array("i", word[:-1]).tobytes(), word[-1]) for word in self._by_last[last]]
            self._beginnings[last] = beginnings
        return [token for beginning, token in beginnings if self._generated.endswith(beginning)]
