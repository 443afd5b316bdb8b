"""The hidden directory that a model is written in, its journal, and its atomic rename to the model's name.

    <root>/.<model>.<key>.partial                locked by the writer; an unlocked one is a leftover
    <root>/.<model>.<key>.partial/journal.jsonl  a line for the conversion, then one a finished file

The directory is synced, and renamed to the model's name. `sweep` removes a leftover, unless a conversion can
resume from its journal. A line of that is a checksum and a JSON object, appended once its file is synced. The
key is a digest of the source, the options and the layout, so that another conversion uses another
directory. A line is trusted only after its file's bytes were compared with it.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import re
import secrets
import shutil
from collections.abc import Generator, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from hotswap.backends.fields import Fields, parse_object
from hotswap.backends.stores.files import check_no_link, sync_directory
from hotswap.backends.stores.layout import (
    INDEX_NAME,
    SOURCE_NAME,
    STORED_FILES,
    Checksum,
    check_file_name,
    is_checksum,
    is_data_file,
)
from hotswap.backends.stores.locks import LockWait, holder_of, locked
from hotswap.errors import ConfigError, StoreBusy, StoreError, UnsafeFile

__all__ = [
    "JOURNAL_NAME",
    "AlreadyThere",
    "FinishedFile",
    "Journal",
    "check_name",
    "has_progress",
    "is_model",
    "partial_directory",
    "publish",
    "sweep",
    "temporary_directory",
    "unused",
]

_SUFFIX = ".partial"
_LEFTOVERS = (_SUFFIX, ".removed")
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
JOURNAL_NAME: Final = "journal.jsonl"
_VERSION: Final = 1
_APPEND = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
_PIECE_BYTES = 8 << 20
_DATA_FILE: Final = re.compile(r"rank-\d+-of-\d+\.\d+\.bin")


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedFile:
    """A finished data file: `size_bytes` of the rank's buffer from `offset_bytes`.

    `tensors` maps the offsets of the tensors that end in it, as JSON keys, to their checksums; `unfinished`
    is the running checksum of the tensor that continues in the next file.
    """

    rank: int
    file: str
    offset_bytes: int
    size_bytes: int
    checksum: str
    tensors: Mapping[str, str]
    unfinished: str


class Journal:
    """The journal in a directory that this process has locked: read on opening, then appended to."""

    def __init__(self, directory: Path, key: str) -> None:
        self._path = directory / JOURNAL_NAME
        self._first_line = {"format": "hotswap-journal", "version": _VERSION, "key": key}
        self.finished = list(self._read())
        self._remove_unfinished(directory)
        self._path.unlink(missing_ok=True)
        self._append(self._first_line)
        for file in self.finished:
            self._append(asdict(file))

    def of(self, rank: int) -> list[FinishedFile]:
        """The finished files of a rank, in order and without gaps."""
        return [file for file in self.finished if file.rank == rank]

    def add(self, file: FinishedFile) -> None:
        """Add a finished file; it must be on the disk already."""
        self.finished.append(file)
        self._append(asdict(file))

    def close(self) -> None:
        """Remove the journal; everything is finished."""
        self._path.unlink()

    def _append(self, line: object) -> None:
        with os.fdopen(os.open(self._path, _APPEND, 0o600), "ab") as file:
            file.write(_signed(json.dumps(line).encode()) + b"\n")
            file.flush()
            os.fsync(file.fileno())

    def _read(self) -> Iterator[FinishedFile]:
        """The valid lines; of each rank those before its first invalid one."""
        lines = self._path.read_bytes().splitlines() if self._path.is_file() else []
        ends: dict[int, int] = {}
        for number, line in enumerate(lines):
            text = line.partition(b" ")[2]
            if line != _signed(text):  # the machine stopped while it was written
                return
            try:
                fields = parse_object(text, self._path)
                if number == 0:
                    if fields.raw != self._first_line:
                        return
                    continue
                file = _finished(fields, self._path)
            except StoreError:
                return
            if file.offset_bytes == ends.get(file.rank, 0) and _is_whole(self._path.parent, file):
                ends[file.rank] = file.offset_bytes + file.size_bytes
                yield file
            else:
                ends[file.rank] = -1

    def _remove_unfinished(self, directory: Path) -> None:
        whole = {file.file for file in self.finished} | {JOURNAL_NAME}
        for path in directory.iterdir():
            if path.name not in whole:
                path.unlink()


def has_progress(directory: Path) -> bool:
    """Whether a dead conversion had finished a file in this directory."""
    try:
        with (directory / JOURNAL_NAME).open("rb") as file:
            return sum(1 for _ in zip(file, range(2), strict=False)) == 2
    except OSError:
        return False


def _signed(text: bytes) -> bytes:
    checksum = Checksum()
    checksum.update(text)
    return str(checksum).encode() + b" " + text


def _finished(fields: Fields, path: Path) -> FinishedFile:
    file = FinishedFile(
        rank=fields.size("rank"),
        file=fields.text("file"),
        offset_bytes=fields.size("offset_bytes"),
        size_bytes=fields.size("size_bytes", least=1),
        checksum=fields.text("checksum"),
        tensors={offset: str(checksum) for offset, checksum in fields.record("tensors").raw.items()},
        unfinished=fields.text("unfinished"),
    )
    check_file_name(file.file, path)
    for checksum in (*file.tensors.values(), file.unfinished):
        if not is_checksum(checksum):
            raise fields.wrong(f"the checksum {checksum[:40]!r} is of no known kind")
    return file


def _is_whole(directory: Path, file: FinishedFile) -> bool:
    checksum, size = Checksum(), 0
    try:
        with (directory / file.file).open("rb") as data:
            while piece := data.read(_PIECE_BYTES):
                checksum.update(piece)
                size += len(piece)
    except OSError:
        return False
    return size == file.size_bytes and str(checksum) == file.checksum


class AlreadyThere(ConfigError):
    """The store has a model of that id, and it was not to be replaced."""


def check_name(final: Path, *, replace_existing: bool, wait: LockWait | None = None) -> None:
    """Raise unless a model may be published as `final` now; see `publish`."""
    check_no_link(final)
    try:
        found = is_model(final)
    except (FileNotFoundError, NotADirectoryError):  # also where it is removed in this moment
        return
    if not found:
        raise UnsafeFile(
            f"{str(final)!r} is there and is no model of a store, so it is not replaced. Choose another id, "
            "or another directory for the store."
        )
    if not replace_existing:
        raise AlreadyThere(f"{str(final)!r} is there already. Remove it first, or convert with `--replace`.")
    with suppress(FileNotFoundError), unused(final, wait):
        return


def is_model(path: Path) -> bool:
    """Whether a store made this directory, though it may lack files of the model.

    It has an index, or nothing, or nothing but files of a store, of which one is of stores alone.

    Raises:
        FileNotFoundError: there is nothing of that name.
        NotADirectoryError: the same, as its parent is a file.
    """
    try:
        names = frozenset(os.listdir(path))
    except NotADirectoryError:
        path.lstat()
        return False
    own = {name for name in names if name in (SOURCE_NAME, JOURNAL_NAME) or _DATA_FILE.fullmatch(name)}
    others = (name for name in names - own if name not in STORED_FILES and not is_data_file(name))
    return INDEX_NAME in names or not names or (bool(own) and not any(others))


@contextmanager
def unused(directory: Path, wait: LockWait | None = None) -> Generator[None]:
    """Keep a model from being read and pinned while the block runs.

    Raises:
        StoreBusy: a process reads or pins it, until the end of `wait`.
        FileNotFoundError: it does not exist, or was removed meanwhile.
    """
    with ExitStack() as stack:
        try:
            stack.enter_context(locked(directory, wait))
        except (BlockingIOError, StoreBusy) as exc:
            raise StoreBusy(
                f"Model {directory.name!r} in {str(directory.parent)!r} is in use by {holder_of(directory)}; "
                "nothing was changed. Try again when its reads and pins have ended."
            ) from exc
        yield


def sweep(root: Path) -> list[Path]:
    """Remove what dead writers and removals have left under `root`, and return the paths.

    Directories of living processes stay, and so do those that a conversion can resume from: the next
    conversion of the model uses or removes them.
    """
    swept: list[Path] = []
    for directory in sorted(root.glob(".*")):
        if directory.suffix in _LEFTOVERS:
            with suppress(OSError), locked(directory):
                if not has_progress(directory):
                    shutil.rmtree(directory)
                    swept.append(directory)
    return swept


@contextmanager
def partial_directory(root: Path, model: str, key: str | None) -> Generator[tuple[Path, Journal | None]]:
    """Make and lock a directory beside the one called `model`, deleted when the block ends unless renamed.

    With a `key`, a directory that a dead writer of the same key has left is reused, and the directory is
    kept when the process is interrupted, or the model that it would replace is in use.
    """
    _sweep_others(root, model, key)
    with _resumable(root, model, key) as directory:
        if directory is not None and key is not None:
            keep = False
            try:
                yield directory, Journal(directory, key)
            except (KeyboardInterrupt, SystemExit, StoreBusy):
                keep = has_progress(directory)
                raise
            finally:
                if not keep:
                    shutil.rmtree(directory, ignore_errors=True)
            return
    with temporary_directory(root, model) as directory:
        yield directory, None


@contextmanager
def _resumable(root: Path, model: str, key: str | None) -> Generator[Path | None]:
    """Lock the directory of a key; `None` without a key, or while another writer holds it."""
    directory = root / f".{model}.{key}{_SUFFIX}"
    with ExitStack() as lock:
        found = False
        if key is not None:
            with suppress(OSError):
                directory.mkdir(mode=0o700, exist_ok=True)
                lock.enter_context(locked(directory))
                found = True
        yield directory if found else None


@contextmanager
def temporary_directory(root: Path, model: str) -> Generator[Path]:
    """Make and lock a new directory for a model, deleted when the block ends unless renamed."""
    with ExitStack() as stack:
        directory: Path | None = None
        while directory is None:
            made = root / f".{model}.{secrets.token_hex(4)}{_SUFFIX}"
            made.mkdir(mode=0o700)
            with suppress(FileNotFoundError, BlockingIOError):  # it was swept before it was locked
                stack.enter_context(locked(made))
                directory = made
        stack.callback(shutil.rmtree, directory, ignore_errors=True)
        yield directory


def _sweep_others(root: Path, model: str, key: str | None) -> None:
    """Remove leftovers of conversions of this model with other options or from another source."""
    name = re.compile(rf"\.{re.escape(model)}\.[0-9a-f]+(\.old)?{re.escape(_SUFFIX)}")
    for directory in root.iterdir():
        if name.fullmatch(directory.name) and directory.name != f".{model}.{key}{_SUFFIX}":
            with suppress(OSError), locked(directory):
                shutil.rmtree(directory)


def publish(directory: Path, final: Path, *, replace_existing: bool, wait: LockWait | None = None) -> None:
    """Rename a finished directory to its final name, in exchange with a model that has it.

    Raises:
        AlreadyThere: there is a model of that name, which was not to be replaced.
        UnsafeFile: something else has that name.
        StoreBusy: a process reads or pins it, until the end of `wait`.
    """
    sync_directory(directory)
    while not _renamed(directory, final):
        check_name(final, replace_existing=replace_existing, wait=wait)
        with suppress(FileNotFoundError), unused(final, wait):
            _exchange(directory, final)
            break
    sync_directory(final.parent)


def _renamed(directory: Path, final: Path) -> bool:
    """Rename a directory; false if there is another one of that name, which is not empty."""
    try:
        directory.rename(final)
    except OSError as exc:
        if exc.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            raise
        return False
    return True


def _exchange(one: Path, other: Path) -> None:
    """Exchange the names of two directories; atomic on Linux, so that a crash leaves one of them whole."""
    with suppress(AttributeError, OSError):
        libc = ctypes.CDLL(None, use_errno=True)
        if not libc.renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE):
            return
    aside = one.with_name(f"{one.name.removesuffix(_SUFFIX)}.old{_SUFFIX}")
    other.rename(aside)
    one.rename(other)
    aside.rename(one)
