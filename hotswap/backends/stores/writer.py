"""Writing a model: each rank's flat buffer into data files, with the checksums of files and tensors.

All of a model appears, or nothing, and a killed conversion can be resumed (`partial`).
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field, replace
from io import BufferedWriter
from pathlib import Path

from hotswap.backends.stores.files import (
    create_file,
    make_root,
    map_write_errors,
    sync_directory,
    write_file,
)
from hotswap.backends.stores.index import dump_index, parse_index
from hotswap.backends.stores.layout import INDEX_NAME, Checksum, align, data_file_name, model_directory
from hotswap.backends.stores.locks import LockWait
from hotswap.backends.stores.partial import (
    AlreadyThere,
    FinishedFile,
    Journal,
    check_name,
    partial_directory,
    publish,
    sweep,
)
from hotswap.model import Manifest, Shard, TensorSpec

__all__ = [
    "AlreadyThere",
    "ModelWriter",
    "Progress",
    "RankWriter",
    "WriteOptions",
    "sweep",
    "write_model",
    "writing",
]

_PIECE_BYTES = 8 << 20
_ZEROS = memoryview(bytes(1 << 20))


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Progress of a conversion: `phase` is `"read"` or `"write"`, with the bytes done and the total."""

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
    """Write a model under `root` and return its manifest with shards and checksums.

    `ranks` yields each rank's flat buffer in pieces, in order and without gaps, `manifest.buffer_bytes` in
    all; the manifest's own shards are ignored. Blocking. An error raised by `progress` ends the writing.

    Raises:
        AlreadyThere: the store has the model, and `replace_existing` is false.
        UnsafeFile: the store has something else of that name.
        ConfigError: `root` is a file.
        StoreBusy: the model that would be replaced is read or pinned, and still is after the wait for it.
        TierFull: the disk has no room; nothing of the model is left, and other models are untouched.
        StoreError: writing failed.
    """
    options = WriteOptions(
        max_file_bytes=max_file_bytes, replace_existing=replace_existing, progress=progress
    )
    with writing(root, manifest, side_files=side_files or {}, options=options) as writer:
        for rank, pieces in zip(writer.ranks, ranks, strict=False):
            for piece in pieces:
                rank.write(piece)
            assert rank.position == manifest.buffer_bytes, f"{rank.position} bytes were given for the buffer"
    return writer.manifest


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteOptions:
    """How a model is written. `key` identifies the content, so that a dead conversion can be resumed.

    `files` are the names and sizes of the data files of a single rank where they are given; otherwise files
    are named by rank and part, and split at `max_file_bytes`.
    `wait` is for the uses of a model that is replaced.
    """

    max_file_bytes: int = 4 << 30
    replace_existing: bool = False
    progress: Callable[[Progress], None] | None = None
    key: str | None = None
    files: tuple[tuple[str, int], ...] = ()
    wait: LockWait = field(default_factory=LockWait)


class ModelWriter:
    """A model being written: one buffer for each rank, which may be filled in any interleaving.

    `manifest` gains shards and checksums when the block of `writing` ends.
    """

    def __init__(self, manifest: Manifest, ranks: Sequence[RankWriter]) -> None:
        self.manifest = manifest
        self.ranks = tuple(ranks)

    def close_ranks(self) -> None:
        """Pad every buffer, and add its shards and checksums to the manifest."""
        for rank in self.ranks:
            rank.finish()
        ranks = {writer.rank: writer for writer in self.ranks}
        self.manifest = replace(
            self.manifest,
            shards=tuple(shard for writer in self.ranks for shard in writer.shards()),
            buffer_bytes=align(self.manifest.buffer_bytes, self.manifest.alignment_bytes),
            tensors=tuple(
                replace(tensor, checksum=ranks[tensor.rank].checksum_of(tensor))
                for tensor in self.manifest.tensors
            ),
        )


@contextmanager
def writing(
    root: Path, manifest: Manifest, *, side_files: Mapping[str, bytes], options: WriteOptions
) -> Generator[ModelWriter]:
    """Write a model in the block: it appears when the block ends, and not if the block raises.

    An interrupt of the process (`KeyboardInterrupt`, a kill) keeps the finished files where `options.key` is
    given, for the next writer with this key; any other error leaves nothing. Raises as `write_model` does.
    """
    final = model_directory(root, manifest.model)
    needed = align(manifest.buffer_bytes, manifest.alignment_bytes) * manifest.world_size
    with map_write_errors(root, needed):
        check_name(final, replace_existing=options.replace_existing, wait=options.wait)
        make_root(root)
        with partial_directory(root, final.name, options.key) as (directory, journal):
            done = sum(file.size_bytes for file in journal.finished) if journal else 0
            if shutil.disk_usage(root).free < needed - done:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            report = _reporter(options.progress, done, needed)
            report(0)
            with ExitStack() as files:
                ranks = [
                    files.enter_context(
                        closing(RankWriter(directory, manifest, rank, options, report, journal))
                    )
                    for rank in range(manifest.world_size)
                ]
                writer = ModelWriter(manifest, ranks)
                yield writer
                writer.close_ranks()
            index = dump_index(writer.manifest)
            # An index that cannot be read is not written.
            parse_index(index, path=directory / INDEX_NAME, model=manifest.model)
            for name, content in {**side_files, INDEX_NAME: index}.items():
                write_file(directory / name, content)
            if journal is not None:
                # While it is there, a model that is in use by now can be replaced by a later call.
                check_name(final, replace_existing=options.replace_existing, wait=options.wait)
                journal.close()
            publish(directory, final, replace_existing=options.replace_existing, wait=options.wait)


