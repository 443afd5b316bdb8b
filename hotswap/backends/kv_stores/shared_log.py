"""The log of a `SharedKVStore`: all changes, in order, which every process makes in its own index.

    magic, version, budget                 the header, written last: what is behind `end` does not count
    replaced, start, end, checksum
    length, checksum, JSON                 what one process has changed while it had the lock
    ...

A process that is killed at any moment leaves the log as it was, or as it has changed it. A log that has
become long is replaced by a shorter one of the same meaning, which begins with all that there is, up to
`start`. A process that has read the old one to its end goes on there.
"""

from __future__ import annotations

import json
import os
import struct
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final

from hotswap.backends.kv_stores.shared_errors import refused
from hotswap.backends.stores.files import is_at
from hotswap.errors import ConfigError, StoreError

__all__ = ["NAMES", "Op", "SharedLog"]

Op = list[Any]
"""A change: its name, and what it takes."""

NAMES: Final = ("log", "log.new")

_MAGIC, _VERSION = b"hotswKV\n", 1
_HEADER: Final = struct.Struct("<8sQQQQQ")  # magic, version, budget, how often it was replaced, start, end
_FRAME: Final = struct.Struct("<II")
_CRC: Final = struct.Struct("<I")
_FIRST: Final = 4096
# Memory is allocated in steps, so that a change that makes room is written in any case.
_STEP_BYTES, _SPARE_BYTES = 1 << 20, 256 << 10
_SHORT_BYTES: Final = 8 << 20


class SharedLog:
    """The log in one directory. Blocking, but never for another process: the caller has the lock.

    Args:
        directory: Where it is.
        capacity_bytes: The budget of the store; all processes give the same.
    """

    def __init__(self, directory: Path, capacity_bytes: int) -> None:
        self._path, self._new = (directory / name for name in NAMES)
        self._capacity_bytes = capacity_bytes
        self._file = -1
        self._replaced = self._start = self._end = self._at = self._allocated = 0
        self._has_failed = False

    def open(self) -> None:
        """Open the log, which is made if there is none.

        Raises:
            ConfigError: it is no such log, or of a store with another budget.
            StoreError: it cannot be opened.
            TierFull: there is no room for it.
        """
        try:
            if not self._path.exists():
                self._make(0, ())
            self._reopen()
        except OSError as exc:
            raise refused(self._path, "used", exc) from exc

    def close(self) -> None:
        """Close it; may be called twice."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    @property
    def is_long(self) -> bool:
        """Whether it should be replaced by a shorter one."""
        return self._end > _SHORT_BYTES + 4 * self._start

    # ------------------------------------------------------------------ reading

    def read(self) -> Iterator[Op | None]:
        """Return what has changed since the last read; `None` means that all begins anew.

        Raises:
            StoreError: the log is damaged.
        """
        try:
            if self._has_failed:  # what was not written is not so
                self._has_failed, self._at = False, _FIRST
                yield None
            yield from self._rest()
            if not is_at(self._file, self._path):
                replaced = self._replaced
                self._reopen()
                if self._replaced == replaced + 1:
                    self._at = self._start
                else:
                    yield None
                yield from self._rest()
        except OSError as exc:
            raise refused(self._path, "used", exc) from exc

    def _rest(self) -> Iterator[Op]:
        self._read_header()
        data = memoryview(os.pread(self._file, self._end - self._at, self._at))
        first = self._at
        while self._at < self._end:
            at = self._at - first
            try:
                length, crc = _FRAME.unpack_from(data, at)
                text = data[at + _FRAME.size : at + _FRAME.size + length]
                if len(text) != length or zlib.crc32(text) != crc:
                    raise self._damaged()
                ops: list[Op] = json.loads(bytes(text))
            except (ValueError, struct.error) as exc:
                raise self._damaged() from exc
            yield from ops
            self._at += _FRAME.size + length

    def _reopen(self) -> None:
        file = os.open(self._path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        self.close()
        self._file, self._at, self._allocated = file, _FIRST, 0
        self._read_header()

    def _read_header(self) -> None:
        data = os.pread(self._file, _HEADER.size + _CRC.size, 0)
        if len(data) < _HEADER.size + _CRC.size or not data.startswith(_MAGIC):
            raise ConfigError(f"{str(self._path)!r} is no log of a KV store; name another directory.")
        _, version, capacity, replaced, start, end = _HEADER.unpack_from(data)
        if _CRC.unpack_from(data, _HEADER.size)[0] != zlib.crc32(data[: _HEADER.size]) or end < self._at:
            raise self._damaged()
        if (version, capacity) != (_VERSION, self._capacity_bytes):
            raise ConfigError(
                f"The KV store in {str(self._path.parent)!r} has {capacity:,} bytes (format {version}), "
                f"and here it has {self._capacity_bytes:,} (format {_VERSION}). Give the same to all "
                "processes, or remove the directory when none uses it."
            )
        self._replaced, self._start, self._end = replaced, start, end

    # ------------------------------------------------------------------ writing

    def ensure(self, size_bytes: int) -> None:
        """Have memory for a change of a size, and some to spare for changes that make room.

        Raises:
            TierFull: there is none; nothing was changed.
        """
        needed = self._end + size_bytes + _SPARE_BYTES
        if needed > self._allocated:
            try:
                os.posix_fallocate(self._file, self._end, needed + _STEP_BYTES - self._end)
            except OSError as exc:
                raise refused(self._path, "used", exc) from exc
            self._allocated = needed + _STEP_BYTES

    def append(self, ops: Iterable[str]) -> None:
        """Write what was changed, of which all before was read.

        Raises:
            StoreError: it cannot be written.
        """
        assert self._at == self._end, "the log is written to before it is read"
        try:
            end = _write(self._file, self._end, ops)
            self._write_header(self._file, self._replaced, self._start, end)
            self._end = self._at = end
        except OSError as exc:
            self._has_failed = True
            raise refused(self._path, "used", exc) from exc

    def replace(self, ops: Iterable[str]) -> None:
        """Begin a new log, by what makes all that there is.

        Raises:
            StoreError: it cannot be written; the log is as it was.
        """
        try:
            self._make(self._replaced + 1, ops)
            self._reopen()
        except OSError as exc:
            raise refused(self._path, "used", exc) from exc
        self._at = self._end

    def _make(self, replaced: int, ops: Iterable[str]) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
        file = os.open(self._new, flags, 0o600)
        try:
            os.posix_fallocate(file, 0, _STEP_BYTES)
            end = _write(file, _FIRST, ops)
            self._write_header(file, replaced, end, end)
            os.rename(self._new, self._path)
        except BaseException:
            self._new.unlink(missing_ok=True)
            raise
        finally:
            os.close(file)

    def _write_header(self, file: int, replaced: int, start: int, end: int) -> None:
        header = _HEADER.pack(_MAGIC, _VERSION, self._capacity_bytes, replaced, start, end)
        os.pwrite(file, header + _CRC.pack(zlib.crc32(header)), 0)

    def _damaged(self) -> StoreError:
        return StoreError(
            f"{str(self._path)!r} is damaged. Remove the directory when no process uses it; tokens are "
            "computed again."
        )


def _write(file: int, at: int, ops: Iterable[str]) -> int:
    """Write a frame, unless there is nothing to be written; return where it ends."""
    text = f"[{','.join(ops)}]".encode()
    if text == b"[]":
        return at
    frame = memoryview(_FRAME.pack(len(text), zlib.crc32(text)) + text)
    while len(frame):
        count = os.pwrite(file, frame, at)
        frame, at = frame[count:], at + count
    return at
