"""What adapters are asked for: kept up with every request, and decayed only when somebody looks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import exp2

import anyio

from hotswap.model import Adapter
from hotswap.request import AdapterId, ModelId
from hotswap.view import AdapterView

__all__ = ["Demand"]

# After so long a request counts for half as much in an adapter's popularity.
HALF_LIFE_S = 60.0
# What the latest gap weighs in the mean of all so far.
NEWEST_GAP = 0.3


@dataclass(frozen=True, slots=True)
class _Asked:
    """How much, when last, and how often: as of `at_s`."""

    popularity: float
    at_s: float
    gap_s: float | None = None

    def popularity_at(self, now_s: float) -> float:
        return self.popularity * exp2((self.at_s - now_s) / HALF_LIFE_S)


class Demand:
    """Requests by adapter, all versions of one together. A request costs the same however many there are."""

    def __init__(self) -> None:
        self._asked: dict[tuple[str, str], _Asked] = {}

    def ask(self, adapter: Adapter) -> None:
        """Count a request that has just come."""
        now_s, key = anyio.current_time(), (adapter.model, adapter.id)
        before = self._asked.get(key)
        if before is None:
            self._asked[key] = _Asked(1.0, now_s)
            return
        gap_s, usual_s = now_s - before.at_s, before.gap_s
        mean_s = gap_s if usual_s is None else usual_s + NEWEST_GAP * (gap_s - usual_s)
        self._asked[key] = _Asked(1.0 + before.popularity_at(now_s), now_s, mean_s)

    def forget(self, adapter: Adapter) -> None:
        """Forget an adapter that nobody can ask for any more."""
        self._asked.pop((adapter.model, adapter.id), None)

    def views(
        self,
        latest: Mapping[tuple[str, str], Adapter],
        num_running: Callable[[ModelId, AdapterId], int],
        num_waiting: Callable[[ModelId, AdapterId], int],
    ) -> Iterator[AdapterView]:
        """Yield a view of each that was asked for, in its `latest` version, with who has that now."""
        now_s = anyio.current_time()
        for key, asked in self._asked.items():
            if (adapter := latest.get(key)) is not None:
                of, version = ModelId(adapter.model), adapter.version
                yield AdapterView(
                    id=version,
                    model=of,
                    num_running=num_running(of, version),
                    num_waiting=num_waiting(of, version),
                    popularity=asked.popularity_at(now_s),
                    asked_s=asked.at_s,
                    gap_s=asked.gap_s,
                )

    def __repr__(self) -> str:
        return f"<Demand for {len(self._asked)} adapters>"
