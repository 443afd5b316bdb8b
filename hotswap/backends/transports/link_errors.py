"""Why links break, in the one error that a `Channel` has for it."""

from __future__ import annotations

import anyio

from hotswap.errors import MigrationAborted

__all__ = ["ProtocolError", "broken", "why"]


class ProtocolError(Exception):
    """What arrived cannot be what was sent; private to the transports."""


def broken(because: str) -> MigrationAborted:
    """Return the error of a broken link."""
    return MigrationAborted(
        f"The link of a move is broken: {because}. Open a new one; the request goes on where it is.",
        stage="link",
    )


def why(error: BaseException) -> str | None:
    """Say what an error of a socket means for a link; `None` if it means nothing by itself."""
    match error:
        case anyio.EndOfStream():
            return "the other end has closed it, or its process has ended"
        case anyio.ClosedResourceError():
            return "this end was closed"
        case anyio.BrokenResourceError():
            cause = error.__cause__
            return "the other end has closed it, or its process has ended" + (f" ({cause})" if cause else "")
        case TimeoutError():
            return "the other end stalled"
        case OSError():
            return f"the system says {error}"
        case ProtocolError():
            return str(error)
        case _:
            return None
