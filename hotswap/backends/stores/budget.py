"""The books of a tier with a byte budget: what lies there, who uses it, and what goes first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from hotswap.errors import TierFull

__all__ = ["Shelf", "Slot"]

_G = TypeVar("_G", bound=Hashable)
_T = TypeVar("_T")


@dataclass(slots=True, eq=False)
class Slot(Generic[_G, _T]):
    """One part of a group, which takes `size_bytes` of a shelf."""

    group: _G
    part: int
    value: _T
    size_bytes: int
    users: int = 0


class Shelf(Generic[_G, _T]):
    """Slots under a budget, in groups: a model, whose parts are its ranks.

    A group goes as a whole, the one used longest ago first, since what is left of it would be of little use;
    while one part is in use, or the group is pinned, none goes. Bytes are charged from `add` until `freed`: a
    slot that was dropped still counts while its memory is being freed, so what is charged never exceeds the
    budget.
    """

    def __init__(self, name: str, capacity_bytes: int) -> None:
        self.name = name
        self.capacity_bytes = capacity_bytes
        self.used_bytes = 0
        self.pinned: set[_G] = set()
        self._groups: OrderedDict[_G, dict[int, Slot[_G, _T]]] = OrderedDict()
        self._leaving: list[Slot[_G, _T]] = []
        self._leaving_bytes = 0

    def __iter__(self) -> Iterator[Slot[_G, _T]]:
        """The slots, those of the group used longest ago first."""
        return (slot for parts in self._groups.values() for slot in parts.values())

    @property
    def is_freeing(self) -> bool:
        """Whether there are slots that were dropped and not `freed`."""
        return bool(self._leaving or self._leaving_bytes)

    def group(self, group: _G) -> tuple[Slot[_G, _T], ...]:
        """Return the slots of a group."""
        return tuple(self._groups.get(group, {}).values())

    def find(self, group: _G, part: int) -> Slot[_G, _T] | None:
        """Return a slot, `None` if it is not there."""
        return self._groups.get(group, {}).get(part)

    def make_room(self, size_bytes: int, group: _G) -> None:
        """Drop idle groups, but not `group`, until `size_bytes` more will fit.

        The room is there once every slot of `take_leaving` is `freed`.

        Raises:
            TierFull: it would not fit even then; nothing is dropped.
        """
        missing = self.used_bytes - self._leaving_bytes + size_bytes - self.capacity_bytes
        going: list[Slot[_G, _T]] = []
        for other, parts in self._groups.items():
            if missing <= 0:
                break
            if other != group and other not in self.pinned and not any(s.users for s in parts.values()):
                going += parts.values()
                missing -= sum(slot.size_bytes for slot in parts.values())
        if missing > 0:
            raise TierFull(
                f"Tier {self.name!r} has no room for {size_bytes} bytes: it lacks {missing} of its "
                f"{self.capacity_bytes}, which are in use or pinned. Raise the budget, unpin a model, or "
                "wait until loads end."
            )
        for slot in going:
            self.drop(slot)

    def add(self, group: _G, part: int, value: _T, size_bytes: int) -> Slot[_G, _T]:
        """Charge `size_bytes` for a new slot, for which room was made."""
        parts = self._groups.setdefault(group, {})
        assert part not in parts, f"part {part} of {group!r} is there already"
        assert self.used_bytes + size_bytes <= self.capacity_bytes, "add without make_room"
        slot = parts[part] = Slot(group, part, value, size_bytes)
        self.used_bytes += size_bytes
        return slot

    def use(self, slot: Slot[_G, _T]) -> None:
        """Keep the slot's group until `leave`, and count it as used most recently, now and then."""
        slot.users += 1
        self._groups.move_to_end(slot.group)

    def leave(self, slot: Slot[_G, _T]) -> None:
        """End one use."""
        assert slot.users > 0, f"part {slot.part} of {slot.group!r} is not in use"
        slot.users -= 1
        self._groups.move_to_end(slot.group)

    def drop(self, slot: Slot[_G, _T]) -> None:
        """Take an idle slot away; it is still charged until `freed`."""
        assert not slot.users, f"part {slot.part} of {slot.group!r} is in use"
        parts = self._groups[slot.group]
        del parts[slot.part]
        if not parts:
            del self._groups[slot.group]
        self._leaving.append(slot)
        self._leaving_bytes += slot.size_bytes

    def take_leaving(self) -> list[Slot[_G, _T]]:
        """Return the slots to free; each is returned once, and stays charged until `freed`."""
        leaving, self._leaving = self._leaving, []
        return leaving

    def freed(self, slot: Slot[_G, _T]) -> None:
        """Give the bytes of a slot of `take_leaving` back to the budget."""
        self._leaving_bytes -= slot.size_bytes
        self.used_bytes -= slot.size_bytes
