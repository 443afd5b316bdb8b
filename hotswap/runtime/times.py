"""How long swaps and prefills of a fleet take, learned from those that it has made."""

from __future__ import annotations

from dataclasses import dataclass

from hotswap.action import SwapRecord
from hotswap.request import ModelId
from hotswap.times_view import USUAL_PREFILL_TOKEN_S, USUAL_TOKEN_S, TimesView

__all__ = ["MeasuredTimes"]

# The share of what was measured before that is left when the next comes.
_MEMORY = 0.8
# How much is held against a constant part of prefills, in turns, and for the usual rate, in squared tokens.
_NO_START, _USUAL_RATE = 0.01, 100.0**2
_LEAST_COPY_BYTES = 1 << 20
_LEAST_TOKENS = 64


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


@dataclass(slots=True)
class _Prefills:
    """Seconds over tokens as a line, `start_s + tokens token_s`, by least squares; later turns weigh more.

    Turns of one size cannot tell the two apart. So the line is also drawn, by as much as a hundredth of a
    turn would, to no seconds for no tokens, and by as much as turns that differ by a hundred tokens would, to
    the usual rate: many tokens are then taken for the cause of a long time, and few are not.
    """

    turns: float = 0.0
    tokens: float = 0.0
    seconds: float = 0.0
    tokens_squared: float = 0.0
    tokens_seconds: float = 0.0

    def add(self, tokens: int, seconds: float) -> None:
        self.turns = _MEMORY * self.turns + 1
        self.tokens = _MEMORY * self.tokens + tokens
        self.seconds = _MEMORY * self.seconds + seconds
        self.tokens_squared = _MEMORY * self.tokens_squared + tokens * tokens
        self.tokens_seconds = _MEMORY * self.tokens_seconds + tokens * seconds

    def line(self) -> tuple[float, float]:
        """Return `start_s` and `token_s`, neither below 0."""
        turns = self.turns + _NO_START
        squared = self.tokens_squared + _USUAL_RATE
        product = self.tokens_seconds + _USUAL_RATE * USUAL_PREFILL_TOKEN_S
        token_s = (turns * product - self.tokens * self.seconds) / (turns * squared - self.tokens**2)
        start_s = (self.seconds - self.tokens * token_s) / turns
        if token_s < 0:
            return self.seconds / turns, 0.0
        return (start_s, token_s) if start_s >= 0 else (0.0, product / squared)


class MeasuredTimes:
    """Keeps the times that `TimesView` tells."""

    def __init__(self) -> None:
        self._unload, self._prefills = _Rate(), _Prefills()
        self._loads: dict[str, _Rate] = {}
        self._save, self._restore, self._restore_tokens = _Rate(), _Rate(), _Rate()
        self._compute: dict[ModelId, _Rate] = {}
        self._stay_s, self._stay_tokens, self._num_kept, self._num_returned = 0.0, 0, 0, 0
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
            self._prefills.add(num_tokens, seconds)
            self._view = None

    def learn_stay(self, num_tokens: int, seconds: float) -> None:
        """Learn from a stay on an instance, in whatever order stays end that do so at one instant."""
        if num_tokens > 0 and seconds > 0:
            self._stay_s, self._stay_tokens = self._stay_s + seconds, self._stay_tokens + num_tokens
            self._view = None

    def learn_first(self, model: ModelId, num_tokens: int, seconds: float) -> None:
        """Learn from the first token of a stay, for which so many tokens were computed; with its waits."""
        if num_tokens >= _LEAST_TOKENS and seconds > 0:
            self._compute.setdefault(model, _Rate()).add(seconds, num_tokens)

    def compute_s(self, model: ModelId, num_tokens: int) -> float:
        """Return how long a request waits until so many tokens are computed; before the first as prefills."""
        rate = self._compute.get(model, _Rate()).value
        return self.view().prefill_s(num_tokens) if rate is None else rate * num_tokens

    def forget(self, model: ModelId) -> None:
        """Forget a model that was removed."""
        self._compute.pop(model, None)

    def learn_save(self, num_bytes: int, seconds: float) -> None:
        """Learn how long KV blocks took to be copied to a store; short copies tell of waits alone."""
        if num_bytes >= _LEAST_COPY_BYTES:
            self._save.add(seconds, num_bytes)

    def learn_restore(self, num_bytes: int, seconds: float, num_tokens: int = 0) -> None:
        """Learn how long they took to be copied from it, likewise."""
        if num_bytes >= _LEAST_COPY_BYTES:
            self._restore.add(seconds, num_bytes)
            if num_tokens:
                self._restore_tokens.add(seconds, num_tokens)
                self._view = None

    def learn_return(self, num_tokens: int, num_kept: int) -> None:
        """Learn of how many of its tokens an evicted request had KV blocks when it went on, in any order."""
        self._num_kept, self._num_returned = self._num_kept + num_kept, self._num_returned + num_tokens
        self._view = None

    def save_s(self, num_bytes: int) -> float:
        """Return how long saving KV blocks takes; 0 before the first."""
        return (self._save.value or 0.0) * num_bytes

    def restore_s(self, num_bytes: int) -> float:
        """Return how long restoring them takes, likewise."""
        return (self._restore.value or 0.0) * num_bytes

    def view(self) -> TimesView:
        """Return what is known now; the same object until that changes."""
        if self._view is None:
            prefill_start_s, prefill_token_s = self._prefills.line()
            self._view = TimesView(
                unload_s=self._unload.value or 0.0,
                load_bytes_per_s=tuple(
                    (tier, value) for tier, rate in sorted(self._loads.items()) if (value := rate.value)
                ),
                prefill_start_s=prefill_start_s,
                prefill_token_s=prefill_token_s,
                restore_token_s=self._restore_tokens.value or 0.0,
                kept_share=self._num_kept / self._num_returned if self._num_returned else 0.0,
                token_s=self._stay_s / self._stay_tokens if self._stay_tokens else USUAL_TOKEN_S,
            )
        return self._view
