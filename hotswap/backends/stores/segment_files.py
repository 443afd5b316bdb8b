"""The files in a directory of segments: what is there, in which order it goes, and whether it may."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from hotswap.backends.stores import locks
from hotswap.backends.stores.segment import parse_name, removable, whole_path
from hotswap.request import ModelId

__all__ = ["Entry", "entries_of", "in_groups", "lock_all"]


@dataclass(frozen=True, slots=True)
class Entry:
    """A file with a segment's name, whole or coming; of use it tells the last."""

    path: Path
    model: ModelId
    digest: str
    whole: bool
    inode: int
    size_bytes: int
    used_ns: int


def entries_of(directory: Path) -> list[Entry]:
    """Return what is there.

    A segment that gets its name meanwhile may be listed twice, or not at all, so it is listed until two lists
    agree.
    """
    before: set[Path] | None = None
    while True:
        found = _scan(directory)
        paths = {entry.path for entry in found} if found is not None else None
        if found is not None and paths == before:
            return found
        before = paths


def in_groups(entries: Iterable[Entry]) -> list[list[Entry]]:
    """What goes together, in the order in which it goes."""
    groups: dict[tuple[ModelId, str], list[Entry]] = {}
    for entry in entries:
        groups.setdefault((entry.model, entry.digest), []).append(entry)
    return sorted(groups.values(), key=lambda g: (any(e.whole for e in g), max(e.used_ns for e in g)))


def lock_all(group: Iterable[Entry], stack: ExitStack) -> bool:
    """Lock all of a group against use until the stack ends, or none of it."""
    with ExitStack() as locked:
        for entry in group:
            try:
                fd = removable(entry.path)
            except FileNotFoundError:  # gone, unless it got its name
                if entry.whole or not os.path.lexists(whole_path(entry.path)):
                    continue
                return False
            if fd is None:
                return False
            locked.callback(locks.release, fd)
        stack.push(locked.pop_all())
    return True


def _scan(directory: Path) -> list[Entry] | None:
    """List the segments once; `None` if one got its name, or went, under our eyes."""
    found: list[Entry] = []
    with os.scandir(directory) as files:
        for file in files:
            name = parse_name(file.name)
            if name is not None and file.is_file(follow_symlinks=False):
                try:
                    status = file.stat(follow_symlinks=False)
                except FileNotFoundError:
                    return None
                size_bytes, used_ns = status.st_size, status.st_mtime_ns
                found.append(Entry(Path(file.path), *name, file.inode(), size_bytes, used_ns))
    return found
