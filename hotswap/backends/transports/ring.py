"""Allocation of contiguous places in a ring buffer, freed in the order of allocation."""

from __future__ import annotations

from collections import deque

__all__ = ["Ring"]


class Ring:
    """Tracks the allocated places of a ring buffer; it has no memory itself. A place is contiguous.

    Args:
        size_bytes: The size of the ring.
        max_places: The most places allocated at a time.
    """

    def __init__(self, size_bytes: int, max_places: int) -> None:
        self.size_bytes, self._max_places = size_bytes, max_places
        self._allocated: deque[tuple[int, int]] = deque()  # start and end, oldest first

    @property
    def num_allocated(self) -> int:
        """How many places are allocated."""
        return len(self._allocated)

    def allocate(self, size_bytes: int) -> int | None:
        """Allocate a place and return its start; `None` if there is no room until places are freed."""
        assert 0 < size_bytes <= self.size_bytes, f"{size_bytes} bytes of a ring of {self.size_bytes}"
        start = self._start_for(size_bytes)
        if start is not None:
            self._allocated.append((start, start + size_bytes))
        return start

    def free(self, num_places: int) -> None:
        """Free the oldest places."""
        for _ in range(num_places):
            self._allocated.popleft()

    def undo(self) -> None:
        """Free the newest place."""
        self._allocated.pop()

    def _start_for(self, size_bytes: int) -> int | None:
        if not self._allocated:
            return 0
        if len(self._allocated) == self._max_places:
            return None
        oldest, head = self._allocated[0][0], self._allocated[-1][1]
        if head <= oldest:  # the places wrap around: the free bytes are in the middle
            return head if oldest - head >= size_bytes else None
        if self.size_bytes - head >= size_bytes:
            return head
        return 0 if oldest >= size_bytes else None
