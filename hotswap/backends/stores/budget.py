"""The books of a tier with a byte budget: what lies there, who uses it, and what goes first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from hotswap.errors import TierFull

__all__ = ["Shelf", "Slot"]

_T = TypeVar("_T")


@dataclass(slots=True, eq=False)
class Slot(Generic[_T]):
    """Something that takes `size_bytes` of a shelf; while it has users it stays."""

    key: Hashable
    value: _T
    size_bytes: int
    users: int = 0
    dropped: bool = False


class Shelf(Generic[_T]):
    """Slots under a budget, least recently used first.

    Bytes are charged from `add` until `freed`: a slot that was pushed out or dropped still counts while its
    memory is being freed, so what is charged never exceeds the budget. One that is used is never pushed out.
    """

    def __init__(self, name: str, capacity_bytes: int) -> None:
        self.name = name
        self.capacity_bytes = capacity_bytes
        self.used_bytes = 0
        self._held: OrderedDict[Hashable, Slot[_T]] = OrderedDict()
        self._leaving: list[Slot[_T]] = []
        self._leaving_bytes = 0

    def __iter__(self) -> Iterator[Slot[_T]]:
        """The slots that can be found, least recently used first."""
        return iter(self._held.values())

    def find(self, key: Hashable) -> Slot[_T] | None:
        """Return the slot of that key; one that was dropped cannot be found, even while it is used."""
        return self._held.get(key)

    def make_room(self, size_bytes: int) -> None:
        """Push out the least recently used idle slots until `size_bytes` more will fit.

        The room is there once every slot of `take_leaving` is `freed`.

        Raises:
            TierFull: it would not fit even then; nothing is pushed out.
        """
        idle = [slot for slot in self._held.values() if not slot.users]
        missing = self.used_bytes - self._leaving_bytes + size_bytes - self.capacity_bytes
        if missing > sum(slot.size_bytes for slot in idle):
            lent = self.used_bytes - self._leaving_bytes - sum(slot.size_bytes for slot in idle)
            raise TierFull(
                f"Tier {self.name!r} has no room for {size_bytes} bytes: {lent} of its "
                f"{self.capacity_bytes} are in use. Raise its budget, or wait until loads have ended."
            )
        for slot in idle:
            if missing <= 0:
                return
            missing -= slot.size_bytes
            self.drop(slot)

    def add(self, key: Hashable, value: _T, size_bytes: int) -> Slot[_T]:
        """Charge `size_bytes` for a new slot; room was made before."""
        assert key not in self._held, f"{key!r} is there already"
        assert self.used_bytes + size_bytes <= self.capacity_bytes, "add without make_room"
        slot = self._held[key] = Slot(key, value, size_bytes)
        self.used_bytes += size_bytes
        return slot

    def use(self, slot: Slot[_T]) -> None:
        """Keep the slot until `leave`, and count it as used most recently."""
        slot.users += 1
        if not slot.dropped:
            self._held.move_to_end(slot.key)

    def leave(self, slot: Slot[_T]) -> None:
        """End one use; a dropped slot goes with its last."""
        assert slot.users > 0, f"{slot.key!r} is not in use"
        slot.users -= 1
        if slot.dropped and not slot.users:
            self._go(slot)

    def drop(self, slot: Slot[_T]) -> None:
        """Take the slot away: it cannot be found any more, and leaves when its last user has."""
        if slot.dropped:
            return
        slot.dropped = True
        del self._held[slot.key]
        if not slot.users:
            self._go(slot)

    def take_leaving(self) -> list[Slot[_T]]:
        """Return the slots to free; each is returned once, and stays charged until `freed`."""
        leaving, self._leaving = self._leaving, []
        return leaving

    def freed(self, slot: Slot[_T]) -> None:
        """Give the bytes of a slot of `take_leaving` back to the budget."""
        self._leaving_bytes -= slot.size_bytes
        self.used_bytes -= slot.size_bytes

    def _go(self, slot: Slot[_T]) -> None:
        self._leaving.append(slot)
        self._leaving_bytes += slot.size_bytes
