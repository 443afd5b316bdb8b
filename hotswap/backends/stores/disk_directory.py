"""The models in one directory of a disk, shared by processes: a byte budget, read locks and LRU removal.

All state is in the directory and in locks that the kernel releases with their process (see `locks`), so that
processes share one budget and none removes what another reads.

    <root>                          locked while room is made or a model gets its name
    <root>/<model>                  locked shared by readers, exclusively for removal; mtime: last use
    <root>/.<model>.<hex>.reserved  a number: bytes reserved for a model being written; locked by the writer
    <root>/.<model>.<hex>.partial   a model being written, see `partial`; locked by the writer
    <root>/.<model>.<hex>.removed   a model being deleted; locked by the process that deletes it
"""

from __future__ import annotations

import errno
import os
import secrets
import shutil
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from hotswap.backends.stores.files import (
    check_no_link,
    create_file,
    is_at,
    make_root,
    map_read_errors,
    map_write_errors,
    sync_directory,
)
from hotswap.backends.stores.layout import (
    INDEX_NAME,
    align,
    is_data_file,
    model_directory,
    model_in,
    model_name,
)
from hotswap.backends.stores.locks import LockWait, locked, unlock_whole
from hotswap.backends.stores.partial import publish, unused
from hotswap.errors import ShardMissing, StoreBusy, TierFull
from hotswap.request import ModelId

__all__ = ["DiskDirectory", "ReadLock", "Reservation", "StoredModel"]

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredModel:
    """A model in the directory: the bytes of its data files, and when it was last used, in Unix time."""

    model: ModelId
    path: Path
    size_bytes: int
    used_ns: int


@dataclass(frozen=True, slots=True)
class Reservation:
    """Bytes reserved for one writer; `evicted` are the models that were removed for them."""

    evicted: Sequence[ModelId]
    file: Path

    def release(self) -> None:
        """End the reservation, once: from now on the model itself counts against the budget."""
        self.file.unlink(missing_ok=True)


class ReadLock:
    """Keeps one model from being removed, by any process, from `acquire` until `release`."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._fd = -1

    def acquire(self, wait: LockWait | None = None) -> None:
        """Lock the model and count it as used now; waits while a removal is tried. Blocking.

        Raises:
            ShardMissing: there is no such model, or it was removed meanwhile.
            UnsafeFile: a link has its name.
            StoreBusy: another process has kept it locked until the end of `wait`.
        """
        wait = wait or LockWait()
        while self._fd < 0:
            check_no_link(self._directory)
            with map_read_errors(self._directory):
                fd = os.open(self._directory, _DIRECTORY)
                try:
                    wait.until_locked(fd, self._directory, shared=True)
                    if is_at(fd, self._directory):
                        self._fd = fd
                finally:
                    if self._fd != fd:  # it was removed or replaced during the wait
                        unlock_whole(fd)
        _touch(self._fd)

    def release(self) -> None:
        """Unlock the model; may be called twice, and before `acquire`."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            unlock_whole(fd)


