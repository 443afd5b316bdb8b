"""Memory mapped by two processes: an unnamed file, freed with its last mapping."""

from __future__ import annotations

import fcntl
import mmap
import os
from typing import Self

from hotswap.backends.memory import SIZE_SEALS, map_shared

__all__ = ["SharedPages"]


class SharedPages:
    """A mapping of shared memory; `view` is all of it."""

    def __init__(self, memory: mmap.mmap) -> None:
        self.view = memoryview(memory)

    @classmethod
    def make(cls, size_bytes: int) -> tuple[Self, int]:
        """Map new memory; return it with the file for `adopt` in another process, which the caller closes.

        Raises:
            MemoryError: there is not enough memory.
        """
        memory, file = map_shared(size_bytes)
        return cls(memory), file

    @classmethod
    def adopt(cls, file: int, size_bytes: int) -> Self:
        """Map memory that another process has made.

        Raises:
            ValueError: it is not of this size, or could be shortened.
            OSError: it cannot be mapped.
        """
        if os.fstat(file).st_size != size_bytes:
            raise ValueError(
                f"shared memory of {os.fstat(file).st_size:,} bytes was received, not of {size_bytes:,}"
            )
        if SIZE_SEALS and fcntl.fcntl(file, fcntl.F_GET_SEALS) & SIZE_SEALS != SIZE_SEALS:
            raise ValueError("shared memory was received that the other end could shorten")
        return cls(mmap.mmap(file, size_bytes))

    def close(self) -> None:
        """Release the view; the mapping lasts as long as any part of the view is used."""
        self.view.release()
