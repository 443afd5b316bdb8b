"""Measured bandwidth of a tier."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager

__all__ = ["Bandwidth", "Meter"]


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
