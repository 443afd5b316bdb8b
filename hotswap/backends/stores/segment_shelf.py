"""The books of a directory of segments: one budget, and what goes first, for all processes that share it.

The books are the directory itself, and locks that the kernel ends with the process that holds them (see
`locks`): whatever a process was doing when it was killed, nothing it had counts as in use afterwards.

    <directory>           locked (`flock`) while a segment is made or removed
    <directory>/.books    the budget, as a number. Byte 0 is locked by every process that has the books open,
                          another byte for each model by those who pin it
    <directory>/*         segments, see `segment`; modification time: last use
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import stat
import time
from collections.abc import Generator, Iterable
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from hotswap.backends.stores import locks
from hotswap.backends.stores.segment import Label, Segment, give_name, removable
from hotswap.backends.stores.segment_files import Entry, entries_of, in_groups, lock_all
from hotswap.errors import ConfigError, ShardCorrupt, StoreError, TierFull, UnsafeFile
from hotswap.request import ModelId

__all__ = ["Busy", "SegmentShelf", "map_memory_errors"]

_BOOKS = ".books"
_OPEN = 0  # the byte of the books that says that somebody has them open
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.ENOMEM})
_SETTLED_NS = 50_000_000  # the clock of a file system may stand still for some milliseconds


class Busy(Exception):
    """Another process has the books locked for a moment; ask again."""


class SegmentShelf:
    """Segments in one directory, and the budget that all processes keep together.

    What counts are whole files, those being filled and those left half-filled included. A group, which is all
    ranks of one manifest, goes as a whole, the one used longest ago first, half-filled ones before all
    others; none goes while a process has a part of it mapped, or its model pinned. All methods block; those
    that raise `Busy` never for longer than it takes to remove a segment.
    """

    def __init__(self, directory: Path, capacity_bytes: int) -> None:
        self.directory = directory
        self.capacity_bytes = capacity_bytes
        self._books = -1
        self._pinned: set[ModelId] = set()
        self._labels: dict[tuple[str, int], Label] = {}
        self._seen: tuple[int, int, tuple[Label, ...]] | None = None

    def open(self) -> list[Path]:
        """Begin to share the directory, made if need be; return what was removed since nobody will fill it.

        Whoever is alone puts in order what others have left: what is whole gets its name, what is half-filled
        goes, and then what exceeds the budget.

        Raises:
            ConfigError: the directory is another user's, or others keep another budget there.
            Busy: ask again.
        """
        _check_system()
        with map_memory_errors(self.directory):
            self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            _check_owner(self.directory)
            with self._locked(), ExitStack() as undo:
                undo.callback(self.close)
                swept = self._tidy() if self._join() else []
                undo.pop_all()
        return swept

    def close(self) -> None:
        """End the pins; may be called twice."""
        fd, self._books = self._books, -1
        if fd >= 0:
            locks.release(fd)

    def attach(self, label: Label, *, writable: bool) -> Segment | None:
        """Map a whole segment; `None` if it is not there, or what is there cannot be used."""
        with map_memory_errors(self.directory), suppress(ShardCorrupt):
            return Segment.attach(self.directory / label.name, label, writable=writable)
        return None

    def take(self, label: Label, *, writable: bool) -> Segment:
        """Map a segment, whole or coming; if it is not there, make room and create it.

        Raises:
            TierFull: it would not fit even when all that is idle went; nothing was changed.
            UnsafeFile: a file that is no segment has its name, and cannot be removed.
            Busy: ask again.
        """
        with map_memory_errors(self.directory), self._locked():
            # In this order, because who fills it renames it without the lock.
            for name in (label.coming_name, label.name):
                coming = name == label.coming_name
                try:
                    segment = Segment.attach(self.directory / name, label, writable=writable or coming)
                except ShardCorrupt as exc:
                    self._put_away(self.directory / name, exc)
                    continue
                if segment is not None:
                    if coming:  # whoever had filled it may have died before it had its name
                        segment.publish()
                    return segment
                if os.path.lexists(self.directory / name):  # somebody is just removing it
                    raise Busy
            self._make_room(label.size_bytes, label)
            return Segment.create(self.directory, label)

    def remove(self, model: ModelId) -> bool:
        """Remove all that is there of a model, and say whether nothing is left; all of it, or nothing.

        What another process pins stays.

        Raises:
            Busy: ask again.
        """
        with map_memory_errors(self.directory), self._locked():
            if self._is_pinned_elsewhere(model):
                return False
            mine = [entry for entry in entries_of(self.directory) if entry.model == model]
            return len(self._remove(mine, together=True)) == len(mine)

    def clear(self) -> tuple[int, int]:
        """Remove what no process uses and no other one pins; return the bytes removed, and those that stayed.

        The books need not be open.

        Raises:
            ConfigError: the directory is another user's.
            Busy: ask again.
        """
        _check_system()
        with map_memory_errors(self.directory):
            _check_owner(self.directory)
        with map_memory_errors(self.directory), self._locked():
            entries = entries_of(self.directory)
            going = [entry for entry in entries if not self._is_pinned_elsewhere(entry.model)]
            removed = sum(entry.size_bytes for entry in self._remove(going))
            return removed, sum(entry.size_bytes for entry in entries) - removed

    def pin(self, model: ModelId) -> None:
        """Keep a model from being pushed out, by any process, until `unpin` or `close`."""
        self._pinned.add(model)
        if self._books >= 0:
            self._lock_pin(model)

    def unpin(self, model: ModelId) -> None:
        """End a pin."""
        self._pinned.discard(model)
        if self._books >= 0:
            locks.unlock(self._books, _pin_byte(model))

    def has(self, label: Label) -> bool:
        """Whether a segment of that name is there, whole."""
        return (self.directory / label.name).exists()

    def snapshot(self) -> tuple[int, tuple[Label, ...]]:
        """The bytes that all segments take, and what is there whole, in no order.

        Cheap: the directory is listed when it has changed, and a segment's label read when it is new.
        """
        try:
            changed_ns = self.directory.stat().st_mtime_ns
            if self._seen is not None and self._seen[0] == changed_ns:
                return self._seen[1:]
            now_ns = time.time_ns()
            entries = entries_of(self.directory)
        except OSError:
            return 0, ()
        used_bytes = sum(entry.size_bytes for entry in entries)
        self._labels = {
            (entry.path.name, entry.inode): label
            for entry in entries
            if entry.whole and (label := self._label(entry)) is not None
        }
        whole = tuple(self._labels.values())
        if now_ns - changed_ns > _SETTLED_NS:
            self._seen = (changed_ns, used_bytes, whole)
        return used_bytes, whole

    # ------------------------------------------------------------------------------------------- the books

    @contextmanager
    def _locked(self) -> Generator[None]:
        """Lock the directory, or raise `Busy`; if it was removed under us, make it, and share it anew."""
        if self._books >= 0:
            self.directory.mkdir(mode=0o700, exist_ok=True)
        fd = os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as exc:
                raise Busy from exc
            if not _is_at(fd, self.directory):
                raise Busy
            if self._books >= 0 and not _is_at(self._books, self.directory / _BOOKS):
                self._rejoin()
            yield
        finally:
            with suppress(OSError):  # a process forked meanwhile has it open too, and would keep it locked
                fcntl.flock(fd, fcntl.LOCK_UN)
            os.close(fd)

    def _join(self) -> bool:
        """Open the books, agree on the budget, lock the pins; or change nothing. Say whether we are alone."""
        former, self._books = self._books, os.open(self.directory / _BOOKS, _BOOKS_FLAGS, 0o600)
        try:
            alone = self._agree()
            for model in self._pinned:
                self._lock_pin(model)
        except BaseException:
            former, self._books = self._books, former
            raise
        finally:
            if former >= 0:
                locks.release(former)
        return alone

    def _rejoin(self) -> None:
        """Share the directory that is there now in place of the one that was removed."""
        try:
            _check_owner(self.directory)
            self._join()
        except ConfigError as exc:
            raise StoreError(f"The directory was removed, and made anew by somebody else. {exc}") from exc
        self._seen = None

    def _agree(self) -> bool:
        """Find the budget that others keep; who is alone sets it. Return whether we are."""
        alone = locks.lock(self._books, _OPEN, shared=False)
        if alone:
            os.ftruncate(self._books, 0)
            os.pwrite(self._books, str(self.capacity_bytes).encode(), 0)
        else:
            theirs = os.pread(self._books, 32, 0).decode()
            if theirs != str(self.capacity_bytes):
                raise ConfigError(
                    f"The processes that share {str(self.directory)!r} keep a budget of {theirs} bytes, this "
                    f"one names {self.capacity_bytes}. Give all the same, or end the others first."
                )
        locks.lock(self._books, _OPEN, shared=True)
        return alone

    def _tidy(self) -> list[Path]:
        """Put in order what others have left, and return what was half-filled."""
        for entry in entries_of(self.directory):
            if not entry.whole:
                give_name(entry.path)
        half = [entry for entry in entries_of(self.directory) if not entry.whole]
        swept = [entry.path for entry in self._remove(half)]
        self._make_room(0, None, partly=True)
        return swept

    def _lock_pin(self, model: ModelId) -> None:
        locks.lock(self._books, _pin_byte(model), shared=True)

    def _is_pinned_elsewhere(self, model: ModelId) -> bool:
        """Whether another process pins the model, or another store of this one."""
        if self._books >= 0:
            return locks.is_locked(self._books, _pin_byte(model))
        with suppress(FileNotFoundError):
            fd = os.open(self.directory / _BOOKS, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                return locks.is_locked(fd, _pin_byte(model))
            finally:
                os.close(fd)
        return False

    def _label(self, entry: Entry) -> Label | None:
        with suppress(OSError, StoreError):
            return self._labels.get((entry.path.name, entry.inode)) or Label.read(entry.path)
        return None

    def _make_room(self, size_bytes: int, coming: Label | None, *, partly: bool = False) -> None:
        """Remove what must go so that `size_bytes` fit beside the rest; all, or nothing unless `partly`."""
        entries = entries_of(self.directory)
        missing = sum(entry.size_bytes for entry in entries) + size_bytes - self.capacity_bytes
        with ExitStack() as stack:
            going: list[Entry] = []
            for group in in_groups(entries):
                if missing <= 0:
                    break
                own = coming is not None and (group[0].model, group[0].digest) == (
                    coming.model,
                    coming.digest,
                )
                kept = own or group[0].model in self._pinned or self._is_pinned_elsewhere(group[0].model)
                if not kept and lock_all(group, stack):
                    going += group
                    missing -= sum(entry.size_bytes for entry in group)
            if missing > 0 and not partly:
                raise TierFull(
                    f"{str(self.directory)!r} has no room for {size_bytes} bytes: it lacks {missing} of its "
                    f"{self.capacity_bytes}, which are in use or pinned, in whatever process. Raise the "
                    "budget, unpin a model, or wait until loads end."
                )
            for entry in going:
                entry.path.unlink(missing_ok=True)

    def _remove(self, entries: Iterable[Entry], *, together: bool = False) -> list[Entry]:
        """Remove those that nobody uses, or with `together` all or none; return them."""
        groups = [list(entries)] if together else [[entry] for entry in entries]
        gone: list[Entry] = []
        for group in groups:
            with ExitStack() as stack:
                if lock_all(group, stack):
                    for entry in group:
                        entry.path.unlink(missing_ok=True)
                    gone += group
        return gone

    def _put_away(self, path: Path, why: ShardCorrupt) -> None:
        """Remove what has a segment's name and is none, so that one can be made."""
        try:
            regular = stat.S_ISREG(path.lstat().st_mode)
        except FileNotFoundError:
            return
        if not regular:
            raise UnsafeFile(f"{why} It was not touched.") from why
        with suppress(FileNotFoundError):
            fd = removable(path)
            if fd is None:
                raise TierFull(f"{why} It is in use, so it was not remade.") from why
            try:
                path.unlink()
            finally:
                locks.release(fd)


