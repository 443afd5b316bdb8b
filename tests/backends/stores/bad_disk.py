"""A disk with faults that records every read."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from hotswap.backends.stores.files import FileCalls

Fault = Callable[[int, memoryview, int], int]


@dataclass(eq=False)
class BadDisk(FileCalls):
    """Reads like the operating system, until `fault` says otherwise for the `at`-th read.

    Attributes:
        fault: What happens instead of the read: it gets the descriptor, the buffer and the offset.
        at: Which read that is, counting from 0; `None` for every read.
        refuse: Whether opening for direct reads is refused, as on some file systems.
        reads: Offset and length of every read that was asked for.
        open_fds: What was opened and not closed.
    """

    fault: Fault | None = None
    at: int | None = None
    refuse: bool = False
    reads: list[tuple[int, int]] = field(default_factory=list)
    open_fds: set[int] = field(default_factory=set)

    def open(self, path: Path, flags: int) -> int:
        if self.refuse and flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        fd = super().open(path, flags)
        self.open_fds.add(fd)
        return fd

    def read(self, fd: int, buffer: memoryview, offset: int) -> int:
        turn = len(self.reads)
        self.reads.append((offset, len(buffer)))
        if self.fault is not None and self.at in (None, turn):
            return self.fault(fd, buffer, offset)
        return super().read(fd, buffer, offset)

    def close(self, fd: int) -> None:
        self.open_fds.discard(fd)
        super().close(fd)


def io_error(fd: int, buffer: memoryview, offset: int) -> int:
    """The device fails."""
    raise OSError(errno.EIO, "Input/output error")


def stale(fd: int, buffer: memoryview, offset: int) -> int:
    """The file vanished from a network file system."""
    raise OSError(errno.ESTALE, "Stale file handle")


def short(fd: int, buffer: memoryview, offset: int) -> int:
    """Fewer bytes than asked for, as a signal or a device may give; no fault if one asks again."""
    return os.preadv(fd, [buffer[: max(4096, len(buffer) // 2)]], offset)


def ragged(fd: int, buffer: memoryview, offset: int) -> int:
    """Fewer bytes, and the next read is not aligned."""
    data = os.preadv(fd, [buffer], offset)
    return max(1, data - 1234)


def end(fd: int, buffer: memoryview, offset: int) -> int:
    """The file ends here."""
    return 0


def flipped(fd: int, buffer: memoryview, offset: int) -> int:
    """One bit is not what was written."""
    count = os.preadv(fd, [buffer], offset)
    buffer[count // 2] ^= 4
    return count
