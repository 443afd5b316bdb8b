"""The directory of a `SharedKVStore`: its lock, its leases, and the files of its blocks.

    /dev/shm/chats/        for its owner alone
        lock               locked while the log is read and changed; its bytes are locked as leases
        log                see `shared_log`
        100000001 ...      a block each; the upper digits name the process that wrote it

Files are read and written, never mapped: no room, or a file that was cut off, is an error and no signal. The
kernel releases locks when a process ends, however that is.
"""

from __future__ import annotations

import fcntl
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from hotswap.backends.crc import crc32
from hotswap.backends.kv_stores.shared_errors import refused
from hotswap.backends.kv_stores.shared_log import NAMES
from hotswap.backends.stores import locks
from hotswap.backends.stores.files import is_at, make_root
from hotswap.errors import ConfigError, StoreError

__all__ = ["BlockFile", "SharedDirectory", "first_of", "member_of"]

# How often a lock that another process has is tried again; it has it for microseconds.
_PAUSE_S: Final = 0.0002
_MEMBER_BITS: Final = 32


@dataclass(slots=True, eq=False)
class BlockFile:
    """The file of a block.

    Attributes:
        number: Its name; no other file had it before.
        crc: The CRC-32 of its content.
        is_there: Whether it was made.
        is_broken: Whether a read has failed.
    """

    number: int
    crc: int = 0
    is_there: bool = False
    is_broken: bool = False


def first_of(member: int) -> int:
    """Return the first number of a process, which it leases as long as it uses the store."""
    return member << _MEMBER_BITS


def member_of(number: int) -> int:
    """Return the process that a number belongs to."""
    return number >> _MEMBER_BITS


