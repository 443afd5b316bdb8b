"""How much each adapter is asked for: counted with every request, decayed when it is read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import exp2

from hotswap.loop_time import current_time
from hotswap.model import Adapter

__all__ = ["Asked", "Demand"]

# After so long a request counts for half as much in an adapter's popularity.
HALF_LIFE_S = 60.0
# What the latest gap weighs in the mean of all so far.
NEWEST_GAP = 0.3


@dataclass(frozen=True, slots=True)
class Asked:
    """How much an adapter is asked for, when it last was, and the mean gap between two requests."""

    popularity: float
    at_s: float
    gap_s: float | None = None

    def popularity_at(self, now_s: float) -> float:
        """Return the popularity, decayed until now."""
        return self.popularity * exp2((self.at_s - now_s) / HALF_LIFE_S)


class Demand:
    """Requests by adapter, all versions of one together. A request costs the same however many there are."""

    def __init__(self) -> None:
        self._asked: dict[tuple[str, str], Asked] = {}

    def ask(self, adapter: Adapter) -> None:
        """Count a request that has just come."""
        now_s, key = current_time(), (adapter.model, adapter.id)
        before = self._asked.get(key)
        if before is None:
            self._asked[key] = Asked(1.0, now_s)
            return
        gap_s, usual_s = now_s - before.at_s, before.gap_s
        mean_s = gap_s if usual_s is None else usual_s + NEWEST_GAP * (gap_s - usual_s)
        self._asked[key] = Asked(1.0 + before.popularity_at(now_s), now_s, mean_s)

    def forget(self, adapter: Adapter) -> None:
        """Forget an adapter that requests cannot name any more."""
        self._asked.pop((adapter.model, adapter.id), None)

    def __iter__(self) -> Iterator[tuple[tuple[str, str], Asked]]:
        """Yield each adapter that was asked for, by model and name, with how much."""
        return iter(self._asked.items())

    def __repr__(self) -> str:
        return f"<Demand for {len(self._asked)} adapters>"