_BOOKS_FLAGS = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW


@contextmanager
def map_memory_errors(directory: Path) -> Generator[None]:
    """Turn what the operating system says about a directory of segments into a `StoreError` that names it."""
    try:
        yield
    except OSError as exc:
        if exc.errno in _FULL:
            raise TierFull(
                f"The memory behind {str(directory)!r} is full ({exc.strerror}), so the model is not kept "
                "there; idle ones may have gone for it. Name a smaller budget, or give that file system, or "
                "the container, more room."
            ) from exc
        raise StoreError(f"{str(directory)!r} cannot be used: {exc.strerror or exc}.") from exc


def _check_system() -> None:
    if not locks.supported():
        raise ConfigError("Sharing host memory needs Linux; use a PinnedStore here.")


def _is_at(fd: int, path: Path) -> bool:
    """Whether what is open is still what lies at the path."""
    with suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(fd), path.stat())
    return False


def _check_owner(directory: Path) -> None:
    status = directory.stat()
    if status.st_uid != os.geteuid() or status.st_mode & 0o022:
        raise ConfigError(
            f"{str(directory)!r} is another user's, or others may write to it; weights from there could be "
            "anybody's. Name a directory of your own, with `chmod 700`."
        )


def _pin_byte(model: ModelId) -> int:
    """Where the pins of a model are, behind the byte for those who have the books open."""
    return 1 + int.from_bytes(hashlib.sha256(model.encode()).digest()[:7], "big")
