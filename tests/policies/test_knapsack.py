"""The knapsack finds what trying everything finds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotswap import InstanceId
from hotswap.policies.schedulers.startup_time.knapsack import Offer, Pool, choose


def offer(
    name: str, places: int = 1, seconds: float = 1.0, *, capacity: int = 0, disruption: int = 0
) -> Offer:
    return Offer(
        instance=InstanceId(name), places=places, seconds=seconds, capacity=capacity, disruption=disruption
    )


def pool(*offers: Offer, max_offers: int | None = None, capacity: int = 0) -> Pool:
    return Pool(
        offers=offers, max_offers=len(offers) if max_offers is None else max_offers, capacity=capacity
    )


def names(offers: Sequence[Offer]) -> set[str]:
    return {str(o.instance) for o in offers}


def test_the_quickest_offer_that_is_enough_is_taken() -> None:
    assert names(choose([pool(offer("e0", 4, 3.0), offer("e1", 4, 2.0), offer("e2", 1, 1.0))], 4)) == {"e1"}


def test_several_small_ones_are_taken_where_that_is_quicker() -> None:
    small = [offer(f"e{n}", 2, 1.0) for n in range(3)]
    assert names(choose([pool(*small, offer("e9", 6, 3.5))], 6)) == {"e0", "e1", "e2"}
    assert names(choose([pool(*small, offer("e9", 6, 2.5))], 6)) == {"e9"}


def test_as_many_as_can_be_are_freed_where_not_all_can() -> None:
    assert names(choose([pool(offer("e0", 2), offer("e1", 1))], 9)) == {"e0", "e1"}
    assert choose([pool()], 9) == choose([], 9) == ()


def test_a_pool_gives_no_more_than_it_can_spare() -> None:
    two = pool(offer("e0", 1, 5.0), offer("e1", 1, 1.0), max_offers=1)
    assert names(choose([two, pool(offer("e2", 1, 9.0))], 2)) == {"e1", "e2"}


def test_requests_that_move_need_capacity_in_their_pool() -> None:
    # Nine places: four taken and one free on e0, one taken and three free on e1, six free on a third.
    replicas = [offer("e0", 5, 1.0, capacity=5), offer("e1", 5, 2.0, capacity=4)]
    assert names(choose([pool(*replicas, capacity=10)], 10)) == {"e0", "e1"}
    assert names(choose([pool(*replicas, capacity=8)], 10)) == {"e0"}
    assert names(choose([pool(*replicas, capacity=4)], 10)) == {"e1"}
    assert choose([pool(*replicas, capacity=3)], 10) == ()


def test_equal_times_go_to_the_least_disruption_then_to_the_earlier_offer() -> None:
    offers = [offer("e0", disruption=2), offer("e1", disruption=1), offer("e2", disruption=1)]
    assert names(choose([pool(*offers)], 1)) == {"e1"}
    assert names(choose([pool(each) for each in offers], 1)) == {"e1"}


def subsets(offers: Sequence[Offer]) -> Iterator[tuple[Offer, ...]]:
    return chain.from_iterable(combinations(offers, size) for size in range(len(offers) + 1))


def allowed(picks: Sequence[Offer], pools: Sequence[Pool]) -> bool:
    for each in pools:
        mine = [o for o in picks if o in each.offers]
        if mine and (len(mine) > each.max_offers or sum(o.capacity for o in mine) > each.capacity):
            return False
    return True


@st.composite
def pools_of_offers(draw: st.DrawFn) -> list[Pool]:
    count, pools = 0, []
    for _ in range(draw(st.integers(0, 3))):
        offers = []
        for _ in range(draw(st.integers(0, 3))):
            offers.append(
                offer(
                    f"e{count}",
                    draw(st.integers(0, 4)),
                    draw(st.integers(0, 40)) / 8,  # exact in binary, so that sums in any order are equal
                    capacity=draw(st.integers(0, 5)),
                    disruption=draw(st.integers(0, 3)),
                )
            )
            count += 1
        max_offers, capacity = draw(st.integers(0, 3)), draw(st.integers(-2, 10))
        pools.append(Pool(offers=tuple(offers), max_offers=max_offers, capacity=capacity))
    return pools


@given(pools_of_offers(), st.integers(0, 12))
def test_it_equals_trying_everything(pools: list[Pool], need: int) -> None:
    def worth(picks: Sequence[Offer]) -> tuple[int, float, int]:
        freed = min(need, sum(o.places for o in picks))
        return -freed, sum(o.seconds for o in picks), sum(o.disruption for o in picks)

    every = [o for each in pools for o in each.offers]
    chosen = choose(pools, need)
    assert allowed(chosen, pools)
    assert len(set(chosen)) == len(chosen)
    assert worth(chosen) == min(worth(picks) for picks in subsets(every) if allowed(picks, pools))


@pytest.mark.parametrize("num", [64])
def test_a_large_fleet_of_equal_instances_has_few_states(num: int) -> None:
    """Were every subset looked at, this would never end."""
    busy = [offer(f"b{n:02}", 8, 1.0 + n / 64, capacity=8) for n in range(num)]
    chosen = choose([pool(*busy, max_offers=num - 1, capacity=8 * num // 2)], 8 * 5)
    assert names(chosen) == {f"b{n:02}" for n in range(5)}
