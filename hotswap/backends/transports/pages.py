"""Memory that two processes map: a file without a name, whose pages go with the last of them."""

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
    """A mapping, whose `view` is all of it."""

    def __init__(self, file: int, size_bytes: int) -> None:
        self.view = memoryview(mmap.mmap(file, size_bytes))

    @classmethod
    def make(cls, size_bytes: int) -> tuple[Self, int]:
        """Map new memory, and return it with the file that another process may `adopt`; close that one.

        Raises:
            MemoryError: there is no room for it.
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
        """Map what another process has made.

        Raises:
            ValueError: it is not of this size, or could be shortened.
            OSError: it cannot be mapped.
        """
        if os.fstat(file).st_size != size_bytes:
            raise ValueError(f"shared memory of {os.fstat(file).st_size:,} bytes came, not of {size_bytes:,}")
        if _SEALS and fcntl.fcntl(file, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
            raise ValueError("shared memory came that the other end could shorten")
        return cls(file, size_bytes)

    def close(self) -> None:
        """Let go of it; the mapping lasts as long as somebody holds a part of the view."""
        self.view.release()
