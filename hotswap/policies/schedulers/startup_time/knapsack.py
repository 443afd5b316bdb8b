"""An exact 0/1 knapsack: the cheapest set of instances that frees a number of places for requests."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from hotswap.view import InstanceId

__all__ = ["Offer", "Pool", "choose"]

_K = TypeVar("_K", int, tuple[int, int, int])


class Offer(NamedTuple):
    """An instance that could swap to a model.

    Attributes:
        instance: The instance.
        places: How many requests of the new model it can take.
        seconds: The cost of the swap.
        disruption: Decides between equal costs; the smaller sum wins.
        capacity: How many places its present model needs or loses elsewhere: one for each request that has to
            move to another replica, and one for each place that was free here.
    """

    instance: InstanceId
    places: int
    seconds: float = 0.0
    disruption: int = 0
    capacity: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """The offers of one model: at most `max_offers` may be taken, of at most `capacity` in all.

    Of equal choices the earlier offers are taken.
    """

    offers: tuple[Offer, ...]
    max_offers: int
    capacity: int = 0


@dataclass(frozen=True, slots=True)
class _Choice:
    seconds: float = 0.0
    disruption: int = 0
    offers: tuple[Offer, ...] = ()

    def __add__(self, other: _Choice) -> _Choice:
        return _Choice(
            self.seconds + other.seconds, self.disruption + other.disruption, self.offers + other.offers
        )

    def __lt__(self, other: _Choice) -> bool:
        return (self.seconds, self.disruption) < (other.seconds, other.disruption)


def choose(pools: Iterable[Pool], need: int) -> tuple[Offer, ...]:
    """Return the offers that free `need` places at the least sum of seconds, then of disruption.

    If all offers together free fewer places, as many as possible are freed, at the least cost likewise.
    Exact: dynamic programming over the freed places, and within a pool also over its capacity and the number
    of offers taken, where these bind.
    """
    pools = tuple(pools)
    singles = [o for pool in pools if pool.max_offers > 0 for o in pool.offers if o.capacity <= pool.capacity]
    if all(offer.places >= need for offer in singles):  # the usual case: one is enough, and more cost more
        cheapest = min(singles, key=lambda offer: (offer.seconds, offer.disruption), default=None)
        return () if cheapest is None or need <= 0 else (cheapest,)
    best = {0: _Choice()}
    for pool in pools:
        options = _options(pool, need)
        merged: dict[int, _Choice] = {}
        for more, option in options.items():  # 0 places first, so that an earlier equal choice stays
            for freed, choice in best.items():
                _keep(merged, min(need, freed + more), choice + option)
        best = merged
    return best[max(best)].offers


def _options(pool: Pool, need: int) -> dict[int, _Choice]:
    """The best choice of one pool for each number of freed places."""
    counts = pool.max_offers < len(pool.offers)
    binds = sum(offer.capacity for offer in pool.offers) > pool.capacity
    states = {(0, 0, 0): _Choice()}
    for offer in pool.offers:
        for (freed, capacity, count), choice in tuple(states.items()):
            taken = (min(need, freed + offer.places), capacity + binds * offer.capacity, count + counts)
            if taken[1] <= pool.capacity and taken[2] <= pool.max_offers:
                option = choice + _Choice(offer.seconds, offer.disruption, (offer,))
                _keep(states, taken, option)
    options: dict[int, _Choice] = {}
    for (freed, _, _), choice in states.items():
        _keep(options, freed, choice)
    return options


def _keep(choices: dict[_K, _Choice], key: _K, choice: _Choice) -> None:
    if key not in choices or choice < choices[key]:
        choices[key] = choice
