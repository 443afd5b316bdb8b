"""Mirrokni, Thorup, Zadimoghaddam, "Consistent Hashing with Bounded Loads": the capacity, the few moves."""

from math import ceil

import pytest

from hotswap.policies import ConsistentHashRouter
from tests.policies.test_consistent_hash import asks, moved, named, placed, route


def test_the_capacity_of_a_bin() -> None:
    """Section 1: with m balls in n bins and c = 1 + eps, a bin takes `ceil(c m / n)`.

    Three bins and c = 1.25: of nine balls with one key the first bin takes four, the next four, the last one.
    """
    loads = dict.fromkeys(named(3), 0)
    router = ConsistentHashRouter(c=1.25)
    for _ in range(9):
        loads[route(router, loads, asks(1))] += 1
    assert max(loads.values()) == ceil(1.25 * 9 / 3) == 4
    assert sorted(loads.values()) == [1, 4, 4]


# Times as many keys as a bin held, of 12 bins with 20 keys each; without slack (c = 1) over 6.
@pytest.mark.parametrize(("c", "times"), [(1.25, 3.0), (1.5, 2.0), (2.0, 1.5)])
def test_a_bin_that_comes_or_leaves_moves_few_balls(c: float, times: float) -> None:
    """Section 1: O(1 / eps^2) times what a bin holds, in expectation; here over every bin that may leave.

    Counting anew (a key's number modulo the bins) would move 11 times as many.
    """
    names, num_keys = named(12), 240
    router = ConsistentHashRouter(c=c)
    before = placed(router, names, num_keys)
    left = [placed(router, [other for other in names if other != name], num_keys) for name in names]
    moves = [len(moved(before, after)) for after in left]
    assert sum(moves) / len(moves) <= times * num_keys / 12
    assert len(moved(before, placed(router, [*names, "new"], num_keys))) <= times * num_keys / 12
