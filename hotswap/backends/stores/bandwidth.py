"""How fast a tier has been lately."""

from __future__ import annotations

__all__ = ["Bandwidth"]


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
