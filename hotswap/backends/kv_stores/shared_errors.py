"""What the system refuses to a `SharedKVStore`, as errors of stores."""

from __future__ import annotations

import errno
from pathlib import Path

from hotswap.errors import StoreError, TierFull

__all__ = ["refused"]

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.ENOMEM, errno.EFBIG)


def refused(path: Path, what: str, error: OSError) -> StoreError:
    """Return the error for a file or directory that could not be, for instance, "written to"."""
    reason = error.strerror or str(error)
    if error.errno in _FULL:
        return TierFull(
            f"The memory behind {str(path)!r} is full ({reason}). Give the KV store a smaller budget, or "
            "that file system more room; tokens are computed again."
        )
    return StoreError(f"{str(path)!r} cannot be {what}: {reason}; tokens are computed again.")
