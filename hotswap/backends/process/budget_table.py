"""The file in which the processes of a machine keep the accounts of a device budget.

    /dev/shm/hotswap-budget-1000-gpu0/     one for each user and name; there while there are leases
        table                              all accounts; locked while they are read and changed
        4242-5f0c2d1a.sock                 a process that has leases, by which others wake it

The table has two places for its content, and a header that says which one counts. The header is written last:
a process that is killed at any moment leaves the accounts as they were, or as it has changed them.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import socket
import stat
import struct
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

from hotswap.backends.stores.files import is_at
from hotswap.backends.stores.locks import LockWait, unlock_whole
from hotswap.budget_accounts import size_text
from hotswap.errors import ConfigError, OutOfMemory, StoreBusy

__all__ = ["MOST_LEASES", "MOST_LETTERS", "BudgetTable", "TableRow"]

# So that the rows of all leases fit into a place of the table; a letter takes up to 12 bytes.
MOST_LEASES, MOST_LETTERS = 512, 100

_LOCK_S: Final = 10.0
_HEADER: Final = struct.Struct("<QQ")  # how often it was written, and how long the content is
_FIRST, _PLACE_BYTES = 4096, 1 << 20


class TableRow(NamedTuple):
    """An account as the table has it; `member` names the process that has the lease."""

    holder: str
    member: str
    floor: int
    ceiling: int
    held: int
    wanted: int


class BudgetTable:
    """The table of one budget. Lock it to read and to write it; used by one thread at a time.

    Args:
        name: Of the budget.
        size: Of the memory in bytes; all accounts are of a budget of this size.
    """

    def __init__(self, name: str, size: int) -> None:
        memory = Path("/dev/shm")
        within = memory if memory.is_dir() else Path(tempfile.gettempdir())
        self._directory = within / f"hotswap-budget-{os.geteuid()}-{name}"
        self._name, self._size = name, size
        self._file, self._count = -1, 0
        self._rows: tuple[TableRow, ...] = ()

    def lock(self) -> tuple[TableRow, ...]:
        """Lock the table, which is made if there is none, and return its rows: one object until they change.

        Raises:
            OutOfMemory: another process has kept it locked for ten seconds.
            ConfigError: it cannot be used, or has accounts of a budget of another size.
        """
        try:
            self._open()
            self._read()
        except BaseException:
            self.unlock(keep=False)
            raise
        return self._rows

    def write(self, rows: tuple[TableRow, ...]) -> None:
        """Replace the rows of the locked table; without any, nothing of it is left.

        Raises:
            OutOfMemory: there is no room for the file; it is as it was.
        """
        if not rows:
            shutil.rmtree(self._directory, ignore_errors=True)
            return
        content = json.dumps([self._size, rows]).encode()
        try:
            os.pwrite(self._file, content, _offset(self._count + 1))
            os.pwrite(self._file, _HEADER.pack(self._count + 1, len(content)), 0)
        except OSError as exc:
            raise OutOfMemory(f"Device budget {self._name!r} cannot be written: {exc}") from exc
        self._rows, self._count = rows, self._count + 1

    def unlock(self, *, keep: bool) -> None:
        """Release the lock; `keep` the file open if the table is sure to stay."""
        if keep:
            fcntl.flock(self._file, fcntl.LOCK_UN)
        elif self._file >= 0:
            unlock_whole(self._file)
            self._file, self._count, self._rows = -1, 0, ()

    # ------------------------------------------------------------------ processes

    def bind(self, member: str) -> socket.socket:
        """Return the socket by which a process is woken; while it is open, the process counts as alive.

        Raises:
            ConfigError: it cannot be made.
        """
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            listening.bind(str(self._socket(member)))
        except OSError as exc:
            listening.close()
            raise ConfigError(f"Device budget {self._name!r} cannot be shared: {exc}") from exc
        return listening

    def is_alive(self, member: str) -> bool:
        """Whether the process of a member still has its socket open."""
        return self._reach(member, None)

    def wake(self, member: str) -> None:
        """Have a process look at the table; nothing happens if it has ended, or is to look already."""
        self._reach(member, b"\0")

    def forget(self, member: str) -> None:
        """Remove what is left of a process that has ended."""
        self._socket(member).unlink(missing_ok=True)

    def _reach(self, member: str, message: bytes | None) -> bool:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.setblocking(False)
            try:
                sender.connect(str(self._socket(member)))
                if message is not None:
                    sender.send(message)
            except OSError as exc:
                return exc.errno not in (errno.ECONNREFUSED, errno.ENOENT)
        return True

    def _socket(self, member: str) -> Path:
        return self._directory / f"{member}.sock"

    # ------------------------------------------------------------------ the file

    def _open(self) -> None:
        """Open the file, unless it is open, and lock it."""
        table, wait = self._directory / "table", LockWait(_LOCK_S)
        while True:
            if self._file < 0:
                self._file = self._opened(table)
            try:
                wait.until_locked(self._file, table, shared=False)
            except StoreBusy as exc:
                raise OutOfMemory(f"Device budget {self._name!r} cannot be read: {exc}") from exc
            if is_at(self._file, table):
                return
            self.unlock(keep=False)  # others have removed it with the last lease

    def _opened(self, table: Path) -> int:
        while True:
            try:
                with suppress(FileExistsError):
                    self._directory.mkdir(mode=0o700)
                found = self._directory.lstat()
                if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
                    raise ConfigError(f"{str(self._directory)!r} is no directory of this user; remove it.")
                return os.open(table, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            except FileNotFoundError:
                continue  # removed between the two
            except OSError as exc:
                raise ConfigError(f"Device budget {self._name!r} cannot be shared: {exc}") from exc

    def _read(self) -> None:
        try:
            header = os.pread(self._file, _HEADER.size, 0)
            count, length = _HEADER.unpack(header) if header else (0, 0)
            if count == self._count:
                return
            size, rows = json.loads(os.pread(self._file, min(length, _PLACE_BYTES), _offset(count)))
            found = tuple(TableRow(str(row[0]), str(row[1]), *map(int, row[2:])) for row in rows)
        except (ValueError, TypeError, LookupError, struct.error) as exc:
            raise ConfigError(
                f"{str(self._directory)!r} is no table of a device budget; remove it when no engine uses it."
            ) from exc
        if size != self._size:
            raise ConfigError(
                f"Device budget {self._name!r} has {size_text(self._size)} here and {size_text(size)} in "
                "another process that has leases; give both the same size."
            )
        self._rows, self._count = found, count


def _offset(count: int) -> int:
    return _FIRST + count % 2 * _PLACE_BYTES
