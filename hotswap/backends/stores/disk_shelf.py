"""The books of a directory of models: what lies there, who reads it, and what goes first when room is needed.

The books are the directory itself, so that several processes keep one budget and none removes what another
reads. Locks are `flock`s, which the kernel drops with the process that holds them.

    <root>                        locked while room is made or a model is given its name
    <root>/<model>                locked shared by its readers, exclusively by who removes it; mtime: last use
    <root>/.<model>.<hex>.room    bytes promised to who is writing a model, as a number; locked by them
    <root>/.<model>.<hex>.coming  a model that is being written; locked by its writer
    <root>/.<model>.<hex>.gone    a model that is being removed; locked by who does
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import shutil
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from hotswap.backends.stores.files import map_read_errors
from hotswap.backends.stores.layout import INDEX_NAME, align, check_file_name
from hotswap.backends.stores.partial import sync_directory
from hotswap.errors import ShardMissing, StoreError, TierFull
from hotswap.request import ModelId

__all__ = ["DiskShelf", "Entry", "Loan", "Room", "locked", "map_write_errors"]

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_LEFTOVERS = (".coming", ".gone")
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_NO_LOCKS = frozenset({errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS})


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A model in the directory: the bytes of its data files, and when it was last used, in Unix time."""

    model: ModelId
    path: Path
    size_bytes: int
    used_ns: int


@dataclass(frozen=True, slots=True)
class Room:
    """Bytes promised to one writer; `evicted` are the models that went for them."""

    evicted: Sequence[ModelId]
    file: Path

    def release(self) -> None:
        """Give the promise back, once; the model itself counts from now on."""
        self.file.unlink(missing_ok=True)


class Loan:
    """Keeps one model from being removed, by whatever process, from `take` until `close`."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._fd = -1

    def take(self) -> None:
        """Lock the model and count it as used now; waits while somebody tries to remove it. Blocking.

        Raises:
            ShardMissing: it is not there, or not any more.
        """
        while self._fd < 0:
            with map_read_errors(self._directory):
                fd = os.open(self._directory, _DIRECTORY)
                try:
                    _lock(fd, fcntl.LOCK_SH)
                    if _is_at(fd, self._directory):
                        self._fd = fd
                finally:
                    if self._fd != fd:  # it was removed or replaced while we waited
                        _release(fd)
        _stamp(self._fd)

    def close(self) -> None:
        """Let the model go; may be called twice, and before `take`."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            _release(fd)


