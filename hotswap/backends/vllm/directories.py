"""Directories shared with vLLM's processes, which are swept once the process that made them was killed."""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
from collections.abc import Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from hotswap.backends.stores.files import is_at
from hotswap.backends.stores.locks import lock_whole

__all__ = ["SHARED_MEMORY", "LockedDirectory"]

log = logging.getLogger("hotswap.vllm")

SHARED_MEMORY = Path("/dev/shm")
_PREFIX, _LIST = "hotswap-vllm-", "shared-memory"


@dataclass(frozen=True, slots=True)
class LockedDirectory:
    """A directory that is locked while its process lives; made by `make`, removed by `remove`. Blocking.

    The lock, not the process id, says whether a directory is in use: processes of several containers may
    share `/dev/shm`, and each has ids of its own. Forked children keep the lock until they end.

    Attributes:
        path: Where it is; the name has the process id, for those who look.
    """

    path: Path
    _lock: int

    @classmethod
    def make(cls, within: Path) -> Self:
        """Make one, having removed those that killed processes have left.

        Raises:
            OSError: it cannot be made.
        """
        _sweep(within)
        while True:
            path = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-", dir=within))
            if (lock := _lock(path)) is not None:
                return cls(path, lock)

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

    def remove(self) -> None:
        """Remove it and what is in it; processes that have a file mapped keep the memory."""
        try:
            _remove(self.path)
        except OSError as exc:
            log.warning("%s could not be removed (%s); remove it by hand.", self.path, exc)
        finally:
            with suppress(OSError):  # it was removed before
                os.close(self._lock)


def _sweep(within: Path) -> None:
    """Remove the directories whose processes have ended; those of other users stay."""
    for path in within.glob(f"{_PREFIX}*"):
        if (lock := _lock(path)) is not None:
            with suppress(OSError):
                _remove(path)
            os.close(lock)


def _lock(path: Path) -> int | None:
    """Lock a directory; `None` if another process has it, or has removed it."""
    try:
        lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return None
    with suppress(OSError):
        lock_whole(lock, shared=False)
        if is_at(lock, path):  # not removed between the two
            return lock
    os.close(lock)
    return None


def _remove(path: Path) -> None:
    with suppress(FileNotFoundError):
        for name in (path / _LIST).read_text().splitlines():
            (SHARED_MEMORY / name).unlink(missing_ok=True)
    shutil.rmtree(path)


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
