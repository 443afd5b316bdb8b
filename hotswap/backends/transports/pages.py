"""Memory mapped by two processes: an unnamed file, freed with its last mapping."""

from __future__ import annotations

import fcntl
import mmap
import os
import sys
from typing import Self

from hotswap.backends.memory import nameless_file

__all__ = ["SharedPages"]

# A file that the other end could shorten would end this process with SIGBUS.
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW if sys.platform == "linux" else 0


class SharedPages:
    """A mapping of shared memory; `view` is all of it."""

    def __init__(self, file: int, size_bytes: int) -> None:
        self.view = memoryview(mmap.mmap(file, size_bytes))

    @classmethod
    def make(cls, size_bytes: int) -> tuple[Self, int]:
        """Map new memory; return it with the file for `adopt` in another process, which the caller closes.

        Raises:
            MemoryError: there is not enough memory.
        """
        try:
            file = nameless_file()
            try:
                os.ftruncate(file, size_bytes)
                if _SEALS:
                    fcntl.fcntl(file, fcntl.F_ADD_SEALS, _SEALS)
                return cls(file, size_bytes), file
            except BaseException:
                os.close(file)
                raise
        except (OSError, ValueError) as exc:
            raise MemoryError(f"There is no room for {size_bytes:,} bytes of shared memory.") from exc

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
        if _SEALS and fcntl.fcntl(file, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
            raise ValueError("shared memory was received that the other end could shorten")
        return cls(file, size_bytes)

    def close(self) -> None:
        """Release the view; the mapping lasts as long as any part of the view is used."""
        self.view.release()
