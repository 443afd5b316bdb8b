"""A tier's budget is never exceeded, slots in use are never dropped, and all bytes are released."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, precondition, rule

from hotswap.backends.stores.pinned import Budget, Slot
from hotswap.errors import TierFull

CAPACITY = 100

Part = Slot[str, None]


class BudgetMachine(RuleBasedStateMachine):
    """Random adds, uses and drops, compared with a plain list."""

    loans = Bundle("loans")

    def __init__(self) -> None:
        super().__init__()
        self.budget: Budget[str, None] = Budget("host", CAPACITY)
        self.lent: list[Part] = []
        self.recent: list[str] = []

    def held(self) -> dict[str, list[Part]]:
        groups: dict[str, list[Part]] = {}
        for slot in self.budget:
            groups.setdefault(slot.group, []).append(slot)
        return groups

    @rule(target=loans, group=st.sampled_from("abcd"), part=st.integers(0, 2), size=st.integers(1, 60))
    def admit(self, group: str, part: int, size: int) -> Part | None:
        slot = self.budget.find(group, part)
        if slot is None:
            before = self.held()
            lent = {name for name, slots in before.items() if any(s.users for s in slots)}
            in_use = lent | self.budget.pinned | {group}
            staying = sum(s.size_bytes for name in in_use for s in before.get(name, []))
            try:
                self.budget.make_room(size, group)
            except TierFull:
                assert staying + size > CAPACITY
                assert self.held() == before
                return None
            assert staying + size <= CAPACITY
            gone = [name for name in before if name not in self.held()]
            oldest_first = [name for name in self.recent if name in before and name not in in_use]
            assert gone == oldest_first[: len(gone)]
            for dropped in self.budget.take_dropped():
                self.budget.freed(dropped)
            slot = self.budget.add(group, part, None, size)
        return self.lend(slot)

    def lend(self, slot: Part) -> Part:
        self.budget.use(slot)
        self.lent.append(slot)
        self._used(slot)
        return slot

    def _used(self, slot: Part) -> None:
        self.recent = [name for name in self.recent if name != slot.group] + [slot.group]

    @rule(slot=consumes(loans))
    def end(self, slot: Part | None) -> None:
        if slot is not None:
            self.budget.release(slot)
            self.lent.remove(slot)
            self._used(slot)

    @precondition(lambda self: any(not slot.users for slot in self.budget))
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        self.budget.drop(data.draw(st.sampled_from([slot for slot in self.budget if not slot.users])))

    @rule(group=st.sampled_from("abcd"))
    def pin(self, group: str) -> None:
        self.budget.pinned.add(group)

    @rule(group=st.sampled_from("abcd"))
    def unpin(self, group: str) -> None:
        self.budget.pinned.discard(group)

    @invariant()
    def never_over_the_budget(self) -> None:
        assert 0 <= self.budget.used_bytes <= CAPACITY
        assert self.budget.used_bytes >= sum(slot.size_bytes for slot in self.budget)

    @invariant()
    def what_is_lent_is_there(self) -> None:
        for slot in self.lent:
            assert self.budget.find(slot.group, slot.part) is slot

    def teardown(self) -> None:
        for slot in self.lent:
            self.budget.release(slot)
        for slot in tuple(self.budget):
            self.budget.drop(slot)
        for slot in self.budget.take_dropped():
            self.budget.freed(slot)
        assert self.budget.used_bytes == 0


TestBudget = BudgetMachine.TestCase


def test_bytes_count_until_they_are_freed() -> None:
    budget: Budget[str, None] = Budget("host", CAPACITY)
    budget.add("a", 0, None, 60)
    budget.make_room(80, "b")
    assert budget.used_bytes == 60
    (slot,) = budget.take_dropped()
    assert budget.take_dropped() == []
    budget.freed(slot)
    assert budget.used_bytes == 0


def test_a_model_does_not_evict_its_own_ranks() -> None:
    budget: Budget[str, None] = Budget("host", CAPACITY)
    budget.add("a", 0, None, 60)
    with pytest.raises(TierFull, match="host"):
        budget.make_room(60, "a")
    assert budget.find("a", 0) is not None
