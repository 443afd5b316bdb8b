"""Writing a model so that it is there whole or not at all.

A model is written into `.<id>.<random>.partial` beside its final name, synced, and renamed. The writer holds
a lock (`flock`) on that directory, which the kernel drops when the process dies: a leftover is a partial
directory that nobody has locked, and `sweep` removes it.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import secrets
import shutil
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from io import BufferedWriter
from pathlib import Path

from hotswap.backends.stores.layout import (
    INDEX_NAME,
    Checksum,
    align,
    data_file_name,
    dump_index,
    parse_index,
)
from hotswap.errors import ConfigError, StoreError, TierFull
from hotswap.model import Manifest, Shard

__all__ = ["AlreadyThere", "Progress", "sweep", "write_model"]

_SUFFIX = ".partial"
_PIECE_BYTES = 8 << 20
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


class AlreadyThere(ConfigError):
    """The store has a model of that id, which was not to be replaced."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a conversion is: `phase` is `"read"` or `"write"`, with the bytes done of all."""

    phase: str
    done_bytes: int
    total_bytes: int


def write_model(
    root: Path,
    manifest: Manifest,
    ranks: Iterable[Iterable[memoryview]],
    *,
    side_files: Mapping[str, bytes] | None = None,
    max_file_bytes: int = 4 << 30,
    replace_existing: bool = False,
    progress: Callable[[Progress], None] | None = None,
) -> Manifest:
    """Write a model under `root` and return its manifest with shards.

    `ranks` yields each rank's flat buffer in pieces, in order and without gaps, `manifest.buffer_bytes` in
    all; the manifest's own shards are ignored. Blocking. Whatever `progress` raises ends the writing.

    Raises:
        AlreadyThere: the store has the model, and `replace_existing` is false.
        TierFull: the disk has no room; nothing of the model is left, and what was there before is untouched.
        StoreError: writing failed.
    """
    final = root / manifest.model
    if final.exists() and not replace_existing:
        raise _exists(final)
    needed = align(manifest.buffer_bytes, manifest.alignment_bytes) * manifest.world_size
    with _map_write_errors(root, needed):
        root.mkdir(parents=True, exist_ok=True)
        if shutil.disk_usage(root).free < needed:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        with _partial(root, manifest.model) as directory:
            report = _reporter(progress, needed)
            shards: list[Shard] = []
            for rank, pieces in enumerate(ranks):
                writer = _RankWriter(directory, manifest, rank, max_file_bytes=max_file_bytes, report=report)
                shards += writer.write_all(pieces)
            whole = replace(manifest, shards=tuple(shards), buffer_bytes=needed // manifest.world_size)
            index = dump_index(whole)
            parse_index(
                index, path=directory / INDEX_NAME, model=manifest.model
            )  # what could not be read is not written
            for name, content in {**(side_files or {}), INDEX_NAME: index}.items():
                _write_file(directory / name, content)
            _publish(directory, final, replace_existing=replace_existing)
    return whole


def sweep(root: Path) -> list[Path]:
    """Remove what writers that died have left under `root`, and return it; living writers are left alone."""
    swept: list[Path] = []
    for directory in sorted(root.glob(f".*{_SUFFIX}")):
        with suppress(OSError), _locked(directory):
            shutil.rmtree(directory)
            swept.append(directory)
    return swept


class _RankWriter:
    """Writes one rank's flat buffer to files of at most `max_file_bytes`, one shard each."""

    def __init__(
        self,
        directory: Path,
        manifest: Manifest,
        rank: int,
        *,
        max_file_bytes: int,
        report: Callable[[int], None],
    ) -> None:
        self._directory = directory
        self._manifest = manifest
        self._rank = rank
        self._report = report
        self._unit = manifest.alignment_bytes
        self._most = max(self._unit, max_file_bytes // self._unit * self._unit)
        self._shards: list[Shard] = []
        self._done = 0

    def write_all(self, pieces: Iterable[memoryview]) -> list[Shard]:
        """Write the buffer, zeros up to the alignment behind it, and return its shards."""
        rest = _padded(pieces, self._manifest.buffer_bytes, self._unit)
        piece = next(rest, None)
        while piece is not None:
            piece = self._write_file(piece, rest)
        return self._shards

    def _write_file(self, piece: memoryview | None, rest: Iterator[memoryview]) -> memoryview | None:
        """Write one file, beginning with `piece`; return what did not fit, `None` at the end."""
        name = data_file_name(self._rank, self._manifest.world_size, len(self._shards))
        checksum, size = Checksum(), 0
        with _created(self._directory / name) as file:
            while piece is not None and size < self._most:
                fits, over = piece[: self._most - size], piece[self._most - size :]
                file.write(fits)
                checksum.update(fits)
                size += len(fits)
                self._report(len(fits))
                piece = over if len(over) else next(rest, None)
        self._shards.append(
            Shard(
                model=self._manifest.model,
                rank=self._rank,
                file=name,
                file_offset_bytes=0,
                buffer_offset_bytes=self._done,
                size_bytes=size,
                checksum=str(checksum),
            )
        )
        self._done += size
        return piece


def _padded(pieces: Iterable[memoryview], size: int, unit: int) -> Iterator[memoryview]:
    """The pieces, empty ones left out, in lengths that report progress often, then zeros up to `unit`."""
    done = 0
    for piece in pieces:
        for start in range(0, len(piece), _PIECE_BYTES):
            yield piece[start : start + _PIECE_BYTES]
        done += len(piece)
    assert done == size, f"{done} bytes were given for a buffer of {size}"
    if done % unit:
        yield memoryview(bytes(unit - done % unit))


@contextmanager
def _created(path: Path) -> Generator[BufferedWriter]:
    """A new file, on the disk once the block is left."""
    with path.open("xb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


def _write_file(path: Path, content: bytes) -> None:
    with _created(path) as file:
        file.write(content)


def _reporter(progress: Callable[[Progress], None] | None, total_bytes: int) -> Callable[[int], None]:
    done = 0

    def report(size: int) -> None:
        nonlocal done
        done += size
        if progress is not None:
            progress(Progress(phase="write", done_bytes=done, total_bytes=total_bytes))

    return report


# ------------------------------------------------------------------------------- all of it, or nothing


@contextmanager
def _partial(root: Path, model: str) -> Generator[Path]:
    """A new locked directory beside the model's own, gone when the block ends unless it was renamed."""
    while True:
        directory = root / f".{model}.{secrets.token_hex(4)}{_SUFFIX}"
        directory.mkdir()
        with _locked(directory):
            if not directory.exists():  # swept between its making and its locking
                continue
            try:
                yield directory
            finally:
                shutil.rmtree(directory, ignore_errors=True)
            return


@contextmanager
def _locked(directory: Path) -> Generator[None]:
    """Hold the lock on a directory; `OSError` if another process, or another writer of this one, has it."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(fd)


def _publish(directory: Path, final: Path, *, replace_existing: bool) -> None:
    """Give a finished directory its name; the one that had it, if any, gets the other's, and goes with it."""
    _sync(directory)
    try:
        directory.rename(final)
    except OSError as exc:
        if exc.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        if not replace_existing:
            raise _exists(final) from exc
        _exchange(directory, final)
    _sync(final.parent)


def _exchange(one: Path, other: Path) -> None:
    """Swap the names of two directories: at once on Linux, so that a crash finds one of them whole."""
    with suppress(AttributeError, OSError):
        libc = ctypes.CDLL(None, use_errno=True)
        if not libc.renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE):
            return
    aside = one.with_name(f"{one.name.removesuffix(_SUFFIX)}.old{_SUFFIX}")
    other.rename(aside)
    one.rename(other)
    aside.rename(one)


def _sync(directory: Path) -> None:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _exists(final: Path) -> AlreadyThere:
    return AlreadyThere(f"{str(final)!r} is there already. Remove it first, or convert with `--replace`.")


@contextmanager
def _map_write_errors(root: Path, needed_bytes: int) -> Generator[None]:
    try:
        yield
    except OSError as exc:
        if exc.errno in _FULL:
            raise TierFull(
                f"{str(root)!r} has no room for the {needed_bytes} bytes of the model ({exc.strerror}). "
                "Free some, or choose another root; nothing was changed."
            ) from exc
        raise StoreError(f"Writing to {str(root)!r} failed: {exc.strerror or exc}. Check the disk.") from exc
