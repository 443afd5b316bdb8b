"""Pages of one size, of which stores make room for blocks of any size."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

__all__ = ["PAGE_BYTES", "PAGE_DTYPE", "PagePool", "Pages", "packed_pages", "whole_pages"]

PAGE_BYTES = 4096
PAGE_DTYPE: Final = np.dtype("<i8")
"""Numbers of pages as they are sent to another process."""

Pages: TypeAlias = npt.NDArray[np.int64]
"""The pages of one block, in order."""


def whole_pages(block_bytes: int) -> int:
    """Return the bytes of the pages of a block."""
    return -(-block_bytes // PAGE_BYTES) * PAGE_BYTES


def packed_pages(blocks: Sequence[Pages]) -> memoryview:
    """Return the pages of blocks, one after another, as they are sent to another process."""
    whole: Pages = np.concatenate([np.empty(0, np.int64), *blocks])
    return memoryview(whole.astype(PAGE_DTYPE).tobytes())


class PagePool:
    """Gives pages to blocks. Those that were used before are given first.

    A block takes whole pages, wherever they are, so that no room is lost between blocks of different sizes.

    Args:
        num_pages: How many there are.

    Attributes:
        num_fresh: Pages that were never taken begin there.
    """

    def __init__(self, num_pages: int) -> None:
        self._num_pages = num_pages
        self.num_fresh = 0
        self._free = array("q")

    def allocate(self, block_bytes: int) -> Pages:
        """Return free pages for a block; the caller keeps count of them."""
        count = whole_pages(block_bytes) // PAGE_BYTES
        reused = min(count, len(self._free))
        pages = self._free[len(self._free) - reused :]
        del self._free[len(self._free) - reused :]
        fresh = range(self.num_fresh, self.num_fresh + count - reused)
        assert fresh.stop <= self._num_pages, "a pool of pages is over full"
        self.num_fresh = fresh.stop
        return np.array([*pages, *fresh], np.int64)

    def free(self, pages: Pages) -> None:
        """Take pages back."""
        self._free.extend(pages.tolist())
