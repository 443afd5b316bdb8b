"""Prefix reuse by name alone: which blocks of a pool hold beginnings of prompts, and which of them are idle.

A block is known by all tokens up to its end, as in Kwon et al., PagedAttention, arXiv:2309.06180, section
4.4. Of two requests that compute the same block at the same time one keeps it, and both use it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import takewhile

from hotswap.request import Request

__all__ = ["Prefixes", "block_names"]


def block_names(request: Request, block_tokens: int) -> tuple[int, ...]:
    """Return the names of the whole blocks of a prompt; different adapters have none in common."""
    prompt = request.prompt
    name = hash(request.adapter)
    names: list[int] = []
    for end in range(block_tokens, len(prompt) + 1, block_tokens):
        name = hash((name, prompt[end - block_tokens : end]))
        names.append(name)
    return tuple(names)


class Prefixes:
    """The named blocks of one pool: those in use, by how many, and the idle ones, used longest ago first.

    Idle blocks count as free. Whoever takes free blocks says so by `trim`, before any are given back.
    """

    def __init__(self) -> None:
        self._used: dict[int, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()

    def trim(self, num_free: int) -> None:
        """Forget of the idle blocks those used longest ago, until there are no more than are free."""
        while len(self._idle) > num_free:
            self._idle.popitem(last=False)

    def num_used(self, names: Iterable[int]) -> int:
        """Return how many of the first blocks somebody uses, so that they take no free ones."""
        return sum(1 for _ in takewhile(self._used.__contains__, names))

    def num_found(self, names: Iterable[int]) -> int:
        """Return how many of the first blocks are there."""
        return sum(1 for _ in takewhile(lambda name: name in self._used or name in self._idle, names))

    def take(self, names: Sequence[int]) -> tuple[int, int]:
        """Use the first blocks, as far as they are there; return how many, and how many of them were idle."""
        num_found, num_idle = self.num_found(names), 0
        for name in names[:num_found]:
            if name in self._used:
                self._used[name] += 1
            else:
                del self._idle[name]
                self._used[name] = 1
                num_idle += 1
        return num_found, num_idle

    def keep(self, name: int) -> bool:
        """Use a block that was computed; return whether somebody used one like it, and one is free again."""
        known = name in self._used
        self._used[name] = self._used.get(name, 0) + 1
        self._idle.pop(name, None)
        return known

    def give_back(self, names: Sequence[int]) -> int:
        """Stop using blocks, the last first; return how many others still use."""
        num_left = 0
        for name in reversed(names):
            self._used[name] -= 1
            if self._used[name]:
                num_left += 1
            else:
                del self._used[name]
                self._idle[name] = None
        return num_left

    def forget(self) -> None:
        """Forget the idle ones: the weights that made them are gone."""
        self._idle.clear()

    def __repr__(self) -> str:
        return f"<Prefixes [blocks: {len(self._used)} used, {len(self._idle)} idle]>"
