"""How fast a tier has been lately."""

from __future__ import annotations

import threading
import time
from collections.abc import Generator
from contextlib import contextmanager

__all__ = ["Bandwidth", "Meter"]


class Bandwidth:
    """Bytes per second, relearned from every read: a ratio of sums in which older reads fade.

    Each observation halves in weight after `memory` further ones of its kind. Summing bytes and seconds apart
    weighs a read by its length, so a few tiny reads do not drown what the large ones said.
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
        """The estimate; the guess until something was read in a time that could be measured."""
        return self._bytes / self._seconds if self._seconds > 0 else self._guess


class Meter:
    """Learns what a disk gives to all threads together, from the time in which at least one of them read.

    May be used from any thread.
    """

    def __init__(self, guess_bytes_per_s: float) -> None:
        self._bandwidth = Bandwidth(guess_bytes_per_s)
        self._lock = threading.Lock()
        self._num_reading = 0
        self._since_s = 0.0

    @contextmanager
    def reading(self, size_bytes: int) -> Generator[None]:
        """Bracket a read; one that fails counts as time in which nothing came."""
        with self._lock:
            if not self._num_reading:
                self._since_s = time.perf_counter()
            self._num_reading += 1
        come_bytes = 0
        try:
            yield
            come_bytes = size_bytes
        finally:
            with self._lock:
                now_s = time.perf_counter()
                self._bandwidth.observe(come_bytes, now_s - self._since_s)
                self._since_s = now_s
                self._num_reading -= 1

    @property
    def bytes_per_s(self) -> float:
        """The estimate; see `Bandwidth`."""
        return self._bandwidth.bytes_per_s
