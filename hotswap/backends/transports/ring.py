"""Room in a ring of bytes, given out in order and given back in the same order."""

from __future__ import annotations

from collections import deque

__all__ = ["Ring"]


class Ring:
    """The books of one ring; the memory is elsewhere. A place is one piece, never across the end.

    Args:
        size_bytes: Of the ring.
        max_places: How many places may be taken at once.
    """

    def __init__(self, size_bytes: int, max_places: int) -> None:
        self.size_bytes, self._max_places = size_bytes, max_places
        self._taken: deque[tuple[int, int]] = deque()  # start and end, oldest first

    @property
    def num_taken(self) -> int:
        """How many places are taken."""
        return len(self._taken)

    def take(self, size_bytes: int) -> int | None:
        """Return where a place of so many bytes begins, `None` if there is no room before some come back."""
        assert 0 < size_bytes <= self.size_bytes, f"{size_bytes} bytes of a ring of {self.size_bytes}"
        start = self._start_for(size_bytes)
        if start is not None:
            self._taken.append((start, start + size_bytes))
        return start

    def give_back(self, num_places: int) -> None:
        """Give the oldest places back."""
        for _ in range(num_places):
            self._taken.popleft()

    def undo(self) -> None:
        """Give the newest place back."""
        self._taken.pop()

    def _start_for(self, size_bytes: int) -> int | None:
        if not self._taken:
            return 0
        if len(self._taken) == self._max_places:
            return None
        oldest, head = self._taken[0][0], self._taken[-1][1]
        if head <= oldest:  # the places go over the end of the ring: what is free lies in the middle
            return head if oldest - head >= size_bytes else None
        if self.size_bytes - head >= size_bytes:
            return head
        return 0 if oldest >= size_bytes else None
