"""Pages of one size, of which stores make room for blocks of any size."""

from __future__ import annotations

from array import array
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

__all__ = ["PAGE_BYTES", "PagePool", "Pages", "whole_pages"]

PAGE_BYTES = 4096

Pages: TypeAlias = npt.NDArray[np.int64]
"""The pages of one block, in order."""


def whole_pages(block_bytes: int) -> int:
    """Return the bytes of the pages of a block."""
    return -(-block_bytes // PAGE_BYTES) * PAGE_BYTES


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
