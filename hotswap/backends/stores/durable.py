"""Writes that survive a crash: files and directories are synced to the disk."""

from __future__ import annotations

import errno
import os
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

from hotswap.errors import StoreError, TierFull

__all__ = ["map_write_errors", "sync_directory", "sync_file", "write_file"]

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


def write_file(path: Path, content: bytes) -> None:
    """Write a new file, and return when its content is on the disk."""
    with path.open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def sync_file(path: Path) -> None:
    """Return when a file is on the disk, and drop it from the page cache: it will be read directly."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        os.fsync(fd)
        with suppress(AttributeError, OSError):
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


def sync_directory(directory: Path) -> None:
    """Return when the names in a directory are on the disk."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextmanager
def map_write_errors(root: Path, needed_bytes: int) -> Generator[None]:
    """Turn an `OSError` of writing below `root` into a `StoreError` that names it."""
    try:
        yield
    except OSError as exc:
        if exc.errno in _FULL:
            raise TierFull(
                f"{str(root)!r} has no room for the {needed_bytes} bytes of the model ({exc.strerror}). "
                "Free some, or choose another root; nothing was changed."
            ) from exc
        raise StoreError(f"Writing to {str(root)!r} failed: {exc.strerror or exc}. Check the disk.") from exc
