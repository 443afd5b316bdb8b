"""The files of a store: opened safely, read past the page cache, written for their owner alone and synced.

Reads go past the page cache where the file system allows it. What is written survives a crash.
"""

from __future__ import annotations

import errno
import logging
import os
import stat
import threading
from collections.abc import Generator
from contextlib import contextmanager, suppress
from io import BufferedWriter
from pathlib import Path
from typing import Final

from hotswap.backends.fields import CONVERT_AGAIN
from hotswap.errors import ConfigError, ShardCorrupt, ShardMissing, StoreError, TierFull, UnsafeFile

__all__ = [
    "BlockFile",
    "FileCalls",
    "check_no_link",
    "create_file",
    "is_at",
    "make_root",
    "map_read_errors",
    "map_write_errors",
    "open_regular",
    "read_head",
    "read_small",
    "sync_directory",
    "sync_file",
    "warn_of_other_users",
    "write_file",
]

_log = logging.getLogger("hotswap.stores")
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.ENOMEM})
_NOT_ALLOWED = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})
_DIRECT: int = getattr(os, "O_DIRECT", 0)  # Linux alone has it
_DIRECT_REFUSED = (errno.EINVAL, errno.EOPNOTSUPP)
_BLOCK_BYTES = 4096


class FileCalls:
    """The system calls of reading data files; fault tests replace them."""

    def open(self, path: Path, flags: int) -> int:
        """Open for reading; the flags may include `O_DIRECT`."""
        return os.open(path, flags)

    def fstat(self, fd: int) -> os.stat_result:
        """Return a file's status."""
        return os.fstat(fd)

    def read(self, fd: int, buffer: memoryview, offset: int) -> int:
        """Read up to the buffer's length from `offset`; 0 at the end of the file."""
        return os.preadv(fd, [buffer], offset)

    def close(self, fd: int) -> None:
        """Close; the descriptor is not used again."""
        os.close(fd)


_CALLS: Final = FileCalls()


@contextmanager
def map_read_errors(path: Path) -> Generator[None]:
    """Turn an `OSError` of reading `path` into a `StoreError` that names it."""
    try:
        yield
    except (FileNotFoundError, NotADirectoryError) as exc:
        raise ShardMissing(f"There is no file {str(path)!r}. {CONVERT_AGAIN}") from exc
    except OSError as exc:
        if exc.errno == errno.ELOOP:
            raise _unsafe(path, "a symbolic link") from exc
        where, reason = str(exc.filename or path), exc.strerror or str(exc)
        raise StoreError(f"Reading {where!r} failed: {reason}. {_remedy(exc)}") from exc


def open_regular(path: Path, flags: int = 0, *, calls: FileCalls = _CALLS) -> int:
    """Open a regular file for reading and return its descriptor.

    Raises:
        ShardMissing: it does not exist.
        UnsafeFile: it is a symbolic link or no regular file.
        StoreError: it cannot be opened.
    """
    with map_read_errors(path):
        # Non-blocking: opening a FIFO would wait for a writer. It has no effect on regular files.
        fd = calls.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | flags)
        try:
            regular = stat.S_ISREG(calls.fstat(fd).st_mode)
        except BaseException:
            calls.close(fd)
            raise
    if not regular:
        calls.close(fd)
        raise _unsafe(path, "no regular file")
    return fd


def read_small(path: Path, *, most_bytes: int = 256 << 20) -> bytes:
    """Return the content of a file, refusing one that is longer than any index or tokenizer."""
    with open(open_regular(path), "rb") as file, map_read_errors(path):
        size = os.fstat(file.fileno()).st_size
        if size > most_bytes:
            raise ShardCorrupt(
                f"{str(path)!r} is {size} bytes long, over the limit of {most_bytes}. {CONVERT_AGAIN}"
            )
        return file.read(size)


def read_head(path: Path, size_bytes: int) -> tuple[bytes, bytes]:
    """Return the first bytes of a file, at most `size_bytes`, and its last two."""
    with open(open_regular(path), "rb", buffering=0) as file, map_read_errors(path):
        head = file.read(size_bytes)
        file.seek(-min(2, len(head)), os.SEEK_END)
        return head, file.read()


def check_no_link(directory: Path) -> None:
    """Raise `UnsafeFile` if a symbolic link has the name of a model's directory."""
    with map_read_errors(directory):
        is_link = directory.is_symlink()
    if is_link:
        raise UnsafeFile(
            f"{str(directory)!r} is a symbolic link; a store reads models inside its root only. Remove the "
            "link, and add the model with `hotswap store add`."
        )


def is_at(fd: int, path: Path) -> bool:
    """Whether the open file or directory still is the one at `path`."""
    try:
        return os.path.samestat(os.fstat(fd), path.stat())
    except FileNotFoundError:
        return False


