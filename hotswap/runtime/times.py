"""How long swaps and prefills of a fleet take, learned from those that it has made."""

from __future__ import annotations

from dataclasses import dataclass

from hotswap.action import SwapRecord
from hotswap.times_view import TimesView

__all__ = ["MeasuredTimes"]

# The share of what was measured before that is left when the next comes.
_MEMORY = 0.8


@dataclass(slots=True)
class _Rate:
    """An amount over seconds, or seconds over a number of times; later amounts count for more."""

    amount: float = 0.0
    of: float = 0.0

    def add(self, amount: float, of: float) -> None:
        self.amount, self.of = _MEMORY * self.amount + amount, _MEMORY * self.of + of

    @property
    def value(self) -> float | None:
        return self.amount / self.of if self.of else None


class MeasuredTimes:
    """Keeps the times that `TimesView` tells."""

    def __init__(self) -> None:
        self._unload, self._prefill = _Rate(), _Rate()
        self._loads: dict[str, _Rate] = {}
        self._view: TimesView | None = TimesView()

    def learn_swap(self, record: SwapRecord) -> None:
        """Learn from the record of a swap; one that failed is ignored."""
        if record.outcome != "done":
            return
        load_s = record.phase_s("load") + record.phase_s("preload")
        if record.phase_s("unload"):
            down_s = record.downtime_s - record.phase_s("load") - record.phase_s("evict")
            self._unload.add(max(down_s, 0.0), 1.0)
        if record.loaded_bytes and load_s:
            self._loads.setdefault(record.tier, _Rate()).add(record.loaded_bytes, load_s)
        self._view = None

    def learn_turn(self, num_tokens: int, seconds: float) -> None:
        """Learn how long it took until all requests that a turn began with had a token."""
        if num_tokens and seconds > 0:
            self._prefill.add(num_tokens, seconds)
            self._view = None

    def view(self) -> TimesView:
        """Return what is known now; the same object until that changes."""
        if self._view is None:
            self._view = TimesView(
                unload_s=self._unload.value or 0.0,
                load_bytes_per_s=tuple(
                    (tier, value) for tier, rate in sorted(self._loads.items()) if (value := rate.value)
                ),
                prefill_tokens_per_s=self._prefill.value,
            )
        return self._view
