"""Files of a store: opened without following links, and read past the page cache where that is allowed."""

from __future__ import annotations

import errno
import mmap
import os
import stat
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

from hotswap.backends.stores.fields import CONVERT_AGAIN
from hotswap.errors import ShardCorrupt, ShardMissing, StoreError, UnsafeFile

__all__ = ["BlockFile", "aligned_buffer", "map_read_errors", "open_regular", "read_small"]

_DIRECT: int = getattr(os, "O_DIRECT", 0)  # Linux alone has it


@contextmanager
def map_read_errors(path: Path) -> Generator[None]:
    """Turn what the operating system says about reading `path` into a `StoreError` that names it."""
    try:
        yield
    except (FileNotFoundError, NotADirectoryError) as exc:
        raise ShardMissing(f"There is no file {str(path)!r}. {CONVERT_AGAIN}") from exc
    except OSError as exc:
        if exc.errno == errno.ELOOP:
            raise _unsafe(path, "a symbolic link") from exc
        raise StoreError(f"Reading {str(path)!r} failed: {exc.strerror or exc}. Check the disk.") from exc


def aligned_buffer(size_bytes: int) -> memoryview:
    """Return writable anonymous memory that begins on a page, as direct reads and pinning ask for."""
    return memoryview(mmap.mmap(-1, size_bytes))


def open_regular(path: Path, flags: int = 0) -> int:
    """Open a regular file for reading and return its descriptor.

    Raises:
        ShardMissing: it is not there.
        UnsafeFile: it is a symbolic link or no regular file.
        StoreError: it cannot be opened.
    """
    with map_read_errors(path):
        # Non-blocking, because opening a FIFO would wait for a writer; regular files do not mind.
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | flags)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise _unsafe(path, "no regular file")
    return fd


def read_small(path: Path, *, most_bytes: int = 256 << 20) -> bytes:
    """Return a whole file, refusing one that is longer than any index or tokenizer."""
    with open(open_regular(path), "rb") as file, map_read_errors(path):
        size = os.fstat(file.fileno()).st_size
        if size > most_bytes:
            raise ShardCorrupt(
                f"{str(path)!r} is {size} bytes long, at most {most_bytes} make sense. {CONVERT_AGAIN}"
            )
        return file.read(size)


class BlockFile:
    """A data file for aligned reads: direct if asked for and not refused, else through the page cache.

    Blocking: use it in a worker thread. Offsets and sizes must be multiples of 4096 and buffers must begin on
    a page; a direct read that the kernel refuses all the same goes on buffered, and `refused` says so.
    """

    def __init__(self, path: Path, *, direct: bool = True) -> None:
        self._path = path
        self._direct = direct and bool(_DIRECT)
        self._fd = -1
        self.refused = False

    def open(self) -> None:
        """Open the file; see `open_regular` for the errors."""
        if self._direct:
            with suppress(StoreError):
                self._fd = open_regular(self._path, _DIRECT)
                return
            self._direct, self.refused = False, True
        self._fd = open_regular(self._path)

    def close(self) -> None:
        """Close the file; may be called twice, and before `open`."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def check_size(self, end_bytes: int) -> None:
        """Raise `ShardCorrupt` if the file ends before `end_bytes`."""
        with map_read_errors(self._path):
            size = os.fstat(self._fd).st_size
        if size < end_bytes:
            raise self._truncated(size, end_bytes)

    def read(self, buffer: memoryview, offset: int) -> None:
        """Fill the buffer from `offset`.

        Raises:
            ShardCorrupt: the file ends before the buffer is full.
            StoreError: the read failed.
        """
        done = 0
        while done < len(buffer):
            count = self._read_some(buffer[done:], offset + done)
            if not count:
                raise self._truncated(offset + done, offset + len(buffer))
            done += count

    def _read_some(self, buffer: memoryview, offset: int) -> int:
        with map_read_errors(self._path):
            try:
                return os.preadv(self._fd, [buffer], offset)
            except OSError as exc:
                if exc.errno != errno.EINVAL or not self._direct:
                    raise
            # The file system takes O_DIRECT but not this read (a larger block, or a short read before it).
            self._go_on_buffered()
            return os.preadv(self._fd, [buffer], offset)

    def _go_on_buffered(self) -> None:
        self.close()
        self._direct, self.refused = False, True
        self.open()

    def _truncated(self, size: int, end_bytes: int) -> ShardCorrupt:
        return ShardCorrupt(
            f"{str(self._path)!r} is truncated: it ends at byte {size}, its index says "
            f"{end_bytes}. {CONVERT_AGAIN}"
        )


def _unsafe(path: Path, what: str) -> UnsafeFile:
    return UnsafeFile(f"{str(path)!r} is {what}; a store reads regular files alone. {CONVERT_AGAIN}")
