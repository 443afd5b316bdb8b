"""`LockedDirectory`: a temporary directory that is removed also if the process that made it was killed."""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Self

from hotswap.backends.stores.files import is_at
from hotswap.backends.stores.locks import lock_whole

__all__ = ["LockedDirectory"]

log = logging.getLogger("hotswap")


@dataclass(frozen=True, slots=True)
class LockedDirectory:
    """A directory that is locked while its process lives; made by `make`, removed by `remove`. Blocking.

    The lock, not the process id, says whether a directory is in use: processes of several containers may
    share the place, and each has ids of its own. Forked children keep the lock until they end.

    Attributes:
        prefix: What its name begins with; a subclass has its own.
        path: Where it is; the name has the process id, for those who look.
    """

    prefix: ClassVar[str] = "hotswap-engine-"
    path: Path
    _lock: int

    @classmethod
    def make(cls, within: Path | None = None) -> Self:
        """Make one, having removed those that killed processes have left. The user alone can read it.

        Args:
            within: Where; by default where the system has temporary files.

        Raises:
            OSError: it cannot be made.
        """
        within = Path(tempfile.gettempdir()) if within is None else within
        cls._sweep(within)
        while True:
            path = Path(tempfile.mkdtemp(prefix=f"{cls.prefix}{os.getpid()}-", dir=within))
            if (lock := _lock(path)) is not None:
                return cls(path, lock)

    def remove(self) -> None:
        """Remove it and what is in it; processes that have a file mapped keep the memory."""
        try:
            self._delete(self.path)
        except OSError as exc:
            log.warning("%s could not be removed (%s); remove it by hand.", self.path, exc)
        finally:
            with suppress(OSError):  # it was removed before
                os.close(self._lock)

    @classmethod
    def _sweep(cls, within: Path) -> None:
        """Remove the directories whose processes have ended; those of other users stay."""
        for path in within.glob(f"{cls.prefix}*"):
            if (lock := _lock(path)) is not None:
                with suppress(OSError):
                    cls._delete(path)
                os.close(lock)

    @classmethod
    def _delete(cls, path: Path) -> None:
        """Remove a directory; a subclass removes what belongs to it too."""
        shutil.rmtree(path)


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
