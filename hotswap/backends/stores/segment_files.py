"""Listing the segment files of a directory, ordering them for eviction, and locking them against use."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from hotswap.backends.stores import locks
from hotswap.backends.stores.segment import lock_for_removal, parse_name, whole_path
from hotswap.request import ModelId

__all__ = ["SegmentFile", "eviction_order", "lock_all", "segment_files"]


@dataclass(frozen=True, slots=True)
class SegmentFile:
    """A file with a segment's name, whole or incoming; `used_ns` is its last use."""

    path: Path
    model: ModelId
    digest: str
    whole: bool
    inode: int
    size_bytes: int
    used_ns: int


def segment_files(directory: Path) -> list[SegmentFile]:
    """Return the segment files.

    A segment that is renamed meanwhile may be listed twice, or not at all, so the directory is listed until
    two lists agree.
    """
    before: set[Path] | None = None
    while True:
        found = _scan(directory)
        paths = {entry.path for entry in found} if found is not None else None
        if found is not None and paths == before:
            return found
        before = paths


def eviction_order(entries: Iterable[SegmentFile]) -> list[list[SegmentFile]]:
    """Return the groups that are evicted together: incomplete ones first, then least recently used first."""
    groups: dict[tuple[ModelId, str], list[SegmentFile]] = {}
    for entry in entries:
        groups.setdefault((entry.model, entry.digest), []).append(entry)
    return sorted(groups.values(), key=lambda g: (any(e.whole for e in g), max(e.used_ns for e in g)))


def lock_all(group: Iterable[SegmentFile], stack: ExitStack) -> bool:
    """Lock all files of a group against use until the stack ends, or none."""
    with ExitStack() as locked:
        for entry in group:
            try:
                fd = lock_for_removal(entry.path)
            except FileNotFoundError:  # removed, unless it was renamed
                if entry.whole or not os.path.lexists(whole_path(entry.path)):
                    continue
                return False
            if fd is None:
                return False
            locked.callback(locks.release, fd)
        stack.push(locked.pop_all())
    return True


def _scan(directory: Path) -> list[SegmentFile] | None:
    """List the segments once; `None` if one was renamed or removed meanwhile."""
    found: list[SegmentFile] = []
    with os.scandir(directory) as files:
        for file in files:
            name = parse_name(file.name)
            if name is not None and file.is_file(follow_symlinks=False):
                try:
                    status = file.stat(follow_symlinks=False)
                except FileNotFoundError:
                    return None
                size_bytes, used_ns = status.st_size, status.st_mtime_ns
                found.append(SegmentFile(Path(file.path), *name, file.inode(), size_bytes, used_ns))
    return found
