"""The journal of a conversion: its finished files, so that a killed conversion can be resumed.

    .<model>.<key>.partial/journal.jsonl    a line for the conversion, then one for each finished file

A line is a checksum and a JSON object, appended once its file is on the disk. The key is a digest of the
source, the options and the layout, so that another conversion uses another directory. A line is trusted only
after its file's bytes were compared with it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from hotswap.backends.stores.fields import Fields, parse_object
from hotswap.backends.stores.layout import Checksum, check_file_name, is_checksum
from hotswap.errors import StoreError

__all__ = ["JOURNAL_NAME", "FinishedFile", "Journal", "has_progress"]

JOURNAL_NAME: Final = "journal.jsonl"
_VERSION: Final = 1
_APPEND = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
_PIECE_BYTES = 8 << 20


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
