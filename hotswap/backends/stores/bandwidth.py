"""What a store shows of a tier: the models on it, and the bandwidth of past reads."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from itertools import chain

from hotswap.request import ModelId
from hotswap.view import Residency, StoreView

__all__ = ["Bandwidth", "JoinedResidents", "Meter", "Residents"]


class Residents:
    """The models on a tier and their bytes; what a view shows of them is made once for each change."""

    def __init__(self, tier: str) -> None:
        self.used_bytes = 0
        self._tier = tier
        self._by_model: dict[ModelId, Residency] = {}
        self._entries: tuple[Residency, ...] | None = ()

    def __len__(self) -> int:
        return len(self._by_model)

    @property
    def entries(self) -> tuple[Residency, ...]:
        """An entry for each model, the same object as long as nothing of it changes."""
        if self._entries is None:
            self._entries = tuple(self._by_model.values())
        return self._entries

    def put(self, model: ModelId, size_bytes: int) -> None:
        """Add a model, or change its size."""
        known = self._by_model.get(model)
        if known is None or known.size_bytes != size_bytes:
            self.remove(model)
            self._by_model[model] = Residency(model=model, tier=self._tier, size_bytes=size_bytes)
            self.used_bytes += size_bytes
            self._entries = None

    def remove(self, *models: ModelId) -> None:
        """Remove models, where they are there."""
        for model in models:
            if (known := self._by_model.pop(model, None)) is not None:
                self.used_bytes -= known.size_bytes
                self._entries = None


class JoinedResidents:
    """What a view shows of the models of several tiers, joined anew when one of them has changed."""

    def __init__(self) -> None:
        self._parts: list[tuple[Residency, ...]] = []
        self._entries: tuple[Residency, ...] = ()

    def of(self, views: Sequence[StoreView]) -> tuple[Residency, ...]:
        """The entries of all views, in their order."""
        parts = [view.residency for view in views]
        if parts != self._parts:
            self._parts, self._entries = parts, tuple(chain.from_iterable(parts))
        return self._entries


class Bandwidth:
    """Bytes per second over recent reads: a ratio of sums in which older reads fade.

    An observation halves in weight after `memory` further ones. Bytes and seconds are summed apart, so a read
    counts by its length: a few tiny reads do not outweigh large ones.
    """

    def __init__(self, guess_bytes_per_s: float, *, memory: int = 32) -> None:
        self._fade = 0.5 ** (1 / memory)
        self._guess = guess_bytes_per_s
        self._bytes = 0.0
        self._seconds = 0.0

    def observe(self, size_bytes: int, seconds: float) -> None:
        """Count a read of `size_bytes` that took `seconds`."""
        self._bytes = self._bytes * self._fade + size_bytes
        self._seconds = self._seconds * self._fade + max(seconds, 0.0)

    @property
    def bytes_per_s(self) -> float:
        """The estimate; the guess until a read has taken a measurable time."""
        return self._bytes / self._seconds if self._seconds > 0 else self._guess


class Meter:
    """Measures the bandwidth of all concurrent reads together, over the time in which at least one runs.

    May be used from any thread. `clock` counts seconds.
    """

    def __init__(self, guess_bytes_per_s: float, clock: Callable[[], float] = time.perf_counter) -> None:
        self._bandwidth = Bandwidth(guess_bytes_per_s)
        self._clock = clock
        self._lock = threading.Lock()
        self._num_reading = 0
        self._since_s = 0.0

    @contextmanager
    def reading(self, size_bytes: int) -> Generator[None]:
        """Count a read of `size_bytes`; one that fails counts as time in which no bytes arrived."""
        self.begin()
        done_bytes = 0
        try:
            yield
            done_bytes = size_bytes
        finally:
            self.end(done_bytes)

    def begin(self) -> None:
        """Begin a read, to be ended by `end`."""
        with self._lock:
            if not self._num_reading:
                self._since_s = self._clock()
            self._num_reading += 1

    def end(self, done_bytes: int) -> None:
        """End a read that brought `done_bytes`."""
        with self._lock:
            now_s = self._clock()
            self._bandwidth.observe(done_bytes, now_s - self._since_s)
            self._since_s = now_s
            self._num_reading -= 1

    @property
    def bytes_per_s(self) -> float:
        """The estimate; see `Bandwidth`."""
        return self._bandwidth.bytes_per_s
