"""Which instances to turn so that so many places come free, at the least cost: an exact 0/1 knapsack."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from hotswap.view import InstanceId

__all__ = ["Offer", "Pool", "choose"]

_K = TypeVar("_K", int, tuple[int, int, int])


class Offer(NamedTuple):
    """An instance that could be turned.

    Attributes:
        instance: Which.
        slots: How many requests of the new model it could take.
        seconds: What that costs.
        harm: Decides between equal costs; the smaller sum goes first.
        room: Places for requests of its present model that go with it: those that are taken, which must be
            found elsewhere, and those that are free.
    """

    instance: InstanceId
    slots: int
    seconds: float = 0.0
    harm: int = 0
    room: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """The offers of one model: no more than `most` may be taken, with no more than `room` places in all.

    Of equal choices the earlier offers are taken.
    """

    offers: tuple[Offer, ...]
    most: int
    room: int = 0


@dataclass(frozen=True, slots=True)
class _Choice:
    seconds: float = 0.0
    harm: int = 0
    offers: tuple[Offer, ...] = ()

    def and_also(self, other: _Choice) -> _Choice:
        return _Choice(self.seconds + other.seconds, self.harm + other.harm, self.offers + other.offers)

    def __lt__(self, other: _Choice) -> bool:
        return (self.seconds, self.harm) < (other.seconds, other.harm)


def choose(pools: Iterable[Pool], need: int) -> tuple[Offer, ...]:
    """Return the offers that free `need` slots at the least sum of seconds, then of harm.

    Where all together free fewer, as many as can be, at the least cost likewise. Exact: dynamic programming
    over the slots that are freed, and inside of a pool over its room and the number of offers taken as well,
    as far as they bind.
    """
    pools = tuple(pools)
    singles = [o for pool in pools if pool.most > 0 for o in pool.offers if o.room <= pool.room]
    if all(offer.slots >= need for offer in singles):  # the usual case: one is enough, and more cost more
        cheapest = min(singles, key=lambda offer: (offer.seconds, offer.harm), default=None)
        return () if cheapest is None or need <= 0 else (cheapest,)
    best = {0: _Choice()}
    for pool in pools:
        options = _options(pool, need)
        merged: dict[int, _Choice] = {}
        for more, option in options.items():  # nothing first, so that an equal choice of before stays
            for freed, choice in best.items():
                _keep(merged, min(need, freed + more), choice.and_also(option))
        best = merged
    return best[max(best)].offers


def _options(pool: Pool, need: int) -> dict[int, _Choice]:
    """The best way in which a pool frees each number of slots."""
    counts = pool.most < len(pool.offers)
    binds = sum(offer.room for offer in pool.offers) > pool.room
    states = {(0, 0, 0): _Choice()}
    for offer in pool.offers:
        for (freed, room, count), choice in tuple(states.items()):
            taken = (min(need, freed + offer.slots), room + binds * offer.room, count + counts)
            if taken[1] <= pool.room and taken[2] <= pool.most:
                option = choice.and_also(_Choice(offer.seconds, offer.harm, (offer,)))
                _keep(states, taken, option)
    options: dict[int, _Choice] = {}
    for (freed, _, _), choice in states.items():
        _keep(options, freed, choice)
    return options


def _keep(choices: dict[_K, _Choice], key: _K, choice: _Choice) -> None:
    if key not in choices or choice < choices[key]:
        choices[key] = choice
