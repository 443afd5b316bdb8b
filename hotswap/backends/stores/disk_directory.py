"""The models in one directory of a disk, shared by processes: a byte budget, read locks and LRU removal.

A model that another tier reads is written there shard by shard: all of it, or nothing.

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
from collections.abc import AsyncGenerator, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, asynccontextmanager, contextmanager, suppress
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
    sync_file,
    write_file,
)
from hotswap.backends.stores.index import dump_index, parse_index
from hotswap.backends.stores.layout import (
    INDEX_NAME,
    Checksum,
    align,
    check_file_name,
    is_data_file,
    model_directory,
    model_in,
    model_name,
)
from hotswap.backends.stores.locks import LockWait, locked, unlock_whole
from hotswap.backends.stores.partial import is_model, publish, temporary_directory, unused
from hotswap.backends.stores.pieces import check_shard
from hotswap.errors import ShardMissing, StoreBusy, StoreError, TierFull
from hotswap.model import Manifest, Shard
from hotswap.request import ModelId
from hotswap.worker_threads import run_in_thread

__all__ = ["Admission", "DiskDirectory", "ReadLock", "Reservation", "ShardFile", "StoredModel"]


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
        with map_read_errors(self.root), suppress(FileNotFoundError), os.scandir(self.root) as entries:
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
        """Remove a model, whole or not, for all processes at once, then delete its files; return their bytes.

        Raises:
            ShardMissing: there is no such model.
            StoreBusy: it is being read or pinned; nothing was changed.
            UnsafeFile: a link has its name.
        """
        path = model_directory(self.root, model)
        check_no_link(path)
        with map_write_errors(self.root, 0):
            try:
                stored = _stored_model(path, indexed=not is_model(path))
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


def _stored_model(path: Path, *, indexed: bool = True) -> StoredModel:
    """Look at a model; `FileNotFoundError` if there is none."""
    (path / INDEX_NAME if indexed else path).lstat()
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


class Admission:
    """A model being written to a disk tier: reserved room, and a hidden directory that `commit` publishes.

    `NvmeStore.admit` makes it and ends it. Shards may be written in any order and side by side, each from its
    beginning; one that was not finished may be written again.
    """

    def __init__(self, disk: DiskDirectory, manifest: Manifest, wait: LockWait) -> None:
        model_name(manifest.model, disk.root)
        self.manifest = manifest
        self.committed = False
        self._disk = disk
        self._wait = wait
        self._missing = dict.fromkeys(manifest.shards)
        self._stack = ExitStack()
        self._reservation: Reservation | None = None
        self._directory = disk.root

    @property
    def missing(self) -> tuple[Shard, ...]:
        """The shards that are not finished yet."""
        return tuple(self._missing)

    @property
    def evicted(self) -> tuple[ModelId, ...]:
        """The models that were removed to make room."""
        return tuple(self._reservation.evicted) if self._reservation is not None else ()

    @asynccontextmanager
    async def shard(self, shard: Shard) -> AsyncGenerator[ShardFile]:
        """Write one shard; it counts once `finish` was called.

        Raises:
            TierFull, StoreError: the file cannot be written.
        """
        file = ShardFile(self._directory, shard, self._disk.root)
        try:
            await run_in_thread(file.open)
            yield file
            if file.finished:
                self._missing.pop(shard, None)
        finally:
            await run_in_thread(file.close)

    async def commit(self, side_files: Mapping[str, bytes] | None = None) -> None:
        """Sync all files to the disk, the index last, and give the directory the model's name.

        Raises:
            StoreError: shards are missing, the disk is full, or a former copy of the model is in use.
        """
        if self._missing:
            raise StoreError(
                f"{len(self._missing)} shards of model {self.manifest.model!r} were not written. Finish them."
            )
        await run_in_thread(self._commit, dict(side_files or {}))

    # ------------------------------------------------------------------------------------- worker threads

    def begin(self) -> None:
        """Make room and the hidden directory.

        Raises:
            TierFull: there is no room.
            StoreError: another process writes the model, or the directory cannot be written.
            ShardCorrupt, UnsafeFile: the manifest contradicts itself.
        """
        root, model = self._disk.root, self.manifest.model
        parse_index(dump_index(self.manifest), path=model_directory(root, model), model=model)
        self._reservation = self._stack.enter_context(
            self._disk.reserve(model, self.manifest.weight_bytes, exclusive=True, wait=self._wait)
        )
        with self._map_errors():
            if shutil.disk_usage(root).free < self.manifest.weight_bytes:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self._directory = self._stack.enter_context(temporary_directory(root, model_name(model, root)))

    def close(self) -> None:
        """Delete what was not committed, and end the reservation."""
        self._stack.close()

    def _commit(self, side_files: dict[str, bytes]) -> None:
        assert self._reservation is not None, "begin was not called"
        with self._map_errors():
            for name in {shard.file for shard in self.manifest.shards}:
                sync_file(self._directory / name)
            for name, content in {**side_files, INDEX_NAME: dump_index(self.manifest)}.items():
                check_file_name(name, self._directory)
                write_file(self._directory / name, content)
        self._disk.publish(self._directory, self.manifest.model, self._reservation, self._wait)
        self.committed = True

    def _map_errors(self) -> AbstractContextManager[None]:
        return map_write_errors(self._disk.root, self.manifest.weight_bytes)


class ShardFile:
    """Writes one shard to its place in a data file, from its first byte to its last."""

    def __init__(self, directory: Path, shard: Shard, root: Path) -> None:
        self.finished = False
        self._path = directory / shard.file
        self._shard = shard
        self._root = root
        self._checksum = Checksum()
        self._done_bytes = 0
        self._fd = -1

    async def write(self, data: memoryview) -> None:
        """Write the next bytes, which must not change until it returns."""
        await run_in_thread(self._write, data)

    def finish(self) -> None:
        """Compare the checksum; the shard is complete.

        Raises:
            ShardCorrupt: the bytes are not those of the shard.
        """
        check_shard(self._shard, self._checksum)
        self.finished = True

    def open(self) -> None:
        """Open the file, creating it if need be. Blocking."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        with map_write_errors(self._root, self._shard.size_bytes):
            self._fd = os.open(self._path, flags, 0o600)

    def close(self) -> None:
        """Close the file; may be called before `open`."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _write(self, data: memoryview) -> None:
        if self._done_bytes + len(data) > self._shard.size_bytes:
            raise StoreError(
                f"More than the {self._shard.size_bytes} bytes of {self._shard.file!r} were given. "
                "Check the store that they come from."
            )
        with map_write_errors(self._root, self._shard.size_bytes):
            written = 0
            while written < len(data):
                at = self._shard.file_offset_bytes + self._done_bytes + written
                written += os.pwrite(self._fd, data[written:], at)
        self._checksum.update(data)
        self._done_bytes += len(data)
