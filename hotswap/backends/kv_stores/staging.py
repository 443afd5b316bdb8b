"""Memory into which blocks are read: kept for the next read, and pinned where it goes to a device."""

from __future__ import annotations

from functools import partial

from hotswap.backends.memory import aligned_buffer, can_pin, pin, unpin
from hotswap.worker_threads import in_thread

__all__ = ["Staging"]

# So much is kept for the next reads.
_KEPT_BYTES = 16 << 20


class Staging:
    """Memory for reads, of which the pages are there if they were before."""

    def __init__(self) -> None:
        self._idle: list[memoryview] = []
        self._lent: dict[int, memoryview] = {}
        self._pinned: set[int] = set()

    async def take(self, size_bytes: int) -> memoryview:
        """Return memory of a length, to be given to `give_back`; new memory is pinned in a worker thread."""
        while (out := self._take_idle(size_bytes)) is None:  # another read may take what is added
            await in_thread(partial(self._add, size_bytes))
        return out

    def give_back(self, data: memoryview) -> None:
        """Take such memory back; other memory is left alone."""
        memory = self._lent.pop(id(data), None)
        if memory is None:
            return
        self._idle.insert(0, memory)
        while sum(map(len, self._idle)) > _KEPT_BYTES:
            self._drop(self._idle.pop())

    def close(self) -> None:
        """Give all memory back to the system."""
        while self._idle:
            self._drop(self._idle.pop())

    def _take_idle(self, size_bytes: int) -> memoryview | None:
        at = next((at for at, idle in enumerate(self._idle) if len(idle) >= size_bytes), None)
        if at is None:
            return None
        memory = self._idle.pop(at)
        out = memory[:size_bytes]
        self._lent[id(out)] = memory
        return out

    def _add(self, size_bytes: int) -> None:
        memory = aligned_buffer(size_bytes)
        if can_pin() and pin(memory):
            self._pinned.add(id(memory))
        self._idle.append(memory)

    def _drop(self, memory: memoryview) -> None:
        if id(memory) in self._pinned:
            self._pinned.discard(id(memory))
            unpin(memory)
