"""Who decodes together: what is read for all is near to the least, and nobody is moved in vain."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotswap.backends.torch.grouping import Group, Grouping


@dataclass(eq=False)
class Request:
    need: int
    settled: bool = False


def _group(*needs: int, capacity: int = 0, settled: bool = False) -> Group[Request]:
    group = Group[Request]()
    group.members = [Request(need, settled) for need in needs]
    group.capacity = capacity
    return group


def _read(grouping: Grouping, groups: Sequence[Group[Request]]) -> float:
    """What is read for all in a step."""
    return sum(grouping.fixed + len(group.members) * group.width for group in groups if group.members)


def _apply(grouping: Grouping, groups: list[Group[Request]]) -> bool:
    """Make the next change; false if there is none."""
    move = grouping.change(groups)
    if move is None:
        return False
    target = move.target
    if target is None:
        groups.append(target := Group[Request]())
    for member in tuple(move.members):
        move.source.members.remove(member)
        target.members.append(member)
        member.settled = False
    groups[:] = [group for group in groups if group.members]
    _widen(grouping, groups)
    return True


def _widen(grouping: Grouping, groups: Sequence[Group[Request]]) -> None:
    """Where slots are read up to their end, let them be large enough."""
    for group in groups:
        if grouping.opened(1) > 1 and group.longest > group.capacity:
            group.capacity = grouping.opened(group.longest)


def _least(needs: Sequence[int], fixed: float) -> float:
    """The least that can be read, where nothing is read beyond the longest: groups are of neighbours."""
    ordered = sorted(needs)

    @cache
    def upto(end: int) -> float:
        return min((upto(at) + fixed + (end - at) * ordered[end - 1] for at in range(end)), default=0.0)

    return upto(len(ordered))


_needs = st.lists(st.integers(1, 60), min_size=1, max_size=24)


def _roomy(need: int) -> int:
    return need + max(2, need // 4)


@given(
    st.lists(_needs, max_size=4), st.integers(1, 60), st.integers(0, 50), st.integers(60, 400), st.booleans()
)
def test_a_newcomer_goes_where_least_more_is_read(
    parts: list[list[int]], need: int, fixed: int, most: int, whole: bool
) -> None:
    grouping = Grouping(fixed=fixed, most=most, opened=_roomy if whole else int)
    groups = [_group(*part) for part in parts]
    _widen(grouping, groups)
    before, choices = _read(grouping, groups), dict[int, float]()
    for index, group in enumerate(groups):
        group.members.append(Request(need))
        capacity = group.capacity
        _widen(grouping, groups)
        if len(group.members) * group.width <= most:
            choices[index] = _read(grouping, groups) - before
        group.members.pop()
        group.capacity = capacity
    found, alone = grouping.place(Request(need), groups), fixed + grouping.opened(need)
    more = alone if found is None else choices[groups.index(found)]
    assert more == min([alone, *choices.values()])


def test_room_that_a_group_of_its_own_would_have_counts_for_a_newcomer() -> None:
    grouping, group = Grouping(fixed=2, most=10_000, opened=_roomy), _group(6, capacity=8)
    assert grouping.place(Request(5), [group]) is group, "8 blocks more; alone it would be 2 and 7"


@given(st.lists(_needs, max_size=4), st.integers(0, 50), st.booleans(), st.booleans())
def test_every_change_saves_what_it_costs_and_changes_come_to_an_end(
    parts: list[list[int]], fixed: int, whole: bool, settled: bool
) -> None:
    grouping = Grouping(fixed=fixed, most=10_000, opened=_roomy if whole else int)
    groups = [_group(*part, settled=settled) for part in parts]
    _widen(grouping, groups)
    for _ in range(200):
        before, everyone = _read(grouping, groups), [m for group in groups for m in group.members]
        where = {member: group for group in groups for member in group.members}
        was_settled = {member for member in everyone if member.settled}
        if not _apply(grouping, groups):
            return
        moved = [m for group in groups for m in group.members if where[m] is not group]
        assert moved
        assert sorted(map(id, everyone)) == sorted(id(m) for group in groups for m in group.members)
        cost = sum(member.need for member in moved if member in was_settled) / 4
        assert before - _read(grouping, groups) >= cost + fixed / 4
    pytest.fail("changes go on and on")


@given(_needs, st.integers(1, 50))
def test_what_is_read_in_the_end_is_near_to_the_least(needs: list[int], fixed: int) -> None:
    grouping = Grouping(fixed=fixed, most=10_000, opened=int)
    groups = list[Group[Request]]()
    for need in needs:
        group = grouping.place(Request(need), groups)
        if group is None:
            groups.append(group := Group[Request]())
        group.members.append(Request(need))
    while _apply(grouping, groups):
        pass
    assert _read(grouping, groups) <= 1.5 * _least(needs, fixed)


def test_requests_that_were_gathered_stay_where_little_is_saved() -> None:
    grouping = Grouping(fixed=8, most=10_000, opened=int)
    assert grouping.change([_group(*[11] * 3, *[16] * 3)]) is not None
    assert grouping.change([_group(*[11] * 3, *[16] * 3, settled=True)]) is None


def test_one_long_request_leaves_many_short_ones_and_not_they_it() -> None:
    grouping = Grouping(fixed=8, most=10_000, opened=int)
    move = grouping.change([_group(*[4] * 20, 60, settled=True)])
    assert move is not None
    assert [member.need for member in move.members] == [60]


def test_a_group_that_grew_beyond_what_may_be_read_at_once_is_halved() -> None:
    grouping = Grouping(fixed=1e9, most=100, opened=int)
    groups = [_group(*[30] * 7, settled=True)]
    while _apply(grouping, groups):
        pass
    assert all(len(group.members) * group.width <= 100 for group in groups)
    assert sorted(len(group.members) for group in groups) == [2, 2, 3]


def test_one_that_alone_is_larger_than_any_group_may_be_is_left_alone() -> None:
    grouping = Grouping(fixed=1, most=100, opened=int)
    assert grouping.change([_group(300)]) is None
