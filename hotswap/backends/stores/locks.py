"""Locks on single bytes of a file that the kernel ends with the process, however it ends.

They are Linux's *open file description* locks (`fcntl(2)`): they belong to who opened the file, so two stores
of one process exclude each other like two processes, and closing another descriptor of the file ends none, as
it would with POSIX record locks. `flock` knows only whole files, and a segment needs two locks. A byte that
is locked need not exist. Nothing here waits.
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
    """Whether this system has such locks, and files that can be filled with pages ahead of time."""
    return sys.platform == "linux" and hasattr(fcntl, "F_OFD_SETLK")


def lock(fd: int, byte: int, *, shared: bool) -> bool:
    """Lock one byte, or change the lock that is held on it; false if somebody else's is in the way.

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
    """End the lock on a byte, if it is held, also where a mapping keeps a copy of the descriptor open."""
    _fcntl(fd, fcntl.F_OFD_SETLK, fcntl.F_UNLCK, byte)


def release(fd: int) -> None:
    """End all locks that are held by what the descriptor has open, and close it.

    To close it would not be enough where a process was forked meanwhile: that one has it open too.
    """
    try:
        _fcntl(fd, fcntl.F_OFD_SETLK, fcntl.F_UNLCK, 0, _ALL)
    finally:
        os.close(fd)


def is_locked(fd: int, byte: int) -> bool:
    """Whether somebody else has a lock on the byte, of either kind."""
    found = struct.unpack(_FLOCK, _fcntl(fd, fcntl.F_OFD_GETLK, fcntl.F_WRLCK, byte))
    return bool(found[0] != fcntl.F_UNLCK)


def _fcntl(fd: int, command: int, kind: int, byte: int, size: int = 1) -> bytes:
    return fcntl.fcntl(fd, command, struct.pack(_FLOCK, kind, os.SEEK_SET, byte, size, 0))
