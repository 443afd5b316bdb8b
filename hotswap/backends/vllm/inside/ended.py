"""What a core remembers of requests that have ended, to find their KV blocks while they are cached."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from itertools import count
from typing import Any

__all__ = ["MOST_REQUESTS", "MOST_TOKENS", "Ended", "EndedRequest"]

# The latest requests are remembered, so many, with so many tokens in all.
MOST_REQUESTS, MOST_TOKENS = 256, 1 << 20


@dataclass(frozen=True, slots=True)
class EndedRequest:
    """A request that has ended.

    Attributes:
        id: A number of its own.
        salt: The fingerprint of the weights that it ran with.
        adapter: vLLM's name of its adapter; empty without.
        tokens: Its tokens, as far as they fill blocks.
        hashes: vLLM's hash of each of those blocks, of all tokens up to its end.
    """

    id: int
    salt: str
    adapter: str
    tokens: tuple[int, ...]
    hashes: tuple[bytes, ...]


class Ended:
    """The requests that have ended in one core, within bounds; belongs to the thread of its scheduler.

    Of requests that begin alike, as the turns of a chat do, the longest is remembered.
    """

    def __init__(self) -> None:
        self._found: OrderedDict[bytes, EndedRequest] = OrderedDict()  # by their last hashes
        self._num_tokens = 0
        self._numbers = count(1)

    def note(self, request: Any, block_tokens: int) -> None:
        """Remember a request of vLLM's that has ended, in place of those that it begins with."""
        hashes: tuple[bytes, ...] = tuple(getattr(request, "block_hashes", ()))
        tokens = tuple(request.all_token_ids[: len(hashes) * block_tokens])
        if not hashes or len(tokens) < len(hashes) * block_tokens:
            return
        for earlier in hashes:
            self._drop(earlier)
        adapter = "" if request.lora_request is None else str(request.lora_request.lora_name)
        entry = EndedRequest(
            next(self._numbers), getattr(request, "cache_salt", None) or "", adapter, tokens, hashes
        )
        self._found[hashes[-1]] = entry
        self._num_tokens += len(tokens)
        while len(self._found) > MOST_REQUESTS or self._num_tokens > MOST_TOKENS:
            self._drop(next(iter(self._found)))

    def latest(self, salt: str) -> list[EndedRequest]:
        """Return those that ran with some weights, the latest first."""
        return [entry for entry in reversed(self._found.values()) if entry.salt == salt]

    def find(self, id: int) -> EndedRequest | None:
        """Return the one of a number; `None` if it is not remembered any more."""
        return next((entry for entry in self._found.values() if entry.id == id), None)

    def clear(self) -> None:
        """Forget all."""
        self._found.clear()
        self._num_tokens = 0

    def _drop(self, last: bytes) -> None:
        entry = self._found.pop(last, None)
        if entry is not None:
            self._num_tokens -= len(entry.tokens)
