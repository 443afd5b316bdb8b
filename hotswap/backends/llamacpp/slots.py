"""The slots of llama.cpp's server and its KV cells, and which requests have them."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["Slots"]


class Slots:
    """The free slots and KV blocks of one server; belongs to the event loop.

    Requests take the blocks that they may grow to, so none ever has to give its own up.

    Args:
        num_slots: The slots.
        num_blocks: The KV blocks that they share.
    """

    def __init__(self, num_slots: int, num_blocks: int) -> None:
        # The tokens that a free slot has keys and values of, by its number; the least recently used first.
        self._free: dict[int, Sequence[int]] = dict.fromkeys(range(num_slots), ())
        self.num_free_blocks = num_blocks

    def take(self, tokens: Sequence[int], num_blocks: int) -> tuple[int, int] | None:
        """Take blocks and a slot, and return it with how many of `tokens` it has; `None` if there is no room.

        The slot is the one that has the longest beginning of them.
        """
        if not self._free or num_blocks > self.num_free_blocks:
            return None
        slot = max(self._free, key=lambda slot: _common(self._free[slot], tokens))
        self.num_free_blocks -= num_blocks
        return slot, _common(self._free.pop(slot), tokens)

    def give_back(self, slot: int, tokens: Sequence[int], num_blocks: int) -> None:
        """Give a slot and its blocks back, with the keys and values of `tokens`."""
        self._free[slot] = tokens
        self.num_free_blocks += num_blocks


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """Return how many tokens two sequences share at their beginning."""
    least, most = 0, min(len(one), len(other))
    while least < most:
        middle = (least + most + 1) // 2
        if one[least:middle] == other[least:middle]:
            least = middle
        else:
            most = middle - 1
    return least
