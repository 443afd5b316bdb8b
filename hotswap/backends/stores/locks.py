"""Locks on single bytes of a file, which the kernel releases when the process ends.

They are Linux's *open file description* locks (`fcntl(2)`). They belong to an open file: two stores of one
process exclude each other like two processes, and closing another descriptor of the file releases none, as
it would with POSIX record locks. `flock` locks whole files only, and a segment needs two locks. A locked byte
need not exist. Nothing here waits.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
import sys

__all__ = ["is_locked", "lock", "release", "supported", "unlock"]

_FLOCK = "hhqqi4x"  # struct flock where off_t has 64 bits: type, whence, start, length, pid
_ALL = 0  # the length that means all bytes from the first one on


def supported() -> bool:
    """Whether this system has such locks, and can allocate the pages of a file ahead of time."""
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
    """Release all locks of an open file, and close its descriptor.

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
