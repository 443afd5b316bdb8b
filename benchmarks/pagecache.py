"""The page cache of a few files: emptied, filled, and looked at, since what was not verified was not cold."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

__all__ = ["empty", "fill", "resident_share"]

_DROP_ALL = Path("/proc/sys/vm/drop_caches")
_PIECE_BYTES = 8 << 20


def empty(files: Sequence[Path]) -> float:
    """Drop the files from the page cache; return the share of them that stayed, 0 if all is cold.

    Asks for these files alone first; only if the kernel kept pages, and the process may, is the whole cache
    of the machine dropped.
    """
    for file in files:
        with _opened(file) as fd:
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    left = resident_share(files)
    if left > 0:
        with suppress(OSError):
            _DROP_ALL.write_text("1")
            left = resident_share(files)
    return left


def fill(files: Sequence[Path]) -> float:
    """Read the files through the page cache; return the share of them that is there, 1 if all is warm."""
    piece = bytearray(_PIECE_BYTES)
    for file in files:
        with file.open("rb", buffering=0) as stream:
            while stream.readinto(piece):
                pass
    return resident_share(files)


def resident_share(files: Sequence[Path]) -> float:
    """The share of the files' pages that the page cache holds, by `mincore(2)`."""
    pages = resident = 0
    for file in files:
        if size := file.stat().st_size:
            in_core = _pages_in_core(file, size)
            pages += len(in_core)
            resident += sum(map(in_core.count, range(1, 256, 2)))
    return resident / pages if pages else 0.0


def _pages_in_core(file: Path, size: int) -> bytes:
    """One byte a page, its lowest bit set for a page that is resident."""
    libc = ctypes.CDLL(None, use_errno=True)
    vector = ctypes.create_string_buffer(-(-size // mmap.PAGESIZE))
    # A private mapping can be asked for its address, and is never written to.
    with (
        _opened(file) as fd,
        mmap.mmap(fd, size, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE) as pages,
    ):
        first = ctypes.c_char.from_buffer(pages)
        failed = libc.mincore(ctypes.c_void_p(ctypes.addressof(first)), ctypes.c_size_t(size), vector)
        del first
    if failed:
        raise OSError(ctypes.get_errno(), f"mincore of {str(file)!r} failed")
    return vector.raw


class _opened:
    """A descriptor for reading."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def __enter__(self) -> int:
        self._fd = os.open(self._file, os.O_RDONLY | os.O_CLOEXEC)
        return self._fd

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)