class DiskShelf:
    """Models in the directories of one root. All methods block: use them in worker threads.

    What counts against `capacity_bytes` are the data files of all models, whoever wrote them, what was
    promised by `reserve` to those who write now, and what a conversion that died can go on from. Indexes and
    tokenizers, a few megabytes, come on top.
    Without a capacity nothing is ever removed for something else.
    """

    def __init__(self, root: Path, capacity_bytes: int | None) -> None:
        self.root = root
        self.capacity_bytes = capacity_bytes

    def entries(self) -> list[Entry]:
        """Return the models, the one used longest ago first."""
        found: list[Entry] = []
        with suppress(FileNotFoundError), os.scandir(self.root) as entries:
            for entry in entries:
                if not entry.name.startswith(".") and entry.is_dir(follow_symlinks=False):
                    with suppress(FileNotFoundError):  # removed under our eyes, or no model
                        found.append(_entry(Path(entry.path)))
        return sorted(found, key=lambda entry: (entry.used_ns, entry.model))

    def loan(self, model: ModelId) -> Loan:
        """Return what keeps a model from removal, not yet taken."""
        check_file_name(model, self.root)
        return Loan(self.root / model)

    def in_use(self, model: ModelId) -> bool:
        """Whether anybody reads, pins or removes the model just now."""
        with suppress(FileNotFoundError):
            try:
                with locked(self.root / model):
                    return False
            except BlockingIOError:
                return True
        return False

    def remove(self, model: ModelId) -> int:
        """Remove a model at once, as everybody sees it, then delete its files; return their bytes.

        Raises:
            ShardMissing: it is not there.
            StoreError: somebody reads or pins it; nothing was changed.
        """
        check_file_name(model, self.root)
        path = self.root / model
        with self._mapped(0):
            try:
                entry = _entry(path)
                with locked(path):
                    self._take_away(entry)
            except (FileNotFoundError, NotADirectoryError) as exc:
                raise ShardMissing(f"The store at {str(self.root)!r} holds no model {model!r}.") from exc
            except BlockingIOError as exc:
                raise StoreError(
                    f"Model {model!r} in {str(self.root)!r} is in use; nothing was changed. Try again when "
                    "those who read or pin it have ended."
                ) from exc
        return entry.size_bytes

    @contextmanager
    def reserve(self, model: ModelId, size_bytes: int, *, alone: bool = False) -> Generator[Room]:
        """Promise room for a model while the block runs, removing those used longest ago and not in use.

        With `alone` it is refused while somebody else writes the same model.

        Raises:
            TierFull: it would not fit even then; nothing was removed.
            StoreError: somebody else writes the model.
        """
        check_file_name(model, self.root)
        file = self.root / f".{model}.{secrets.token_hex(4)}.room"
        with ExitStack() as stack:
            with self._mapped(size_bytes):
                self.root.mkdir(parents=True, exist_ok=True)
                with locked(self.root, wait=True):
                    promised = self._promised()
                    if alone and model in promised:
                        raise StoreError(f"Another process is writing model {model!r} to {str(self.root)!r}.")
                    others = set(promised) | {model}
                    unfinished = sum(self._unfinished(others))
                    evicted = self._make_room(sum(promised.values()) + unfinished + align(size_bytes))
                    stack.callback(file.unlink, missing_ok=True)
                    file.write_text(str(align(size_bytes)))
                    stack.enter_context(locked(file))
            yield Room(evicted, file)

    @contextmanager
    def new_directory(self, model: ModelId) -> Generator[Path]:
        """A hidden directory to write a model in, gone when the block ends unless it was published."""
        directory = self.root / f".{model}.{secrets.token_hex(4)}.coming"
        with ExitStack() as stack:
            with (
                self._mapped(0),
                locked(self.root, wait=True),
            ):  # so that `sweep` never sees it without a lock
                directory.mkdir()
                stack.callback(shutil.rmtree, directory, ignore_errors=True)
                stack.enter_context(locked(directory))
            yield directory

    def publish(self, directory: Path, model: ModelId, room: Room) -> None:
        """Give a finished directory its model's name, in the place of a model that had it before.

        Raises:
            StoreError: the one before is in use.
        """
        with self._mapped(0), locked(self.root, wait=True):
            with suppress(ShardMissing):
                self.remove(model)
            sync_directory(directory)
            directory.rename(self.root / model)
            sync_directory(self.root)
            os.utime(self.root / model, ns=(_now_ns(), _now_ns()))
            room.release()

    def sweep(self) -> list[Path]:
        """Remove what processes that died have left of models, and return it."""
        swept: list[Path] = []
        with suppress(OSError), locked(self.root, wait=True):
            for path in sorted(self.root.glob(".*")):
                if path.suffix in _LEFTOVERS:
                    with suppress(OSError), locked(path):
                        shutil.rmtree(path)
                        swept.append(path)
        return swept

    def _make_room(self, size_bytes: int) -> list[ModelId]:
        """Remove what must go so that `size_bytes` fit beside the rest; all of it, or nothing."""
        if self.capacity_bytes is None:
            return []
        entries = self.entries()
        used_bytes = sum(entry.size_bytes for entry in entries)
        missing = used_bytes + size_bytes - self.capacity_bytes
        going: list[Entry] = []
        with ExitStack() as stack:
            for entry in entries if size_bytes <= self.capacity_bytes else ():
                if missing <= 0:
                    break
                with suppress(OSError):  # in use
                    stack.enter_context(locked(entry.path))
                    going.append(entry)
                    missing -= entry.size_bytes
            if missing > 0:
                raise TierFull(
                    f"The budget of {self.capacity_bytes} bytes for {str(self.root)!r} has no room for "
                    f"{size_bytes} more, even without all that is not in use: it lacks {missing}. "
                    "Raise it, or wait until loads end; nothing was changed."
                )
            for entry in going:
                self._take_away(entry)
        return [entry.model for entry in going]

    def _take_away(self, entry: Entry) -> None:
        """Remove a model that is locked; a crash in the middle leaves it whole or for `sweep`."""
        gone = self.root / f".{entry.model}.{secrets.token_hex(4)}.gone"
        entry.path.rename(gone)
        sync_directory(self.root)
        shutil.rmtree(gone, ignore_errors=True)

    def _promised(self) -> dict[str, int]:
        """The bytes promised by model; promises of the dead are forgotten. The root must be locked."""
        promised: dict[str, int] = {}
        for file in self.root.glob(".*.room"):
            with suppress(FileNotFoundError):
                try:
                    with locked(file):
                        file.unlink()
                except BlockingIOError:
                    model = file.name[1:].rsplit(".", 2)[0]
                    promised[model] = promised.get(model, 0) + int(file.read_text())
        return promised

    def _unfinished(self, others: set[str]) -> Iterator[int]:
        """The bytes of what dead conversions have left to go on from, but for the models in `others`."""
        for directory in self.root.glob(".*.partial"):
            if directory.name[1:].rsplit(".", 2)[0] not in others:
                with suppress(FileNotFoundError):
                    yield _data_bytes(directory)

    @contextmanager
    def _mapped(self, needed_bytes: int) -> Generator[None]:
        with map_write_errors(self.root, needed_bytes):
            yield


