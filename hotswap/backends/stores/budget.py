"""A byte budget shared by slots in groups, with use counts and LRU eviction of whole groups."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from hotswap.errors import TierFull

__all__ = ["Budget", "Slot"]

_G = TypeVar("_G", bound=Hashable)
_T = TypeVar("_T")


@dataclass(slots=True, eq=False)
class Slot(Generic[_G, _T]):
    """One part of a group; takes `size_bytes` of a budget."""

    group: _G
    part: int
    value: _T
    size_bytes: int
    users: int = 0


class Budget(Generic[_G, _T]):
    """Slots under a byte budget. A group of slots is a model, its slots are the ranks' buffers.

    A group is evicted as a whole, least recently used first, because a part of a model is of little use. A
    group with a slot in use, or pinned, is not evicted. Bytes count from `add` until `freed`: a dropped slot
    counts while its memory is being freed, so the memory in use never exceeds the budget.
    """

    def __init__(self, name: str, capacity_bytes: int) -> None:
        self.name = name
        self.capacity_bytes = capacity_bytes
        self.used_bytes = 0
        self.pinned: set[_G] = set()
        self._groups: OrderedDict[_G, dict[int, Slot[_G, _T]]] = OrderedDict()
        self._dropped: list[Slot[_G, _T]] = []
        self._dropped_bytes = 0

    def __iter__(self) -> Iterator[Slot[_G, _T]]:
        """The slots, those of the least recently used group first."""
        return (slot for parts in self._groups.values() for slot in parts.values())

    @property
    def is_freeing(self) -> bool:
        """Whether slots were dropped and are not `freed` yet."""
        return bool(self._dropped or self._dropped_bytes)

    def group(self, group: _G) -> tuple[Slot[_G, _T], ...]:
        """Return the slots of a group."""
        return tuple(self._groups.get(group, {}).values())

    def find(self, group: _G, part: int) -> Slot[_G, _T] | None:
        """Return a slot, `None` if there is none."""
        return self._groups.get(group, {}).get(part)

    def make_room(self, size_bytes: int, group: _G) -> None:
        """Drop idle groups other than `group` until `size_bytes` more will fit.

        They fit once every slot of `take_dropped` is `freed`.

        Raises:
            TierFull: they would not fit even then; nothing is dropped.
        """
        missing = self.used_bytes - self._dropped_bytes + size_bytes - self.capacity_bytes
        victims: list[Slot[_G, _T]] = []
        for other, parts in self._groups.items():
            if missing <= 0:
                break
            if other != group and other not in self.pinned and not any(s.users for s in parts.values()):
                victims += parts.values()
                missing -= sum(slot.size_bytes for slot in parts.values())
        if missing > 0:
            raise TierFull(
                f"Tier {self.name!r} has no room for {size_bytes} bytes: it lacks {missing} of its "
                f"{self.capacity_bytes}, which are in use or pinned. Raise the budget, unpin a model, or "
                "wait until loads end."
            )
        for slot in victims:
            self.drop(slot)

    def add(self, group: _G, part: int, value: _T, size_bytes: int) -> Slot[_G, _T]:
        """Add a slot of `size_bytes`, for which room was made."""
        parts = self._groups.setdefault(group, {})
        assert part not in parts, f"part {part} of {group!r} is there already"
        assert self.used_bytes + size_bytes <= self.capacity_bytes, "add without make_room"
        slot = parts[part] = Slot(group, part, value, size_bytes)
        self.used_bytes += size_bytes
        return slot

    def use(self, slot: Slot[_G, _T]) -> None:
        """Keep the slot's group until `release`; both make it the most recently used."""
        slot.users += 1
        self._groups.move_to_end(slot.group)

    def release(self, slot: Slot[_G, _T]) -> None:
        """End one use."""
        assert slot.users > 0, f"part {slot.part} of {slot.group!r} is not in use"
        slot.users -= 1
        self._groups.move_to_end(slot.group)

    def drop(self, slot: Slot[_G, _T]) -> None:
        """Remove an idle slot; its bytes count until `freed`."""
        assert not slot.users, f"part {slot.part} of {slot.group!r} is in use"
        parts = self._groups[slot.group]
        del parts[slot.part]
        if not parts:
            del self._groups[slot.group]
        self._dropped.append(slot)
        self._dropped_bytes += slot.size_bytes

    def take_dropped(self) -> list[Slot[_G, _T]]:
        """Return the dropped slots to free, each once; their bytes count until `freed`."""
        dropped, self._dropped = self._dropped, []
        return dropped

    def freed(self, slot: Slot[_G, _T]) -> None:
        """Return the bytes of a slot of `take_dropped` to the budget."""
        self._dropped_bytes -= slot.size_bytes
        self.used_bytes -= slot.size_bytes
