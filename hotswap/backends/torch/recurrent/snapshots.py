"""Snapshots of recurrent states, with which a request goes on after a prefix that others have computed.

Keys and values of a prefix are of use only with the states after its last token, and these change with every
token. So states are copied at boundaries of KV blocks, in steps and on the device, and found again by the
key of the last block (`prefix`), which covers all tokens before, the weights and the adapter. A snapshot is
used with exactly the blocks of its prefix, found by their keys; it does not keep them.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

__all__ = ["SnapshotPool", "StateCopy"]


@dataclass(frozen=True, slots=True)
class StateCopy:
    """Copies all states in slot `source` to slot `target`."""

    source: int
    target: int


class SnapshotPool:
    """Slots with states after full blocks of tokens, by the key of the last block.

    The least recently saved or used snapshot is replaced first. Every method is a few dictionary look-ups.

    Args:
        slots: The slots, at least one; no request has one of them.
    """

    def __init__(self, slots: Iterable[int]) -> None:
        self._free = deque(slots)
        self._slots: OrderedDict[bytes, int] = OrderedDict()  # least recently used first
        self.num_slots = len(self._free)

    def __len__(self) -> int:
        return len(self._slots)

    def longest(self, keys: Sequence[bytes]) -> int:
        """Return how many blocks the longest prefix has after which there are states; 0 without one.

        Args:
            keys: The keys of a request's first blocks.
        """
        lengths = range(len(keys), 0, -1)
        return next((length for length in lengths if keys[length - 1] in self._slots), 0)

    def find(self, key: bytes) -> int | None:
        """Return the slot of a snapshot; `None` if it is not there."""
        return self._slots.get(key)

    def use(self, key: bytes) -> int:
        """Return the slot of a snapshot that is there, from which the next step copies."""
        self._slots.move_to_end(key)
        return self._slots[key]

    def save(self, key: bytes, *, replaced: bytes | None = None) -> int | None:
        """Return a slot for new states, found from now on; `None` if there is a snapshot with this key.

        Args:
            key: The key of the last block before the states.
            replaced: The snapshot whose slot is taken if it is still there.
        """
        if key in self._slots:
            self._slots.move_to_end(key)
            return None
        slot = None if replaced is None else self._slots.pop(replaced, None)
        if slot is None:
            slot = self._free.popleft() if self._free else self._slots.popitem(last=False)[1]
        self._slots[key] = slot
        return slot

    def drop(self, keys: Iterable[bytes]) -> None:
        """Forget snapshots, as far as they are there."""
        self._free.extend(self._slots.pop(key) for key in keys if key in self._slots)

    def __repr__(self) -> str:
        return f"<SnapshotPool [{len(self)} of {self.num_slots} slots in use]>"