@contextmanager
def locked(path: Path, *, wait: bool = False) -> Generator[None]:
    """Hold the exclusive lock on what is at `path`, a link not followed.

    Raises:
        BlockingIOError: somebody has a lock on it, and `wait` is false.
        FileNotFoundError: it is not there, or not any more.
    """
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        _lock(fd, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        if not _is_at(fd, path):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
        yield
    finally:
        _release(fd)


@contextmanager
def map_write_errors(root: Path, needed_bytes: int) -> Generator[None]:
    """Turn what the operating system says about writing below `root` into a `StoreError` that names it."""
    try:
        yield
    except OSError as exc:
        if exc.errno in _FULL:
            raise TierFull(
                f"{str(root)!r} has no room for the {needed_bytes} bytes of the model ({exc.strerror}). "
                "Free some, or choose another root; nothing was changed."
            ) from exc
        raise StoreError(f"Writing to {str(root)!r} failed: {exc.strerror or exc}. Check the disk.") from exc


def _entry(path: Path) -> Entry:
    """Look at a model; `FileNotFoundError` if there is none."""
    (path / INDEX_NAME).lstat()
    size = _data_bytes(path)
    used_ns = path.stat().st_mtime_ns
    return Entry(model=ModelId(path.name), path=path, size_bytes=size, used_ns=used_ns)


def _data_bytes(directory: Path) -> int:
    with os.scandir(directory) as files:
        return sum(file.stat(follow_symlinks=False).st_size for file in files if file.name.endswith(".bin"))


def _lock(fd: int, how: int) -> None:
    """Lock a file or directory; a file system without locks goes without, as if it had one user."""
    try:
        fcntl.flock(fd, how)
    except OSError as exc:
        if exc.errno not in _NO_LOCKS:
            raise


def _release(fd: int) -> None:
    """End the lock and close; to close would not be enough where a process was forked meanwhile."""
    with suppress(OSError):
        fcntl.flock(fd, fcntl.LOCK_UN)
    os.close(fd)


def _is_at(fd: int, path: Path) -> bool:
    """Whether what was opened is still what lies at the path."""
    try:
        return os.path.samestat(os.fstat(fd), path.stat())
    except FileNotFoundError:
        return False


def _stamp(fd: int) -> None:
    """Say that a model was used now."""
    with suppress(OSError):  # a root that we may only read
        os.utime(fd, ns=(_now_ns(), _now_ns()))


def _now_ns() -> int:
    """The wall clock, because a last use must compare with those before the machine was started."""
    return time.time_ns()
