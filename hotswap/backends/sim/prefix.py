"""A prefix cache without content: which KV blocks hold prefixes of prompts, and which of them are idle.

The name of a block is a hash of all tokens up to its end, as in Kwon et al., PagedAttention,
arXiv:2309.06180, section 4.4. If two requests compute the same block at the same time, one copy is kept and
both use it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import takewhile

from hotswap.request import Request

__all__ = ["Prefixes", "block_names"]


def block_names(request: Request, block_tokens: int) -> tuple[int, ...]:
    """Return the names of the full blocks of a prompt; prompts of different adapters share none."""
    prompt = request.prompt
    name = hash(request.adapter)
    names: list[int] = []
    for end in range(block_tokens, len(prompt) + 1, block_tokens):
        name = hash((name, prompt[end - block_tokens : end]))
        names.append(name)
    return tuple(names)


class Prefixes:
    """The named blocks of one pool: those in use, with counts, and the idle ones, least recently used first.

    Idle blocks count as free. After free blocks were taken, `trim` must be called before any are given back.
    """

    def __init__(self) -> None:
        self._used: dict[int, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()

    def trim(self, num_free: int) -> None:
        """Forget the least recently used idle blocks, until there are no more of them than free blocks."""
        while len(self._idle) > num_free:
            self._idle.popitem(last=False)

    def num_used(self, names: Iterable[int]) -> int:
        """Return how many of the first blocks are in use, so that sharing them takes no free ones."""
        return sum(1 for _ in takewhile(self._used.__contains__, names))

    def num_found(self, names: Iterable[int]) -> int:
        """Return how many of the first blocks are cached, in use or idle."""
        return sum(1 for _ in takewhile(lambda name: name in self._used or name in self._idle, names))

    def take(self, names: Sequence[int]) -> tuple[int, int]:
        """Use the first blocks, as far as they are cached; return how many, and how many were idle."""
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
        """Use a block that was computed; return whether one of its name was in use, so that one is freed."""
        known = name in self._used
        self._used[name] = self._used.get(name, 0) + 1
        self._idle.pop(name, None)
        return known

    def give_back(self, names: Sequence[int]) -> int:
        """Stop using blocks, the last first; return how many of them are still in use."""
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
        """Forget the idle blocks: the weights that they were computed with are gone."""
        self._idle.clear()

    def __repr__(self) -> str:
        return f"<Prefixes [blocks: {len(self._used)} used, {len(self._idle)} idle]>"
