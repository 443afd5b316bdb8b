"""The books of a tier: never over the budget, never without what is in use, every byte given back."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, precondition, rule

from hotswap import TierFull
from hotswap.backends.stores.budget import Shelf, Slot

CAPACITY = 100

Part = Slot[str, None]


class Books(RuleBasedStateMachine):
    """Random admissions, loans and drops, beside a model that simply remembers."""

    loans = Bundle("loans")

    def __init__(self) -> None:
        super().__init__()
        self.shelf: Shelf[str, None] = Shelf("books", CAPACITY)
        self.lent: list[Part] = []
        self.recent: list[str] = []

    def held(self) -> dict[str, list[Part]]:
        groups: dict[str, list[Part]] = {}
        for slot in self.shelf:
            groups.setdefault(slot.group, []).append(slot)
        return groups

    @rule(target=loans, group=st.sampled_from("abcd"), part=st.integers(0, 2), size=st.integers(1, 60))
    def admit(self, group: str, part: int, size: int) -> Part | None:
        slot = self.shelf.find(group, part)
        if slot is None:
            before = self.held()
            lent = {name for name, slots in before.items() if any(s.users for s in slots)}
            in_use = lent | self.shelf.pinned | {group}
            staying = sum(s.size_bytes for name in in_use for s in before.get(name, []))
            try:
                self.shelf.make_room(size, group)
            except TierFull:
                assert staying + size > CAPACITY
                assert self.held() == before
                return None
            assert staying + size <= CAPACITY
            gone = [name for name in before if name not in self.held()]
            oldest_first = [name for name in self.recent if name in before and name not in in_use]
            assert gone == oldest_first[: len(gone)]
            for leaving in self.shelf.take_leaving():
                self.shelf.freed(leaving)
            slot = self.shelf.add(group, part, None, size)
        return self.lend(slot)

    def lend(self, slot: Part) -> Part:
        self.shelf.use(slot)
        self.lent.append(slot)
        self._used(slot)
        return slot

    def _used(self, slot: Part) -> None:
        self.recent = [name for name in self.recent if name != slot.group] + [slot.group]

    @rule(slot=consumes(loans))
    def end(self, slot: Part | None) -> None:
        if slot is not None:
            self.shelf.leave(slot)
            self.lent.remove(slot)
            self._used(slot)

    @precondition(lambda self: any(not slot.users for slot in self.shelf))
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        self.shelf.drop(data.draw(st.sampled_from([slot for slot in self.shelf if not slot.users])))

    @rule(group=st.sampled_from("abcd"))
    def pin(self, group: str) -> None:
        self.shelf.pinned.add(group)

    @rule(group=st.sampled_from("abcd"))
    def unpin(self, group: str) -> None:
        self.shelf.pinned.discard(group)

    @invariant()
    def never_over_the_budget(self) -> None:
        assert 0 <= self.shelf.used_bytes <= CAPACITY
        assert self.shelf.used_bytes >= sum(slot.size_bytes for slot in self.shelf)

    @invariant()
    def what_is_lent_is_there(self) -> None:
        for slot in self.lent:
            assert self.shelf.find(slot.group, slot.part) is slot

    def teardown(self) -> None:
        for slot in self.lent:
            self.shelf.leave(slot)
        for slot in tuple(self.shelf):
            self.shelf.drop(slot)
        for slot in self.shelf.take_leaving():
            self.shelf.freed(slot)
        assert self.shelf.used_bytes == 0


TestBooks = Books.TestCase


def test_bytes_count_until_they_are_freed() -> None:
    shelf: Shelf[str, None] = Shelf("books", CAPACITY)
    shelf.add("a", 0, None, 60)
    shelf.make_room(80, "b")
    assert shelf.used_bytes == 60
    (slot,) = shelf.take_leaving()
    assert shelf.take_leaving() == []
    shelf.freed(slot)
    assert shelf.used_bytes == 0


def test_a_model_does_not_push_out_its_own_ranks() -> None:
    shelf: Shelf[str, None] = Shelf("books", CAPACITY)
    shelf.add("a", 0, None, 60)
    with pytest.raises(TierFull, match="books"):
        shelf.make_room(60, "a")
    assert shelf.find("a", 0) is not None
