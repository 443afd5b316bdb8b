"""A model on its way into a disk tier, shard by shard from wherever it is read: whole, or not at all."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import AsyncGenerator, Mapping
from contextlib import AbstractContextManager, ExitStack, asynccontextmanager, suppress
from pathlib import Path

from anyio import to_thread

from hotswap.backends.stores.disk_shelf import DiskShelf, Room, map_write_errors
from hotswap.backends.stores.index import dump_index, parse_index
from hotswap.backends.stores.layout import INDEX_NAME, Checksum, check_file_name
from hotswap.backends.stores.reading import check_shard
from hotswap.errors import StoreError
from hotswap.model import Manifest, Shard
from hotswap.request import ModelId

__all__ = ["Admission", "ShardFile"]


class Admission:
    """Room in a disk tier, and a hidden directory that becomes the model with `commit`.

    `NvmeStore.admit` makes it and ends it. Shards may be written in any order and side by side, each from its
    beginning; one that was not finished may be begun anew.
    """

    def __init__(self, shelf: DiskShelf, manifest: Manifest) -> None:
        check_file_name(manifest.model, shelf.root)
        self.manifest = manifest
        self.committed = False
        self._shelf = shelf
        self._missing = dict.fromkeys(manifest.shards)
        self._stack = ExitStack()
        self._room: Room | None = None
        self._directory = shelf.root

    @property
    def missing(self) -> tuple[Shard, ...]:
        """The shards that were not finished yet."""
        return tuple(self._missing)

    @property
    def evicted(self) -> tuple[ModelId, ...]:
        """The models that went to make room."""
        return tuple(self._room.evicted) if self._room is not None else ()

    @asynccontextmanager
    async def shard(self, shard: Shard) -> AsyncGenerator[ShardFile]:
        """Write one shard; it counts once `finish` was called.

        Raises:
            TierFull, StoreError: the file cannot be written.
        """
        file = ShardFile(self._directory, shard, self._shelf.root)
        try:
            await to_thread.run_sync(file.open)
            yield file
            if file.finished:
                self._missing.pop(shard, None)
        finally:
            await to_thread.run_sync(file.close)

    async def commit(self, side_files: Mapping[str, bytes] | None = None) -> None:
        """Bring all of it to the disk, the index last, and give it the model's name.

        Raises:
            StoreError: shards are missing, the disk is full, or a former copy of the model is in use.
        """
        if self._missing:
            raise StoreError(
                f"{len(self._missing)} shards of model {self.manifest.model!r} were not written. Finish them."
            )
        await to_thread.run_sync(self._commit, dict(side_files or {}))

    # ------------------------------------------------------------------------------------- worker threads

    def begin(self) -> None:
        """Make room and the hidden directory.

        Raises:
            TierFull: there is no room.
            StoreError: another process writes the model, or the directory cannot be written.
            ShardCorrupt, UnsafeFile: the manifest contradicts itself.
        """
        root, model = self._shelf.root, self.manifest.model
        parse_index(dump_index(self.manifest), path=root / model, model=model)
        self._room = self._stack.enter_context(
            self._shelf.reserve(model, self.manifest.weight_bytes, alone=True)
        )
        with self._mapped():
            if shutil.disk_usage(root).free < self.manifest.weight_bytes:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._directory = self._stack.enter_context(self._shelf.new_directory(model))

    def close(self) -> None:
        """Remove what was not committed, and give back the room."""
        self._stack.close()

    def _commit(self, side_files: dict[str, bytes]) -> None:
        assert self._room is not None, "begin was not called"
        with self._mapped():
            for name in {shard.file for shard in self.manifest.shards}:
                _sync_file(self._directory / name)
            for name, text in {**side_files, INDEX_NAME: dump_index(self.manifest)}.items():
                check_file_name(name, self._directory)
                _write_file(self._directory / name, text)
        self._shelf.publish(self._directory, self.manifest.model, self._room)
        self.committed = True

    def _mapped(self) -> AbstractContextManager[None]:
        return map_write_errors(self._shelf.root, self.manifest.weight_bytes)


class ShardFile:
    """The place of one shard in a data file; written from its first byte to its last."""

    def __init__(self, directory: Path, shard: Shard, root: Path) -> None:
        self.finished = False
        self._path = directory / shard.file
        self._shard = shard
        self._root = root
        self._checksum = Checksum()
        self._done_bytes = 0
        self._fd = -1

    async def write(self, data: memoryview) -> None:
        """Write the next bytes, which must stay as they are until it returns."""
        await to_thread.run_sync(self._write, data)

    def finish(self) -> None:
        """Say that this was all.

        Raises:
            ShardCorrupt: the bytes are not those of the shard.
        """
        check_shard(self._shard, self._checksum)
        self.finished = True

    def open(self) -> None:
        """Open the file, making it if need be. Blocking."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        with map_write_errors(self._root, self._shard.size_bytes):
            self._fd = os.open(self._path, flags, 0o666)

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


def _sync_file(path: Path) -> None:
    """Bring a data file to the disk, and let go of its pages: it will be read directly."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        os.fsync(fd)
        with suppress(AttributeError, OSError):
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


def _write_file(path: Path, text: bytes) -> None:
    with path.open("xb") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
