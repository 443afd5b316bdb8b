"""Directories shared with vLLM's processes, which are swept once the process that made them was killed."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable
from contextlib import suppress
from pathlib import Path

from hotswap.backends.locked_directory import LockedDirectory

__all__ = ["SHARED_MEMORY", "CoreDirectory"]

SHARED_MEMORY = Path("/dev/shm")
_LIST = "shared-memory"


class CoreDirectory(LockedDirectory):
    """A directory shared with the processes of a vLLM engine."""

    __slots__ = ()
    prefix = "hotswap-vllm-"

    def note_shared_memory(self, processes: Iterable[int], before: Collection[str]) -> None:
        """Have shared memory that processes and their children made go with it, if they are killed.

        Args:
            processes: Their ids.
            before: What was in `/dev/shm` when they were started.
        """
        mapped = {name for process in processes for each in _family(process) for name in _mapped(each)}
        found = sorted(mapped - {*before} - _mapped(os.getpid()))
        with suppress(OSError):  # the processes run all the same
            (self.path / _LIST).write_text("\n".join(found))

    @classmethod
    def _delete(cls, path: Path) -> None:
        with suppress(FileNotFoundError):
            for name in (path / _LIST).read_text().splitlines():
                (SHARED_MEMORY / name).unlink(missing_ok=True)
        super()._delete(path)


def _family(process: int) -> Iterable[int]:
    """Yield a process and those that it has started; nothing where the system does not tell."""
    yield process
    with suppress(OSError):
        for thread in Path(f"/proc/{process}/task").iterdir():
            for child in (thread / "children").read_text().split():
                yield from _family(int(child))


def _mapped(process: int) -> set[str]:
    """Return the names of the files right in `/dev/shm` that a process has mapped."""
    found: set[str] = set()
    with suppress(OSError):
        for line in Path(f"/proc/{process}/maps").read_text().splitlines():
            path = Path(line.split(maxsplit=5)[-1])
            if path.parent == SHARED_MEMORY and path.exists():
                found.add(path.name)
    return found
