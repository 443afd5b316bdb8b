"""Memory for KV blocks: of a `HostKVStore`, and what a host lends to its controller."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
from anyio.lowlevel import checkpoint

from hotswap.backends.kv_stores.pages import PAGE_BYTES, PagePool, Pages
from hotswap.backends.kv_stores.staging import Staging
from hotswap.backends.memory import aligned_buffer, can_pin, populate
from hotswap.worker_threads import in_thread

__all__ = ["Arena"]

# Copies of more bytes are made in a thread.
_MOST_INLINE_BYTES = 256 << 10

# Pages of so many bytes are had at once.
_POPULATED_BYTES = 16 << 20


class Arena:
    """Memory for blocks, allocated page by page. `write` and `read` may run in any thread.

    Pages that were written before are taken first. Those that come next may be had from the system ahead.

    Args:
        size_bytes: The most that all blocks take.

    Attributes:
        num_pages: How many pages it has.

    Raises:
        MemoryError: the system has no such room.
    """

    def __init__(self, size_bytes: int) -> None:
        self.num_pages = num_pages = size_bytes // PAGE_BYTES
        self._pool, self._staging = PagePool(num_pages), Staging()
        self._num_populated = 0
        memory = aligned_buffer(num_pages * PAGE_BYTES)
        self._memory: memoryview | None = memory[: num_pages * PAGE_BYTES]
        self._pages: npt.NDArray[np.uint8] = np.frombuffer(self._memory, np.uint8).reshape(-1, PAGE_BYTES)

    # ------------------------------------------------------------------ pages ahead

    def lacking(self, ahead_bytes: int) -> range:
        """Return which of the next pages, up to so many bytes, the system has yet to give; a few at once."""
        first = max(self._num_populated, self._pool.num_fresh)
        end = min(self.num_pages, self._pool.num_fresh + ahead_bytes // PAGE_BYTES)
        return range(first, min(end, first + _POPULATED_BYTES // PAGE_BYTES))

    def populate(self, pages: range) -> bool:
        """Have them from the system; false if it cannot do so. Blocking, in any thread."""
        assert self._memory is not None, "an arena is closed"
        self._num_populated = pages.stop
        return populate(self._memory[pages.start * PAGE_BYTES : pages.stop * PAGE_BYTES])

    # ------------------------------------------------------------------ blocks

    def allocate(self, block_bytes: int) -> Pages:
        """Return free pages for a block; the caller keeps count of them."""
        return self._pool.allocate(block_bytes)

    def free(self, pages: Pages) -> None:
        """Take pages back."""
        self._pool.free(pages)

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

    # ------------------------------------------------------------------ off the loop

    async def fill(self, blocks: Sequence[Pages], data: memoryview) -> None:
        """Copy blocks of equal size to their pages; a cancellation waits for the end of the copy."""
        copy = partial(self.write, blocks, data)
        if len(data) <= _MOST_INLINE_BYTES:
            copy()
            await checkpoint()
        else:
            await in_thread(copy)

    async def content(self, blocks: Sequence[Pages], block_bytes: int) -> memoryview:
        """Return the content of blocks, one after another; `done` takes the memory back."""
        if (lent := self.in_place(blocks, block_bytes)) is not None:
            await checkpoint()
            return lent
        out = await self._staging.take(len(blocks) * block_bytes)
        copy = partial(self.read, blocks, out, block_bytes)
        try:
            if len(out) <= _MOST_INLINE_BYTES:
                copy()
                await checkpoint()
            else:
                await in_thread(copy)
        except BaseException:
            self._staging.give_back(out)
            raise
        return out

    def done(self, data: memoryview) -> None:
        """Take back what `content` returned."""
        self._staging.give_back(data)

    def close(self) -> None:
        """Give all memory back; nothing may be read or written any more."""
        self._staging.close()
        self._pages, self._memory = _no_pages(), None


def _no_pages() -> npt.NDArray[Any]:
    return np.empty((0, PAGE_BYTES), np.uint8)
