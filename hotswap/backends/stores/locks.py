"""Locks of files, which the kernel releases when the process ends, and bounded waits for them.

Whole files and directories are locked by `flock`. Single bytes of a file are locked by Linux's *open file
description* locks (`fcntl(2)`), because a segment needs two locks. Both belong to an open file: two stores of
one process exclude each other like two processes, and closing another descriptor of the file releases none,
as it would with POSIX record locks. A locked byte need not exist.

No call of the kernel waits here: a stopped process, or another user's, may hold a lock for ever. A `LockWait`
tries again until its limit, or until it is cancelled.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
import sys
import threading
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from hotswap.backends.stores.files import is_at
from hotswap.errors import StoreBusy

__all__ = [
    "LOCK_LIMIT_S",
    "LockWait",
    "holder_of",
    "is_locked",
    "lock",
    "lock_whole",
    "locked",
    "pauses",
    "release",
    "supported",
    "unlock",
    "unlock_whole",
]

LOCK_LIMIT_S = 30.0  # locks are held for as long as the removal of a model takes

_FLOCK = "hhqqi4x"  # struct flock where off_t has 64 bits: type, whence, start, length, pid
_ALL = 0  # the length that means all bytes from the first one on
_NO_LOCKS = frozenset({errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS})


# --------------------------------------------------------------------------------- whole files, directories


class LockWait:
    """Waits for locks in a worker thread: `limit_s` for each at most, and only until `cancelled` is set."""

    def __init__(self, limit_s: float = LOCK_LIMIT_S) -> None:
        self.limit_s = limit_s
        self.cancelled = threading.Event()

    def until_locked(self, fd: int, path: Path, *, shared: bool) -> None:
        """Lock an open file, trying again with growing pauses. Blocking.

        Raises:
            StoreBusy: another process has kept the lock for all that time, or the wait was cancelled.
        """
        end_s = time.monotonic() + self.limit_s
        for pause_s in pauses():
            with suppress(BlockingIOError):
                lock_whole(fd, shared=shared)
                return
            if time.monotonic() >= end_s:
                raise StoreBusy(
                    f"{str(path)!r} has been locked by {holder_of(path)} for {self.limit_s:g} s. "
                    "If that process hangs, end it and its child processes; nothing was changed."
                )
            if self.cancelled.wait(min(pause_s, max(0.0, end_s - time.monotonic()))):
                raise StoreBusy(f"The wait for the lock of {str(path)!r} was cancelled.")


@contextmanager
def locked(path: Path, wait: LockWait | None = None, *, follow: bool = False) -> Generator[None]:
    """Hold the exclusive lock of a file or directory while the block runs; a link is refused unless `follow`.

    Raises:
        BlockingIOError: it is locked, and there is no `wait`.
        StoreBusy: it was locked until the end of `wait`.
        FileNotFoundError: it does not exist, or was removed meanwhile.
    """
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW)
    fd = os.open(path, flags)
    try:
        if wait is None:
            lock_whole(fd, shared=False)
        else:
            wait.until_locked(fd, path, shared=False)
        if not is_at(fd, path):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
        yield
    finally:
        unlock_whole(fd)


def lock_whole(fd: int, *, shared: bool) -> None:
    """Lock an open file or directory; on a file system without locks this does nothing.

    Raises:
        BlockingIOError: another lock conflicts.
    """
    try:
        fcntl.flock(fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except OSError as exc:
        if exc.errno not in _NO_LOCKS:
            raise


def unlock_whole(fd: int) -> None:
    """Unlock and close; closing alone would not unlock where a child process has inherited the descriptor."""
    with suppress(OSError):
        fcntl.flock(fd, fcntl.LOCK_UN)
    os.close(fd)


def pauses(*, most_s: float = 0.05) -> Iterator[float]:
    """Growing pauses between attempts that wait for another process, without end."""
    pause_s = 0.001
    while True:
        yield pause_s
        pause_s = min(2 * pause_s, most_s)


def holder_of(path: Path) -> str:
    """Describe the process that has locked a file, as far as the system tells."""
    with suppress(OSError, ValueError, IndexError):
        status = path.stat()
        place = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
        for line in Path("/proc/locks").read_text("ascii").splitlines():
            fields = line.split()
            if fields[1] != "->" and fields[5] == place and int(fields[4]) > 0:
                return _process(int(fields[4]))
    return "another process"


def _process(pid: int) -> str:
    """Name a process, with what may explain that it keeps a lock."""
    name, _, rest = Path(f"/proc/{pid}/stat").read_text("utf-8", "replace").rpartition(")")
    facts = [repr(name.partition("(")[2])]
    if rest.split()[0] in "Tt":
        facts.append("stopped")
    if (user := Path(f"/proc/{pid}").stat().st_uid) != os.geteuid():
        facts.append(f"of user {user}")
    return f"process {pid} ({', '.join(facts)})"


# ------------------------------------------------------------------------------------------- single bytes


def supported() -> bool:
    """Whether this system locks single bytes, and can allocate the pages of a file ahead of time."""
    return sys.platform == "linux" and hasattr(fcntl, "F_OFD_SETLK")


def lock(fd: int, byte: int, *, shared: bool) -> bool:
    """Lock one byte, or change the lock held on it; false if another lock conflicts.

    An exclusive lock needs a descriptor for writing.
    """
    try:
        _fcntl(fd, fcntl.F_OFD_SETLK, fcntl.F_RDLCK if shared else fcntl.F_WRLCK, byte)
    except OSError as exc:
        if exc.errno not in (errno.EAGAIN, errno.EACCES):
            raise
        return False
    return True


def unlock(fd: int, byte: int) -> None:
    """Release the lock on a byte, if it is held, also where a mapping keeps the file open."""
    _fcntl(fd, fcntl.F_OFD_SETLK, fcntl.F_UNLCK, byte)


def release(fd: int) -> None:
    """Release all locks of the bytes of an open file, and close its descriptor.

    Closing alone would not release them where a child process has inherited the descriptor.
    """
    try:
        _fcntl(fd, fcntl.F_OFD_SETLK, fcntl.F_UNLCK, 0, _ALL)
    finally:
        os.close(fd)


def is_locked(fd: int, byte: int) -> bool:
    """Whether another open file has a lock on the byte, of either kind."""
    found = struct.unpack(_FLOCK, _fcntl(fd, fcntl.F_OFD_GETLK, fcntl.F_WRLCK, byte))
    return bool(found[0] != fcntl.F_UNLCK)


def _fcntl(fd: int, command: int, kind: int, byte: int, size: int = 1) -> bytes:
    return fcntl.fcntl(fd, command, struct.pack(_FLOCK, kind, os.SEEK_SET, byte, size, 0))
