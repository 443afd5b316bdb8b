"""The segments in one directory, shared by processes: a byte budget, pins and LRU eviction.

All state is in the directory and in locks that the kernel releases with their process (see `locks`): after a
crash, nothing that a process used counts as in use.

    <directory>            locked while a segment is made or removed
    <directory>/.budget    the budget, as a number. Byte 0 is locked by each process that shares the
                           directory, another byte for each model by the processes that pin it
    <directory>/*          segments, see `segment`; modification time: last use
"""

from __future__ import annotations

import hashlib
import os
import stat
import time
from collections.abc import Generator, Iterable
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from hotswap.backends.stores import locks
from hotswap.backends.stores.files import is_at, make_root, map_write_errors, warn_of_other_users
from hotswap.backends.stores.segment import (
    Label,
    Segment,
    lock_for_removal,
    parse_name,
    publish_if_whole,
    whole_path,
)
from hotswap.errors import ConfigError, ShardCorrupt, StoreError, TierFull, UnsafeFile
from hotswap.request import ModelId

__all__ = ["Busy", "SegmentDirectory", "SegmentFile", "eviction_order", "lock_all", "segment_files"]


_BUDGET = ".budget"
_BUDGET_FLAGS = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
_JOINED = 0  # the byte that each process locks that shares the directory
_SETTLED_NS = 50_000_000  # a file system's clock may lag some milliseconds


class Busy(Exception):
    """Another process has the directory, its argument, locked for a moment; try again."""


