"""`PhaseView`: where in a swap an instance is."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["PhaseView"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseView:
    """The phase of a swap that an instance is in.

    Attributes:
        name: As in `PhaseRecord`: `"preflight"`, `"preload"`, `"evict"`, `"unload"` or `"load"`.
        since_s: The loop time at which it began.
        loaded_bytes: Of the next model's weights, the bytes that the swap has read so far.
        total_bytes: Of how many; 0 for an unload.
    """

    name: str
    since_s: float
    loaded_bytes: int = 0
    total_bytes: int = 0

    @property
    def share(self) -> float:
        """The part of the weights that has been read, from 0 to 1; 0 where there is nothing to read."""
        return min(1.0, self.loaded_bytes / self.total_bytes) if self.total_bytes else 0.0
