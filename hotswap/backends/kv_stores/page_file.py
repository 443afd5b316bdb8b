"""The file of an `NvmeKVStore`: it has no name, so it goes with the process that has it open."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hotswap.backends.crc import crc32
from hotswap.backends.kv_stores.pages import PAGE_BYTES, PagePool, Pages
from hotswap.errors import ConfigError, StoreError

__all__ = ["FilePlace", "PageFile"]


@dataclass(slots=True, eq=False)
class FilePlace:
    """Where a block is in the file, the CRC-32 of what was written there, and whether a read has failed."""

    pages: Pages
    crc: int = 0
    is_broken: bool = False


class PageFile:
    """A file for blocks, allocated page by page. `open`, `write`, `read` and `close` block; any thread may.

    It is written through the page cache, so that a write takes as long as a copy and the system writes to the
    disk behind it. What is read is compared with its checksum: a system that fails to write behind tells so
    too late, and other bytes would be taken for keys and values.

    Args:
        directory: Where it is.
        size_bytes: The most that all blocks take.
    """

    def __init__(self, directory: Path, size_bytes: int) -> None:
        self._directory = directory
        self._pool = PagePool(size_bytes // PAGE_BYTES)
        self._file: int | None = None

    def open(self) -> None:
        """Make the file, which its owner alone can read.

        Raises:
            ConfigError: the directory does not take it.
        """
        try:
            self._file = _nameless_file(self._directory)
        except OSError as exc:
            raise ConfigError(
                f"{str(self._directory)!r} cannot have the file of a KV store: {exc.strerror or exc}. Name a "
                "directory on a local disk that this user can write to."
            ) from exc

    def close(self) -> None:
        """Close the file, and so delete it."""
        file, self._file = self._file, None
        if file is not None:
            os.close(file)

    # ------------------------------------------------------------------ places

    def allocate(self, block_bytes: int) -> FilePlace:
        """Return a place for a block; the caller keeps count of the pages."""
        return FilePlace(self._pool.allocate(block_bytes))

    def free(self, place: FilePlace) -> None:
        """Take a place back."""
        self._pool.free(place.pages)

    # ------------------------------------------------------------------ content

    def write(self, places: Sequence[FilePlace], data: memoryview) -> None:
        """Copy blocks of equal size to their places.

        Raises:
            StoreError: the disk is full, or fails.
        """
        block_bytes = len(data) // len(places)
        for number, place in enumerate(places):
            block = data[number * block_bytes : (number + 1) * block_bytes]
            place.crc = crc32(block, 0)
            for offset, part in _parts(place.pages, block):
                self._write_at(offset, part)

    def read(self, places: Sequence[FilePlace], out: memoryview, block_bytes: int) -> None:
        """Copy blocks to memory, one after another.

        Raises:
            StoreError: the disk fails, or has other bytes than were written.
        """
        for number, place in enumerate(places):
            try:
                self._read_block(place, out[number * block_bytes : (number + 1) * block_bytes])
            except StoreError:
                place.is_broken = True
                raise

    def _read_block(self, place: FilePlace, out: memoryview) -> None:
        for offset, part in _parts(place.pages, out):
            self._read_at(offset, part)
        if crc32(out, 0) != place.crc:
            raise self._error("A KV block reads otherwise than it was written")

    def _write_at(self, offset: int, data: memoryview) -> None:
        assert self._file is not None, "the file is closed"
        while len(data):
            try:
                count = os.pwrite(self._file, data, offset)
            except OSError as exc:
                raise self._error(f"KV blocks cannot be written: {exc.strerror or exc}") from exc
            data, offset = data[count:], offset + count

    def _read_at(self, offset: int, out: memoryview) -> None:
        assert self._file is not None, "the file is closed"
        while len(out):
            try:
                count = os.preadv(self._file, [out], offset)
            except OSError as exc:
                raise self._error(f"KV blocks cannot be read: {exc.strerror or exc}") from exc
            if not count:
                raise self._error("The file of KV blocks ends before one of them")
            out, offset = out[count:], offset + count

    def _error(self, what: str) -> StoreError:
        return StoreError(
            f"{what}, in {str(self._directory)!r}. Check the disk and its room; tokens are computed again."
        )


def _parts(pages: Pages, block: memoryview) -> Iterator[tuple[int, memoryview]]:
    """Return the parts of a block that lie in neighbouring pages, each with where it begins in the file."""
    ends = [*(np.flatnonzero(np.diff(pages) != 1) + 1).tolist(), len(pages)]
    first = 0
    for end in ends:
        if part := block[first * PAGE_BYTES : end * PAGE_BYTES]:
            yield int(pages[first]) * PAGE_BYTES, part
        first = end


def _nameless_file(directory: Path) -> int:
    if hasattr(os, "O_TMPFILE"):
        with suppress(OSError):  # a file system without such files
            return os.open(directory, os.O_RDWR | os.O_CLOEXEC | os.O_TMPFILE, 0o600)
    file, path = tempfile.mkstemp(dir=directory)
    os.unlink(path)
    return file