class SegmentDirectory:
    """The segments in one directory, and the byte budget that all processes share.

    All segment files count, those being filled and those left incomplete included. A group (all ranks of one
    manifest) is evicted as a whole: incomplete ones first, then least recently used first; none that a
    process has mapped a part of, or whose model is pinned. All methods block; those that raise `Busy` never
    for longer than the removal of a segment.
    """

    def __init__(self, directory: Path, capacity_bytes: int) -> None:
        self.directory = directory
        self.capacity_bytes = capacity_bytes
        self._budget_fd = -1
        self._pinned: set[ModelId] = set()
        self._labels: dict[tuple[str, int], Label] = {}
        self._seen: tuple[int, int, tuple[Label, ...]] | None = None

    def open(self) -> list[Path]:
        """Join the processes that share the directory, made if need be; return the incomplete files removed.

        The first process recovers what dead ones have left: whole segments are published, incomplete ones
        removed, and then those over the budget.

        Raises:
            ConfigError: the directory is another user's, or other processes use another budget there.
            Busy: try again.
        """
        _check_system()
        with map_write_errors(self.directory, memory=True):
            make_root(self.directory)
            warn_of_other_users(self.directory)
            _check_owner(self.directory)
            with self._locked(), ExitStack() as undo:
                undo.callback(self.close)
                swept = self._recover() if self._join() else []
                undo.pop_all()
        return swept

    def close(self) -> None:
        """Leave the directory, and end the pins; may be called twice."""
        fd, self._budget_fd = self._budget_fd, -1
        if fd >= 0:
            locks.release(fd)

    def attach(self, label: Label, *, writable: bool) -> Segment | None:
        """Map a whole segment; `None` if there is none that can be used."""
        with map_write_errors(self.directory, memory=True), suppress(ShardCorrupt):
            return Segment.attach(self.directory / label.name, label, writable=writable)
        return None

    def attach_or_create(self, label: Label, *, writable: bool) -> Segment:
        """Map a segment, whole or incoming; if there is none, make room and create it.

        Raises:
            TierFull: it would not fit even without all that is idle; nothing was changed.
            UnsafeFile: a file that is no segment has its name, and cannot be removed.
            Busy: try again.
        """
        with map_write_errors(self.directory, memory=True), self._locked():
            # In this order, because the filling process renames it without the lock.
            for name in (label.incoming_name, label.name):
                incoming = name == label.incoming_name
                try:
                    segment = Segment.attach(self.directory / name, label, writable=writable or incoming)
                except ShardCorrupt as exc:
                    self._remove_invalid(self.directory / name, exc)
                    continue
                if segment is not None:
                    if incoming:  # the process that filled it may have died before the renaming
                        segment.publish()
                    return segment
                if os.path.lexists(self.directory / name):  # it is being removed
                    raise Busy(self.directory)
            self._make_room(label.size_bytes, label)
            return Segment.create(self.directory, label)

    def remove(self, model: ModelId) -> bool:
        """Remove all segments of a model or none, and return whether none is left.

        A model that another process pins stays.

        Raises:
            Busy: try again.
        """
        with map_write_errors(self.directory, memory=True), self._locked():
            if self._is_pinned_elsewhere(model):
                return False
            files = [file for file in segment_files(self.directory) if file.model == model]
            return len(self._remove(files, together=True)) == len(files)

    def clear(self) -> tuple[int, int]:
        """Remove segments that no process uses and no other one pins; return the bytes removed and kept.

        The directory need not be joined.

        Raises:
            ConfigError: the directory is another user's.
            Busy: try again.
        """
        _check_system()
        with map_write_errors(self.directory, memory=True):
            _check_owner(self.directory)
        with map_write_errors(self.directory, memory=True), self._locked():
            files = segment_files(self.directory)
            unpinned = [file for file in files if not self._is_pinned_elsewhere(file.model)]
            removed = sum(file.size_bytes for file in self._remove(unpinned))
            return removed, sum(file.size_bytes for file in files) - removed

    def pin(self, model: ModelId) -> None:
        """Keep a model from eviction, by any process, until `unpin` or `close`."""
        self._pinned.add(model)
        if self._budget_fd >= 0:
            self._lock_pin(model)

    def unpin(self, model: ModelId) -> None:
        """End a pin."""
        self._pinned.discard(model)
        if self._budget_fd >= 0:
            locks.unlock(self._budget_fd, _pin_byte(model))

    def has(self, label: Label) -> bool:
        """Whether there is a whole segment of that name."""
        return (self.directory / label.name).exists()

    def snapshot(self) -> tuple[int, tuple[Label, ...]]:
        """The bytes of all segments, and the labels of the whole ones, in no order.

        Cheap: the directory is listed only when it has changed, and each segment's label read once.
        """
        try:
            changed_ns = self.directory.stat().st_mtime_ns
            if self._seen is not None and self._seen[0] == changed_ns:
                return self._seen[1:]
            now_ns = time.time_ns()
            files = segment_files(self.directory)
        except OSError:
            return 0, ()
        used_bytes = sum(file.size_bytes for file in files)
        self._labels = {
            (file.path.name, file.inode): label
            for file in files
            if file.whole and (label := self._label(file)) is not None
        }
        whole = tuple(self._labels.values())
        if now_ns - changed_ns > _SETTLED_NS:
            self._seen = (changed_ns, used_bytes, whole)
        return used_bytes, whole

    # --------------------------------------------------------------------------------- the locked directory

    @contextmanager
    def _locked(self) -> Generator[None]:
        """Lock the directory, or raise `Busy`; one that was removed meanwhile is made and joined again."""
        if self._budget_fd >= 0:
            self.directory.mkdir(mode=0o700, exist_ok=True)
        with ExitStack() as stack:
            try:
                stack.enter_context(locks.locked(self.directory, follow=True))
            except BlockingIOError as exc:
                raise Busy(self.directory) from exc
            except FileNotFoundError as exc:
                if not self.directory.is_dir():
                    raise
                raise Busy(self.directory) from exc  # it was replaced meanwhile
            if self._budget_fd >= 0 and not is_at(self._budget_fd, self.directory / _BUDGET):
                self._rejoin()
            yield

    def _join(self) -> bool:
        """Open the budget file and lock the pins, or change nothing; return whether we are first."""
        former, self._budget_fd = self._budget_fd, os.open(self.directory / _BUDGET, _BUDGET_FLAGS, 0o600)
        try:
            first = self._check_budget()
            for model in self._pinned:
                self._lock_pin(model)
        except BaseException:
            former, self._budget_fd = self._budget_fd, former
            raise
        finally:
            if former >= 0:
                locks.release(former)
        return first

    def _rejoin(self) -> None:
        """Join the directory that has replaced the removed one."""
        try:
            _check_owner(self.directory)
            self._join()
        except ConfigError as exc:
            raise StoreError(f"The directory was removed, and made again by another process. {exc}") from exc
        self._seen = None

    def _check_budget(self) -> bool:
        """Compare the budget with the other processes; the first one sets it. Return whether we are."""
        first = locks.lock(self._budget_fd, _JOINED, shared=False)
        if first:
            os.ftruncate(self._budget_fd, 0)
            os.pwrite(self._budget_fd, str(self.capacity_bytes).encode(), 0)
        else:
            theirs = os.pread(self._budget_fd, 32, 0).decode()
            if theirs != str(self.capacity_bytes):
                raise ConfigError(
                    f"The processes that share {str(self.directory)!r} keep a budget of {theirs} bytes, this "
                    f"one names {self.capacity_bytes}. Give all the same, or end the others first."
                )
        locks.lock(self._budget_fd, _JOINED, shared=True)
        return first

    def _recover(self) -> list[Path]:
        """Publish or remove the incoming segments of dead processes; return the paths removed."""
        for file in segment_files(self.directory):
            if not file.whole:
                publish_if_whole(file.path)
        incomplete = [file for file in segment_files(self.directory) if not file.whole]
        swept = [file.path for file in self._remove(incomplete)]
        self._make_room(0, None, partly=True)
        return swept

    def _lock_pin(self, model: ModelId) -> None:
        locks.lock(self._budget_fd, _pin_byte(model), shared=True)

    def _is_pinned_elsewhere(self, model: ModelId) -> bool:
        """Whether another process pins the model, or another store of this one."""
        if self._budget_fd >= 0:
            return locks.is_locked(self._budget_fd, _pin_byte(model))
        with suppress(FileNotFoundError):
            fd = os.open(self.directory / _BUDGET, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                return locks.is_locked(fd, _pin_byte(model))
            finally:
                os.close(fd)
        return False

    def _label(self, file: SegmentFile) -> Label | None:
        with suppress(OSError, StoreError):
            return self._labels.get((file.path.name, file.inode)) or Label.read(file.path)
        return None

    def _make_room(self, size_bytes: int, incoming: Label | None, *, partly: bool = False) -> None:
        """Evict groups until `size_bytes` fit beside the rest; all needed ones, or none unless `partly`."""
        files = segment_files(self.directory)
        missing = sum(file.size_bytes for file in files) + size_bytes - self.capacity_bytes
        with ExitStack() as stack:
            victims: list[SegmentFile] = []
            for group in eviction_order(files):
                if missing <= 0:
                    break
                model, digest = group[0].model, group[0].digest
                own = incoming is not None and (model, digest) == (incoming.model, incoming.digest)
                kept = own or model in self._pinned or self._is_pinned_elsewhere(model)
                if not kept and lock_all(group, stack):
                    victims += group
                    missing -= sum(file.size_bytes for file in group)
            if missing > 0 and not partly:
                raise TierFull(
                    f"{str(self.directory)!r} has no room for {size_bytes} bytes: it lacks {missing} of its "
                    f"{self.capacity_bytes}, which are in use or pinned by one process or another. Raise the "
                    "budget, unpin a model, or wait until loads end."
                )
            for file in victims:
                file.path.unlink(missing_ok=True)

    def _remove(self, files: Iterable[SegmentFile], *, together: bool = False) -> list[SegmentFile]:
        """Remove the files not in use, or with `together` all or none; return those removed."""
        groups = [list(files)] if together else [[file] for file in files]
        removed: list[SegmentFile] = []
        for group in groups:
            with ExitStack() as stack:
                if lock_all(group, stack):
                    for file in group:
                        file.path.unlink(missing_ok=True)
                    removed += group
        return removed

    def _remove_invalid(self, path: Path, error: ShardCorrupt) -> None:
        """Remove a file that has a segment's name and is no valid segment."""
        try:
            regular = stat.S_ISREG(path.lstat().st_mode)
        except FileNotFoundError:
            return
        if not regular:
            raise UnsafeFile(f"{error} It was not touched.") from error
        with suppress(FileNotFoundError):
            fd = lock_for_removal(path)
            if fd is None:
                raise TierFull(f"{error} It is in use, so it was not replaced.") from error
            try:
                path.unlink()
            finally:
                locks.release(fd)


def _check_system() -> None:
    if not locks.supported():
        raise ConfigError("Sharing host memory needs Linux; use a PinnedStore here.")


def _check_owner(directory: Path) -> None:
    status = directory.stat()
    if status.st_uid != os.geteuid() or status.st_mode & 0o022:
        raise ConfigError(
            f"{str(directory)!r} is another user's, or others may write to it and replace the weights. "
            "Name a directory of your own, with `chmod 700`."
        )


def _pin_byte(model: ModelId) -> int:
    """The byte of the budget file that is locked to pin a model; byte 0 has another use."""
    return 1 + int.from_bytes(hashlib.sha256(model.encode()).digest()[:7], "big")


@dataclass(frozen=True, slots=True)
class SegmentFile:
    """A file with a segment's name, whole or incoming; `used_ns` is its last use."""

    path: Path
    model: ModelId
    digest: str
    whole: bool
    inode: int
    size_bytes: int
    used_ns: int


def segment_files(directory: Path) -> list[SegmentFile]:
    """Return the segment files.

    A segment that is renamed meanwhile may be listed twice, or not at all, so the directory is listed until
    two lists agree.
    """
    before: set[Path] | None = None
    while True:
        found = _scan(directory)
        paths = {entry.path for entry in found} if found is not None else None
        if found is not None and paths == before:
            return found
        before = paths


def eviction_order(entries: Iterable[SegmentFile]) -> list[list[SegmentFile]]:
    """Return the groups that are evicted together: incomplete ones first, then least recently used first."""
    groups: dict[tuple[ModelId, str], list[SegmentFile]] = {}
    for entry in entries:
        groups.setdefault((entry.model, entry.digest), []).append(entry)
    return sorted(groups.values(), key=lambda g: (any(e.whole for e in g), max(e.used_ns for e in g)))


def lock_all(group: Iterable[SegmentFile], stack: ExitStack) -> bool:
    """Lock all files of a group against use until the stack ends, or none."""
    with ExitStack() as locked:
        for entry in group:
            try:
                fd = lock_for_removal(entry.path)
            except FileNotFoundError:  # removed, unless it was renamed
                if entry.whole or not os.path.lexists(whole_path(entry.path)):
                    continue
                return False
            if fd is None:
                return False
            locked.callback(locks.release, fd)
        stack.push(locked.pop_all())
    return True


def _scan(directory: Path) -> list[SegmentFile] | None:
    """List the segments once; `None` if one was renamed or removed meanwhile."""
    found: list[SegmentFile] = []
    with os.scandir(directory) as files:
        for file in files:
            name = parse_name(file.name)
            if name is not None and file.is_file(follow_symlinks=False):
                try:
                    status = file.stat(follow_symlinks=False)
                except FileNotFoundError:
                    return None
                size_bytes, used_ns = status.st_size, status.st_mtime_ns
                found.append(SegmentFile(Path(file.path), *name, file.inode(), size_bytes, used_ns))
    return found
