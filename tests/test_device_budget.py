"""A device budget is never exceeded, floors are always available, and holders are told what others lack."""

from __future__ import annotations

import random
import threading
from functools import partial
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from hotswap import DeviceBudget, DeviceLease
from hotswap.errors import ConfigError, OutOfMemory

SIZE = 100
SIZES = st.integers(0, SIZE + 10)


class Budgets(RuleBasedStateMachine):
    """Holders that come, take, give and go in any order, beside a model of plain numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.budget = DeviceBudget(SIZE)
        self.leases: dict[str, DeviceLease] = {}
        self.held: dict[str, int] = {}

    def budget_of(self, name: str) -> DeviceBudget:
        """The budget of which a holder has its lease."""
        return self.budget

    def some_lease(self, data: st.DataObject) -> DeviceLease:
        return self.leases[data.draw(st.sampled_from(sorted(self.leases)))]

    def reserved(self) -> int:
        return sum(max(self.held[name], lease.floor_bytes) for name, lease in self.leases.items())

    @rule(name=st.sampled_from("abcd"), floor=SIZES, ceiling=st.none() | SIZES)
    def open(self, name: str, floor: int, ceiling: int | None) -> None:
        floors = sum(lease.floor_bytes for lease in self.leases.values())
        most = SIZE if ceiling is None else min(ceiling, SIZE)
        if name in self.leases or floor > most or floors + floor > SIZE:
            with pytest.raises(ConfigError, match=name):
                self.budget_of(name).lease(name, floor, ceiling)
        elif self.reserved() + floor > SIZE:
            with pytest.raises(OutOfMemory, match=name):
                self.budget_of(name).lease(name, floor, ceiling)
        else:
            self.leases[name] = self.budget_of(name).lease(name, floor, ceiling)
            self.held[name] = 0

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), size=SIZES)
    def take(self, data: st.DataObject, size: int) -> None:
        lease = self.some_lease(data)
        name, held = lease.holder, self.held[lease.holder]
        others = self.reserved() - max(held, lease.floor_bytes)
        fits = held + size <= lease.ceiling_bytes
        allowed = fits and others + max(held + size, lease.floor_bytes) <= SIZE
        assert (size <= lease.available_bytes) is allowed
        assert lease.take(size) is allowed
        if allowed:
            self.held[name] += size
        assert lease.wanted_bytes == (size if fits and not allowed else 0)

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), size=SIZES)
    def give(self, data: st.DataObject, size: int) -> None:
        lease = self.some_lease(data)
        if size > self.held[lease.holder]:
            with pytest.raises(ConfigError, match="give back what was taken"):
                lease.give(size)
        else:
            lease.give(size)
            self.held[lease.holder] -= size

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), size=SIZES)
    def want(self, data: st.DataObject, size: int) -> None:
        lease = self.some_lease(data)
        lease.want(size)
        assert lease.wanted_bytes == min(size, lease.ceiling_bytes - lease.held_bytes)

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        lease = self.some_lease(data)
        lease.close()
        lease.close()
        del self.leases[lease.holder], self.held[lease.holder]
        assert lease.held_bytes == lease.available_bytes == lease.owed_bytes == 0
        assert not lease.take(1)

    @invariant()
    def is_never_exceeded(self) -> None:
        assert {name: lease.held_bytes for name, lease in self.leases.items()} == self.held
        for name, lease in self.leases.items():
            assert lease in self.budget_of(name).leases
        assert self.budget.held_bytes == sum(self.held.values())
        assert self.budget.free_bytes == SIZE - self.reserved() >= 0

    @invariant()
    def floors_are_available(self) -> None:
        for lease in self.leases.values():
            assert lease.available_bytes >= lease.floor_bytes - lease.held_bytes

    @invariant()
    def what_is_owed_lies_above_floors_and_is_wanted(self) -> None:
        leases = list(self.leases.values())
        wanted = sum(lease.wanted_bytes for lease in leases)
        for lease in leases:
            assert 0 <= lease.owed_bytes <= max(0, lease.held_bytes - lease.floor_bytes)
            assert lease.owed_bytes <= wanted - lease.wanted_bytes


TestBudgets = Budgets.TestCase
TestBudgets.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)


def test_a_holder_that_lacks_memory_asks_the_others_and_hears_when_some_is_free() -> None:
    budget, heard = DeviceBudget(SIZE), list[str]()
    a = budget.lease("a", 20, on_wanted=lambda: heard.append("a is asked"))
    b = budget.lease("b", 20, on_free=lambda: heard.append("b may take"))
    assert a.take(80)
    assert not b.take(50)
    assert heard == ["a is asked"]
    assert (b.wanted_bytes, a.owed_bytes) == (50, 30)
    assert (a.others_lack_bytes, b.others_lack_bytes) == (30, 0)  # 20 are b's floor

    a.give(10)
    assert heard[1:] == ["b may take"]
    assert not b.take(50)  # which has been asked for
    assert a.owed_bytes == 20
    a.give(20)
    assert a.owed_bytes == 0
    assert b.take(50)
    a.give(1)
    assert heard[1:] == ["b may take", "b may take"]

    assert not b.take(50)
    b.want(0)
    assert not b.take(2)
    assert heard[3:] == ["a is asked", "a is asked"]


def test_a_holder_that_gives_at_once_lets_the_other_take_at_once() -> None:
    budget = DeviceBudget(SIZE)
    a: DeviceLease = budget.lease("a", on_wanted=lambda: a.give(a.owed_bytes))
    b = budget.lease("b")
    assert a.take(90)
    assert b.take(40)
    assert (a.held_bytes, b.held_bytes, b.wanted_bytes) == (60, 40, 0)


def test_only_holders_above_their_floors_are_asked_and_only_for_what_they_can_help_with() -> None:
    budget, asked = DeviceBudget(SIZE), list[str]()
    leases = [budget.lease(name, 30, on_wanted=partial(asked.append, name)) for name in "ab"]
    c = budget.lease("c", 10, ceiling_bytes=60)
    assert leases[0].take(30)
    assert leases[1].take(50)
    assert not c.take(61)  # its own ceiling, which nothing given back would change
    assert c.wanted_bytes == 0
    assert asked == []
    c.want(25)
    assert asked == ["b"]
    assert [lease.owed_bytes for lease in leases] == [0, 5]
    c.want(0)
    assert leases[1].owed_bytes == 0


def test_budgets_have_names_of_their_own_unless_they_are_named() -> None:
    assert DeviceBudget(1, name="gpu 0").name == "gpu 0"
    assert DeviceBudget(1).name != DeviceBudget(1).name != ""
    name: Any = 3
    with pytest.raises(ConfigError, match="name"):
        DeviceBudget(1, name=name)


def test_a_lease_that_ends_frees_its_floor_for_those_who_wait() -> None:
    budget, told = DeviceBudget("100 B"), list[int]()
    a = budget.lease("a", 50)
    b = budget.lease("b", 0, on_free=lambda: told.append(budget.free_bytes))
    assert not b.take(60)
    a.close()
    assert told == [100]
    assert b.take(60)
    budget.lease("a", 40)


def test_an_error_of_a_callback_is_logged_and_reaches_neither_taker_nor_giver(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail() -> None:
        raise LookupError("a fault of the holder")

    budget = DeviceBudget(SIZE)
    a = budget.lease("a", on_wanted=fail)
    b = budget.lease("b", on_free=fail)
    assert a.take(SIZE)
    assert not b.take(1)
    a.give(1)
    assert a.held_bytes == SIZE - 1
    assert len([record for record in caplog.records if record.exc_info]) == 2


@pytest.mark.parametrize("size", [0, -1, "many", 1.5, True])
def test_a_size_that_is_none_is_refused(size: Any) -> None:
    with pytest.raises(ConfigError, match="size_bytes"):
        DeviceBudget(size)


@pytest.mark.parametrize("holder", ["", None, 3])
def test_a_holder_without_a_name_is_refused(holder: Any) -> None:
    budget = DeviceBudget(SIZE)
    with pytest.raises(ConfigError, match="holder is"):
        budget.lease(holder)
    assert budget.leases == ()


@pytest.mark.parametrize("size", [-1, 0.5, None])
def test_sizes_that_are_none_are_refused_by_every_verb(size: Any) -> None:
    lease = DeviceBudget(SIZE).lease("a")
    for verb in (lease.take, lease.give, lease.want):
        with pytest.raises(ConfigError, match="size_bytes"):
            verb(size)


def test_reprs_tell_size_and_holders() -> None:
    budget = DeviceBudget("4 GiB")
    assert repr(budget) == "<DeviceBudget [0 bytes of 4 GiB held | no leases]>"
    a = budget.lease("a", "1 GiB")
    assert a.take(3 << 30)
    b = budget.lease("b", ceiling_bytes="2 GiB")
    assert not b.take(3 << 29)
    assert repr(budget) == (
        "<DeviceBudget [3 GiB of 4 GiB held | "
        "a: 3 GiB, floor 1 GiB; b: 0 bytes, floor 0 bytes, wants 1.5 GiB]>"
    )
    assert repr(b) == "<DeviceLease b [0 bytes held, floor 0 bytes, ceiling 2 GiB, wants 1.5 GiB]>"


def test_threads_never_exceed_the_budget_and_never_miss_their_floors() -> None:
    """Each thread holds and returns random sizes; what all hold is counted apart from the budget."""
    budget, floor = DeviceBudget(SIZE), 15
    counted, counter, faults = [0], threading.Lock(), list[str]()
    barrier = threading.Barrier(5)

    def add(size: int) -> None:
        with counter:
            counted[0] += size
            if counted[0] > SIZE:
                faults.append(f"{counted[0]} bytes are held")

    def work(number: int) -> None:
        random_of, held = random.Random(number), 0
        lease: DeviceLease = budget.lease(str(number), floor)
        barrier.wait()
        for _ in range(2000):
            size = random_of.randrange(40)
            if lease.take(size):
                add(size)
                held += size
            elif held + size <= floor:
                faults.append(f"{size} bytes within the floor were refused")
            back = random_of.randrange(held + 1) if random_of.random() < 0.7 else held
            add(-back)
            lease.give(back)
            held -= back
        add(-held)
        lease.close()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not faults
    assert budget.free_bytes == SIZE
