"""Writing a model into a disk tier shard by shard, as another tier reads them: all of it, or nothing."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import AsyncGenerator, Mapping
from contextlib import AbstractContextManager, ExitStack, asynccontextmanager
from pathlib import Path

from hotswap.backends.stores.disk_directory import DiskDirectory, Reservation
from hotswap.backends.stores.files import map_write_errors, sync_file, write_file
from hotswap.backends.stores.index import dump_index, parse_index
from hotswap.backends.stores.layout import INDEX_NAME, Checksum, check_file_name, model_directory, model_name
from hotswap.backends.stores.locks import LockWait
from hotswap.backends.stores.partial import temporary_directory
from hotswap.backends.stores.pieces import check_shard
from hotswap.errors import StoreError
from hotswap.model import Manifest, Shard
from hotswap.request import ModelId
from hotswap.worker_threads import run_in_thread

__all__ = ["Admission", "ShardFile"]


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