class DiskDirectory:
    """The models under one root, and their byte budget. All methods block: use them in worker threads.

    `capacity_bytes` bounds the data files of all models, whatever wrote them, what `reserve` has reserved
    for models being written, and what a dead conversion can be resumed from. Indexes and tokenizers, a few
    megabytes, come on top. Without a capacity no model is removed for another.

    Those that take a `wait` raise `StoreBusy` at its end while another process has the root locked; without
    one they wait `LOCK_LIMIT_S`.
    """

    def __init__(self, root: Path, capacity_bytes: int | None) -> None:
        self.root = root
        self.capacity_bytes = capacity_bytes

    def models(self) -> list[StoredModel]:
        """Return the models, least recently used first."""
        found: list[StoredModel] = []
        with suppress(FileNotFoundError), os.scandir(self.root) as entries:
            for entry in entries:
                if not entry.name.startswith(".") and entry.is_dir(follow_symlinks=False):
                    with suppress(FileNotFoundError):  # removed meanwhile, or no model
                        found.append(_stored_model(Path(entry.path)))
        return sorted(found, key=lambda stored: (stored.used_ns, stored.model))

    def read_lock(self, model: ModelId) -> ReadLock:
        """Return the lock that keeps a model from removal, not yet acquired."""
        return ReadLock(model_directory(self.root, model))

    def in_use(self, model: ModelId) -> bool:
        """Whether any process reads, pins or removes the model now."""
        with suppress(FileNotFoundError):
            try:
                with locked(model_directory(self.root, model)):
                    return False
            except BlockingIOError:
                return True
        return False

    def remove(self, model: ModelId) -> int:
        """Remove a model for all processes at once, then delete its files; return their bytes.

        Raises:
            ShardMissing: there is no such model.
            StoreBusy: it is being read or pinned; nothing was changed.
            UnsafeFile: a link has its name.
        """
        path = model_directory(self.root, model)
        check_no_link(path)
        with map_write_errors(self.root, 0):
            try:
                stored = _stored_model(path)
                with unused(path):
                    self._delete(stored)
            except (FileNotFoundError, NotADirectoryError) as exc:
                raise ShardMissing(f"The store at {str(self.root)!r} holds no model {model!r}.") from exc
        return stored.size_bytes

    @contextmanager
    def reserve(
        self, model: ModelId, size_bytes: int, *, exclusive: bool = False, wait: LockWait | None = None
    ) -> Generator[Reservation]:
        """Reserve room for a model while the block runs; models not in use are removed for it, LRU first.

        With `exclusive` it is refused while another writer has room reserved for the same model.

        Raises:
            TierFull: it would not fit even then; nothing was removed.
            StoreBusy: the same model is being written.
        """
        name = model_name(model, self.root)
        file = self.root / f".{name}.{secrets.token_hex(4)}.reserved"
        with ExitStack() as stack:
            with map_write_errors(self.root, size_bytes):
                make_root(self.root)
                with self._locked(wait):
                    reserved = self._reserved_bytes()
                    if exclusive and name in reserved:
                        raise StoreBusy(f"Another process is writing model {model!r} to {str(self.root)!r}.")
                    unfinished = sum(self._unfinished_bytes(set(reserved) | {name}))
                    evicted = self._make_room(sum(reserved.values()) + unfinished + align(size_bytes))
                    stack.callback(file.unlink, missing_ok=True)
                    with create_file(file) as out:
                        out.write(str(align(size_bytes)).encode())
                    stack.enter_context(locked(file))
            yield Reservation(evicted, file)

    def publish(
        self, directory: Path, model: ModelId, reservation: Reservation, wait: LockWait | None = None
    ) -> None:
        """Give a finished directory its model's name, replacing a model of that name.

        Raises:
            StoreBusy: the replaced model is in use.
        """
        final = model_directory(self.root, model)
        with map_write_errors(self.root, 0), self._locked(wait):
            publish(directory, final, replace_existing=True)
            os.utime(final, ns=(_now_ns(), _now_ns()))
            reservation.release()

    def _locked(self, wait: LockWait | None) -> AbstractContextManager[None]:
        return locked(self.root, wait or LockWait(), follow=True)

    def _make_room(self, size_bytes: int) -> list[ModelId]:
        """Remove models until `size_bytes` fit beside the rest; all that is needed, or none."""
        if self.capacity_bytes is None:
            return []
        models = self.models()
        used_bytes = sum(stored.size_bytes for stored in models)
        missing = used_bytes + size_bytes - self.capacity_bytes
        victims: list[StoredModel] = []
        with ExitStack() as stack:
            for stored in models if size_bytes <= self.capacity_bytes else ():
                if missing <= 0:
                    break
                with suppress(OSError):  # in use
                    stack.enter_context(locked(stored.path))
                    victims.append(stored)
                    missing -= stored.size_bytes
            if missing > 0:
                raise TierFull(
                    f"The budget of {self.capacity_bytes} bytes for {str(self.root)!r} has no room for "
                    f"{size_bytes} more, even without all that is not in use: it lacks {missing}. "
                    "Raise it, or wait until loads end; nothing was changed."
                )
            for stored in victims:
                self._delete(stored)
        return [stored.model for stored in victims]

    def _delete(self, stored: StoredModel) -> None:
        """Delete a model that is locked; a crash leaves it whole, or for `sweep`."""
        removed = self.root / f".{stored.path.name}.{secrets.token_hex(4)}.removed"
        stored.path.rename(removed)
        sync_directory(self.root)
        shutil.rmtree(removed, ignore_errors=True)

    def _reserved_bytes(self) -> dict[str, int]:
        """The bytes reserved by directory; reservations of dead processes are deleted. The root is locked."""
        reserved: dict[str, int] = {}
        for file in self.root.glob(".*.reserved"):
            with suppress(FileNotFoundError):
                try:
                    with locked(file):
                        file.unlink()
                except BlockingIOError:
                    name = file.name[1:].rsplit(".", 2)[0]
                    reserved[name] = reserved.get(name, 0) + int(file.read_text())
        return reserved

    def _unfinished_bytes(self, others: set[str]) -> Iterator[int]:
        """The bytes of conversions that can be resumed, except those of the names in `others`."""
        for directory in self.root.glob(".*.partial"):
            if directory.name[1:].rsplit(".", 2)[0] not in others:
                with suppress(FileNotFoundError):
                    yield _data_bytes(directory)


def _stored_model(path: Path) -> StoredModel:
    """Look at a model; `FileNotFoundError` if there is none."""
    (path / INDEX_NAME).lstat()
    if (model := model_in(path.name)) is None:
        raise FileNotFoundError(errno.ENOENT, "no model has this name", str(path))
    size = _data_bytes(path)
    used_ns = path.stat().st_mtime_ns
    return StoredModel(model=model, path=path, size_bytes=size, used_ns=used_ns)


def _data_bytes(directory: Path) -> int:
    with os.scandir(directory) as files:
        return sum(file.stat(follow_symlinks=False).st_size for file in files if is_data_file(file.name))


def _touch(fd: int) -> None:
    """Set a model's time of last use to now."""
    with suppress(OSError):  # a read-only root
        os.utime(fd, ns=(_now_ns(), _now_ns()))


def _now_ns() -> int:
    """The wall clock, because times of last use are compared across restarts of the machine."""
    return time.time_ns()
