"""The file of a store on a disk, which has no name, and a disk that is full."""

from __future__ import annotations

import os
import resource
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["file_below", "files_of_at_most"]


def file_below(directory: Path) -> str:
    """The file without a name that this process has open there, by its entry in `/proc`."""
    (found,) = (
        entry
        for entry in (f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd"))
        if os.path.lexists(entry) and os.readlink(entry).startswith(f"{directory}/")
    )
    return found


@contextmanager
def files_of_at_most(size_bytes: int) -> Generator[None]:
    """A disk that is full, as a process sees it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
