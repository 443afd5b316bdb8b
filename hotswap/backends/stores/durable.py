"""Writing the files of a store: for its owner alone, and synced to the disk, to survive a crash."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Generator
from contextlib import contextmanager, suppress
from io import BufferedWriter
from pathlib import Path

from hotswap.errors import StoreError, TierFull

__all__ = [
    "create_file",
    "make_root",
    "map_write_errors",
    "sync_directory",
    "sync_file",
    "warn_of_other_users",
    "write_file",
]

_log = logging.getLogger("hotswap.stores")

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.ENOMEM})


def make_root(root: Path) -> None:
    """Make the directory of a store, which its owner alone can enter, unless it exists."""
    root.mkdir(mode=0o700, parents=True, exist_ok=True)


def warn_of_other_users(root: Path) -> None:
    """Log a warning if other users can enter a store that exists: its mode is its owner's choice."""
    with suppress(OSError):
        if (mode := root.stat().st_mode) & 0o077:
            _log.warning(
                "%r has mode %o: other users can enter it, and hold locks that loads then wait for. "
                "Run `chmod 700` on it.",
                str(root),
                mode & 0o777,
            )


def create_file(path: Path) -> BufferedWriter:
    """Create a file to write, which its owner alone can read; `FileExistsError` if it exists."""
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb")


def write_file(path: Path, content: bytes) -> None:
    """Write a new file, and return when its content is on the disk."""
    with create_file(path) as file:
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
def map_write_errors(root: Path, needed_bytes: int = 0, *, memory: bool = False) -> Generator[None]:
    """Turn an `OSError` of writing below `root` into a `StoreError` that names it.

    Args:
        root: A directory on a disk, or with `memory` one in host memory.
        needed_bytes: The bytes of the model that is written there, for the message.
        memory: Whether what was not in use may have been evicted before.
    """
    try:
        yield
    except OSError as exc:
        reason = exc.strerror or str(exc)
        if exc.errno in _FULL and memory:
            raise TierFull(
                f"The memory behind {str(root)!r} is full ({reason}), so the model is not kept "
                "there; idle ones may have been evicted. Name a smaller budget, or give that file system, or "
                "the container, more room."
            ) from exc
        if exc.errno in _FULL:
            raise TierFull(
                f"{str(root)!r} has no room for the {needed_bytes} bytes of the model ({reason}). "
                "Free some, or choose another root; nothing was changed."
            ) from exc
        if memory:
            raise StoreError(f"{str(root)!r} cannot be used: {reason}.") from exc
        raise StoreError(f"Writing to {str(root)!r} failed: {reason}. Check the disk.") from exc