class SharedDirectory:
    """The files of one store, as one process uses them.

    `fill`, `read` and `delete_freed` block, in any thread; the rest belongs to the event loop.

    Args:
        path: Where it is.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock_path, self._prefix = path / "lock", f"{path}{os.sep}"
        self._lock = -1
        self._is_locked = False
        self._pause = threading.Event()  # is never set
        self._freed: deque[int] = deque()

    def open(self) -> None:
        """Open the directory, which is made if there is none.

        Raises:
            ConfigError: it is another user's, or has other files.
            StoreError: it cannot be used.
        """
        if not locks.supported():
            raise ConfigError("Sharing KV blocks needs Linux; use a HostKVStore here.")
        try:
            make_root(self.path)
            status = self.path.lstat()
            if status.st_uid != os.geteuid() or status.st_mode & 0o077:
                raise ConfigError(
                    f"{str(self.path)!r} is no directory of this user alone, and what users write would be "
                    "in it. Name one of your own, with `chmod 700`."
                )
            if not self._lock_path.exists() and any(self.path.iterdir()):
                raise ConfigError(
                    f"{str(self.path)!r} has files that are no KV store's; name a new directory."
                )
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            self._lock = os.open(self._lock_path, flags, 0o600)
        except OSError as exc:
            raise refused(self.path, "opened", exc) from exc

    def close(self) -> None:
        """Close it, and end all leases; may be called twice."""
        fd, self._lock = self._lock, -1
        if fd >= 0:
            locks.release(fd)

    # ------------------------------------------------------------------ the lock, and leases

    def try_lock(self, limit_s: float) -> bool:
        """Lock the directory; false if others have it locked all that time, or this process elsewhere.

        Raises:
            StoreError: the directory was removed.
        """
        if self._lock < 0 or self._is_locked:
            return False
        end_s = time.monotonic() + limit_s
        while True:
            with suppress(BlockingIOError):
                locks.lock_whole(self._lock, shared=False)
                break
            if time.monotonic() >= end_s:
                return False
            self._pause.wait(_PAUSE_S)
        self._is_locked = True
        if not is_at(self._lock, self._lock_path):
            self.unlock()
            raise StoreError(f"{str(self.path)!r} was removed; enter the KV store again.")
        return True

    def unlock(self) -> None:
        """Release the lock."""
        self._is_locked = False
        if self._lock >= 0:
            fcntl.flock(self._lock, fcntl.LOCK_UN)

    def lease(self, number: int) -> None:
        """Lease a number for this process."""
        if self._lock >= 0:
            locks.lock(self._lock, number, shared=True)

    def release(self, number: int) -> None:
        """End the lease of a number."""
        if self._lock >= 0:
            locks.unlock(self._lock, number)

    def is_leased(self, number: int) -> bool:
        """Whether another process leases a number."""
        return locks.is_locked(self._lock, number)

    # ------------------------------------------------------------------ files

    def fill(self, blocks: Sequence[BlockFile], data: memoryview) -> None:
        """Write blocks of equal size to their files.

        Raises:
            TierFull: there is no room for them.
            StoreError: they cannot be written.
        """
        self.delete_freed()
        size = len(data) // len(blocks)
        for at, block in enumerate(blocks):
            content = data[at * size : (at + 1) * size]
            block.crc, block.is_there = crc32(content, 0), True
            try:
                self._write(block.number, content)
            except OSError as exc:
                raise refused(self.path, "written to", exc) from exc

    def read(self, blocks: Sequence[BlockFile], out: memoryview) -> None:
        """Copy blocks of equal size to memory, one after another.

        Raises:
            StoreError: a file is gone, or has other bytes than were written; its block is broken.
        """
        size = len(out) // max(1, len(blocks))
        for at, block in enumerate(blocks):
            content = out[at * size : (at + 1) * size]
            try:
                is_whole = self._read(block.number, content)
            except OSError as exc:
                block.is_broken = True
                raise refused(self.path, "read", exc) from exc
            if not is_whole or crc32(content, 0) != block.crc:
                block.is_broken = True
                raise StoreError(
                    f"A KV block in {str(self.path)!r} reads otherwise than it was written. Find what writes "
                    "there; tokens are computed again."
                )

    def free(self, number: int, as_number: int) -> None:
        """Have a file be deleted, which is named otherwise at once: deleting takes a while."""
        with suppress(OSError):  # it is gone
            os.rename(self._file(number), self._file(as_number))
            self._freed.append(as_number)

    def delete_freed(self) -> None:
        """Delete what was freed."""
        with suppress(IndexError):
            while True:
                number = self._freed.popleft()
                with suppress(OSError):
                    os.unlink(self._file(number))

    def delete(self, is_left: Callable[[int], bool]) -> None:
        """Delete the files of blocks that are left, by their numbers.

        Raises:
            StoreError: they cannot be deleted.
        """
        try:
            for name in os.listdir(self.path):
                with suppress(ValueError):  # the name of another file
                    if is_left(int(name, 16)):
                        os.unlink(self.path / name)
        except OSError as exc:
            raise refused(self.path, "tidied", exc) from exc

    def remove(self) -> None:
        """Remove all that is a KV store's, and the directory, which is locked.

        Raises:
            StoreError: something else is in it, or it cannot be removed.
        """
        try:
            self.delete(lambda number: True)
            for name in NAMES:
                (self.path / name).unlink(missing_ok=True)
            self._lock_path.unlink()
            self.path.rmdir()
        except OSError as exc:
            raise refused(self.path, "removed", exc) from exc

    def _file(self, number: int) -> str:
        return f"{self._prefix}{number:x}"

    def _write(self, number: int, data: memoryview) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
        file = os.open(self._file(number), flags, 0o600)
        try:
            if len(data):
                os.posix_fallocate(file, 0, len(data))
            while len(data):
                data = data[os.write(file, data) :]
        finally:
            os.close(file)

    def _read(self, number: int, out: memoryview) -> bool:
        file = os.open(self._file(number), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            while len(out):
                if not (count := os.readv(file, [out])):
                    return False
                out = out[count:]
        finally:
            os.close(file)
        return True
