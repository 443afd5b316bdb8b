"""The memory of a `HostKVStore`: pages of one size, of which blocks of any size are made."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from hotswap.backends.memory import aligned_buffer, can_pin, pin, unpin

__all__ = ["PAGE_BYTES", "Arena", "Pages"]

PAGE_BYTES = 4096
# Of the memory for copies, this much is kept for the next ones.
_KEPT_BYTES = 16 << 20

Pages: TypeAlias = npt.NDArray[np.int64]
"""The pages of one block, in order."""


class Arena:
    """Memory for blocks, allocated page by page. `write`, `read` and `add_staging` may run in any thread.

    A block takes whole pages, wherever they are, so that no room is lost between blocks of different sizes.
    Pages that were written before are taken first.

    Args:
        size_bytes: The most that all blocks take.

    Raises:
        MemoryError: the system has no such room.
    """

    def __init__(self, size_bytes: int) -> None:
        self._num_pages = size_bytes // PAGE_BYTES
        memory = aligned_buffer(self._num_pages * PAGE_BYTES)
        self._memory: memoryview | None = memory[: self._num_pages * PAGE_BYTES]
        self._pages: npt.NDArray[np.uint8] = np.frombuffer(self._memory, np.uint8).reshape(-1, PAGE_BYTES)
        self._num_fresh = 0  # pages that were never taken begin there
        self._free = array("q")
        self._idle: list[memoryview] = []
        self._staged: dict[int, memoryview] = {}
        self._pinned: set[int] = set()

    def size_of(self, block_bytes: int) -> int:
        """Return the bytes of the pages of a block."""
        return -(-block_bytes // PAGE_BYTES) * PAGE_BYTES

    def allocate(self, block_bytes: int) -> Pages:
        """Return free pages for a block; the caller keeps count of them."""
        count = self.size_of(block_bytes) // PAGE_BYTES
        reused = min(count, len(self._free))
        pages = self._free[len(self._free) - reused :]
        del self._free[len(self._free) - reused :]
        fresh = range(self._num_fresh, self._num_fresh + count - reused)
        assert fresh.stop <= self._num_pages, "an arena is over full"
        self._num_fresh = fresh.stop
        return np.array([*pages, *fresh], np.int64)

    def free(self, pages: Pages) -> None:
        """Take pages back."""
        self._free.extend(pages.tolist())

    # ------------------------------------------------------------------ content

    def write(self, blocks: Sequence[Pages], data: memoryview) -> None:
        """Copy blocks of equal size to their pages. Releases the interpreter lock."""
        rows = np.frombuffer(data, np.uint8).reshape(len(blocks), -1)
        for pages, row in zip(blocks, rows, strict=True):
            whole = len(row) // PAGE_BYTES
            self._pages[pages[:whole]] = row[: whole * PAGE_BYTES].reshape(whole, PAGE_BYTES)
            if rest := len(row) - whole * PAGE_BYTES:
                self._pages[pages[whole], :rest] = row[whole * PAGE_BYTES :]

    def read(self, blocks: Sequence[Pages], out: memoryview, block_bytes: int) -> None:
        """Copy blocks to memory, one after another. Releases the interpreter lock."""
        rows = np.frombuffer(out, np.uint8).reshape(len(blocks), block_bytes)
        whole = block_bytes // PAGE_BYTES
        for pages, row in zip(blocks, rows, strict=True):
            target = row[: whole * PAGE_BYTES].reshape(whole, PAGE_BYTES)
            np.take(self._pages, pages[:whole], axis=0, out=target, mode="clip")
            if rest := block_bytes - whole * PAGE_BYTES:
                row[whole * PAGE_BYTES :] = self._pages[pages[whole], :rest]

    def in_place(self, blocks: Sequence[Pages], block_bytes: int) -> memoryview | None:
        """Return the memory of blocks themselves if they lie one after another and need not be pinned."""
        if not blocks or not block_bytes:
            return memoryview(bytearray())
        if block_bytes % PAGE_BYTES or can_pin() or self._memory is None:
            return None
        pages = np.concatenate(list(blocks))
        if not bool(np.all(np.diff(pages) == 1)):
            return None
        first = int(pages[0]) * PAGE_BYTES
        return self._memory[first : first + len(pages) * PAGE_BYTES]

    # ------------------------------------------------------------------ memory for copies

    def add_staging(self, size_bytes: int) -> None:
        """Take memory for copies from the system, pinned where it can be, which takes a while."""
        memory = aligned_buffer(size_bytes)
        if can_pin() and pin(memory):
            self._pinned.add(id(memory))
        self._idle.append(memory)

    def staging(self, size_bytes: int) -> memoryview | None:
        """Return memory for a copy, to be given to `unstage`; `None` if none so long is left."""
        at = next((at for at, idle in enumerate(self._idle) if len(idle) >= size_bytes), None)
        if at is None:
            return None
        memory = self._idle.pop(at)
        out = memory[:size_bytes]
        self._staged[id(out)] = memory
        return out

    def unstage(self, data: memoryview) -> None:
        """Take such memory back; other memory is left alone."""
        memory = self._staged.pop(id(data), None)
        if memory is None:
            return
        self._idle.insert(0, memory)
        while sum(map(len, self._idle)) > _KEPT_BYTES:
            self._drop(self._idle.pop())

    def close(self) -> None:
        """Give all memory back; nothing may be read or written any more."""
        while self._idle:
            self._drop(self._idle.pop())
        self._pages, self._memory = _no_pages(), None

    def _drop(self, memory: memoryview) -> None:
        if id(memory) in self._pinned:
            self._pinned.discard(id(memory))
            unpin(memory)


def _no_pages() -> npt.NDArray[Any]:
    return np.empty((0, PAGE_BYTES), np.uint8)