class BlockFile:
    """A data file for aligned reads: direct if asked for and not refused, else through the page cache.

    Blocking: use it in worker threads, any number at a time. A direct read needs an offset, a size and a
    buffer aligned to 4096; one that the kernel refuses is repeated buffered.

    Attributes:
        refused: Whether direct reads were asked for and the file system refuses them.
    """

    def __init__(self, path: Path, *, direct: bool = True, calls: FileCalls = _CALLS) -> None:
        self._path = path
        self._calls = calls
        self._wants_direct = direct and bool(_DIRECT)
        self._direct_fd = self._buffered_fd = -1
        self._opening = threading.Lock()
        self._identity: tuple[int, ...] = ()
        self.refused = False

    @property
    def buffered(self) -> bool:
        """Whether reads go through the page cache."""
        return self.refused or not self._wants_direct

    def open(self) -> None:
        """Open the file, and remember its identity; see `open_regular` for the errors."""
        fd = self._open_direct() if self._wants_direct else self._open_buffered()
        self._identity = self._identity_of(fd)

    def close(self) -> None:
        """Close the file; may be called twice, and before `open`, but not while it is being read."""
        fds = (self._direct_fd, self._buffered_fd)
        self._direct_fd = self._buffered_fd = -1
        for fd in fds:
            if fd >= 0:
                self._calls.close(fd)

    def check_size(self, end_bytes: int) -> None:
        """Raise `ShardCorrupt` if the file ends before `end_bytes`."""
        with map_read_errors(self._path):
            size = self._calls.fstat(self._fd).st_size
        if size < end_bytes:
            raise self._truncated(size, end_bytes)

    def check_unchanged(self) -> None:
        """Raise `ShardCorrupt` if the file was written to or truncated since it was opened."""
        if self._identity_of(self._fd) != self._identity:
            raise self._changed()

    def read(self, buffer: memoryview, offset: int) -> None:
        """Fill the buffer from `offset`.

        Raises:
            ShardCorrupt: the file ends before the buffer is full, or was replaced.
            StoreError: the read failed.
        """
        done = 0
        while done < len(buffer):
            count = self._read_some(buffer[done:] if done else buffer, offset + done)
            if not count:
                raise self._truncated(offset + done, offset + len(buffer))
            done += count

    @property
    def _fd(self) -> int:
        return self._direct_fd if self._direct_fd >= 0 else self._buffered_fd

    def _read_some(self, buffer: memoryview, offset: int) -> int:
        with map_read_errors(self._path):
            # After a short read the rest may be unaligned, which is no refusal of direct reads.
            aligned = offset % _BLOCK_BYTES == 0
            if aligned and not self.buffered:
                try:
                    return self._calls.read(self._direct_fd, buffer, offset)
                except OSError as exc:
                    if exc.errno not in _DIRECT_REFUSED:
                        raise
                self.refused = True
            return self._calls.read(self._open_buffered(), buffer, offset)

    def _open_direct(self) -> int:
        try:
            self._direct_fd = open_regular(self._path, _DIRECT, calls=self._calls)
        except StoreError as exc:
            cause = exc.__cause__
            if not isinstance(cause, OSError) or cause.errno not in _DIRECT_REFUSED:
                raise
        else:
            return self._direct_fd
        self.refused = True
        return self._open_buffered()

    def _open_buffered(self) -> int:
        """The descriptor for buffered reads, opened once; it must be the file that was opened directly."""
        with self._opening:
            if self._buffered_fd < 0:
                self._buffered_fd = open_regular(self._path, calls=self._calls)
                if self._identity and self._identity_of(self._buffered_fd) != self._identity:
                    raise self._changed()
            return self._buffered_fd

    def _identity_of(self, fd: int) -> tuple[int, ...]:
        with map_read_errors(self._path):
            now = self._calls.fstat(fd)
        return now.st_dev, now.st_ino, now.st_size, now.st_mtime_ns

    def _changed(self) -> ShardCorrupt:
        return ShardCorrupt(
            f"{str(self._path)!r} was written to or replaced while it was being read. Load the model again; "
            "if it happens again, find the program that writes there."
        )

    def _truncated(self, size: int, end_bytes: int) -> ShardCorrupt:
        return ShardCorrupt(
            f"{str(self._path)!r} is truncated: it ends at byte {size}, its index says "
            f"{end_bytes}. {CONVERT_AGAIN}"
        )


def _unsafe(path: Path, what: str) -> UnsafeFile:
    return UnsafeFile(f"{str(path)!r} is {what}; a store reads regular files only. {CONVERT_AGAIN}")


def make_root(root: Path) -> None:
    """Make the directory of a store, which its owner alone can enter, unless it exists.

    Raises:
        ConfigError: something else is there.
    """
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as exc:
        raise ConfigError(
            f"{str(root)!r} cannot be the directory of a store: {exc.filename!r} is a file, or a link to "
            "nothing. Name another."
        ) from exc


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
        raise StoreError(f"Writing to {str(root)!r} failed: {reason}. {_remedy(exc)}") from exc


def _remedy(error: OSError) -> str:
    """What to do about an error, as a sentence."""
    if error.errno in _NOT_ALLOWED:
        return "Run as the user that the store belongs to, or name a directory of your own."
    return "Check the disk."