class RankWriter:
    """Writes one rank's flat buffer to files, one shard each, as `WriteOptions` names and splits them.

    Bytes that an earlier writer has finished are accepted and dropped: `finished_bytes` says how many, so
    that a caller need not compute them.
    """

    def __init__(
        self,
        directory: Path,
        manifest: Manifest,
        rank: int,
        options: WriteOptions,
        report: Callable[[int], None],
        journal: Journal | None,
    ) -> None:
        self.rank = rank
        self.position = 0
        self._directory = directory
        self._model = manifest.model
        self._world_size = manifest.world_size
        self._report = report
        self._journal = journal
        self._unit = manifest.alignment_bytes
        self._end = align(manifest.buffer_bytes, self._unit)
        self._given = options.files
        self._split = max(self._unit, options.max_file_bytes // self._unit * self._unit)
        self._files: list[FinishedFile] = journal.of(rank) if journal else []
        self.finished_bytes = sum(file.size_bytes for file in self._files)
        self._tensors = TensorChecksums(manifest.tensors_of(rank), self._files)
        self._file: BufferedWriter | None = None
        self._checksum = Checksum()
        self._name, self._most, self._size = "", 0, 0

    def write(self, data: memoryview) -> None:
        """Append bytes to the buffer."""
        dropped = min(len(data), max(0, self.finished_bytes - self.position))
        self.position += dropped
        for start in range(dropped, len(data), _PIECE_BYTES):
            self._write_piece(data[start : start + _PIECE_BYTES])

    def skip_to(self, position: int) -> None:
        """Pad with zeros up to `position`; bytes that an earlier writer has finished are skipped."""
        if self.position < self.finished_bytes:
            self.position = min(position, self.finished_bytes)
        while self.position < position:
            self.write(_ZEROS[: min(len(_ZEROS), position - self.position)])

    def finish(self) -> None:
        """Append zeros up to the alignment, and sync the files to the disk."""
        self.skip_to(self._end)
        if self._file is not None:
            self._finish_file()

    def close(self) -> None:
        """Close the file that was being written, if any."""
        if self._file is not None:
            self._file.close()

    def shards(self) -> list[Shard]:
        """The shards of the finished buffer."""
        return [
            Shard(
                model=self._model,
                rank=self.rank,
                file=file.file,
                file_offset_bytes=0,
                buffer_offset_bytes=file.offset_bytes,
                size_bytes=file.size_bytes,
                checksum=file.checksum,
            )
            for file in self._files
        ]

    def checksum_of(self, tensor: TensorSpec) -> str:
        """The checksum of a tensor's bytes, once they are written."""
        return self._tensors.of(tensor)

    def _write_piece(self, piece: memoryview) -> None:
        while len(piece):
            if self._file is None:
                self._begin_file()
            assert self._file is not None
            fits, piece = piece[: self._most - self._size], piece[self._most - self._size :]
            self._file.write(fits)
            self._checksum.update(fits)
            self._tensors.update(self.position, fits)
            self._size += len(fits)
            self.position += len(fits)
            self._report(len(fits))
            if self._size == self._most:
                self._finish_file()

    def _begin_file(self) -> None:
        part = len(self._files)
        if self._given:
            self._name, self._most = self._given[part]
        else:
            self._name, self._most = data_file_name(self.rank, self._world_size, part), self._split
        self._file = create_file(self._directory / self._name)
        self._checksum, self._size = Checksum(), 0

    def _finish_file(self) -> None:
        assert self._file is not None
        with self._file:
            self._file.flush()
            os.fsync(self._file.fileno())
        self._file = None
        done, unfinished = self._tensors.take()
        finished = FinishedFile(
            rank=self.rank,
            file=self._name,
            offset_bytes=self.position - self._size,
            size_bytes=self._size,
            checksum=str(self._checksum),
            tensors=done,
            unfinished=unfinished,
        )
        self._files.append(finished)
        if self._journal is not None:
            sync_directory(self._directory)
            self._journal.add(finished)


class TensorChecksums:
    """The checksums of a rank's tensors, computed as its buffer is written in order."""

    def __init__(self, tensors: Sequence[TensorSpec], finished: Sequence[FinishedFile]) -> None:
        self._places = sorted(
            {(t.offset_bytes, t.offset_bytes + t.size_bytes) for t in tensors if t.size_bytes}
        )
        self._done: dict[str, str] = {}
        for file in finished:
            self._done.update(file.tensors)
        self._current = Checksum(finished[-1].unfinished) if finished else Checksum()
        self._next = len(self._done)
        self._new: dict[str, str] = {}

    def update(self, position: int, data: memoryview) -> None:
        """Feed the bytes at `position` of the buffer, which follow those fed before."""
        end = position + len(data)
        while self._next < len(self._places) and self._places[self._next][0] < end:
            start, stop = self._places[self._next]
            self._current.update(data[max(0, start - position) : stop - position])
            if stop > end:
                return
            self._new[str(start)] = str(self._current)
            self._current = Checksum()
            self._next += 1

    def take(self) -> tuple[dict[str, str], str]:
        """The checksums finished since the last call, by offset, and the running one of the next tensor."""
        new, self._new = self._new, {}
        self._done.update(new)
        return new, str(self._current)

    def of(self, tensor: TensorSpec) -> str:
        """The checksum of a tensor that was written."""
        return self._done[str(tensor.offset_bytes)] if tensor.size_bytes else str(Checksum())


def _reporter(
    progress: Callable[[Progress], None] | None, done: int, total_bytes: int
) -> Callable[[int], None]:
    def report(size: int) -> None:
        nonlocal done
        done += size
        if progress is not None:
            progress(Progress(phase="write", done_bytes=done, total_bytes=total_bytes))

    return report
