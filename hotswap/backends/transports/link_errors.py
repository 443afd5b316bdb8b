"""The errors of a link, all told to callers as one: `MigrationAborted` of stage `"link"`."""

from __future__ import annotations

import ssl

import anyio

from hotswap.errors import MigrationAborted

__all__ = ["ENDED", "ProtocolError", "link_broken", "no_link", "reason_for"]

ENDED = "the other end has closed it, or its process has ended"


class ProtocolError(Exception):
    """The other end sent bytes that are damaged or not of the protocol; private to transports."""


def link_broken(reason: str) -> MigrationAborted:
    """Return the error of a broken link."""
    return MigrationAborted(
        f"The link of a move is broken: {reason}. Open a new one; the request goes on where it is.",
        stage="link",
    )


def no_link(where: str, reason: str) -> MigrationAborted:
    """Return the error of a connection that did not become a link."""
    return MigrationAborted(
        f"{where} cannot be reached, or gives no link: {reason}. The request of a move goes on where it is.",
        stage="link",
    )


def reason_for(error: BaseException) -> str | None:
    """Return why an error of a socket breaks a link; `None` for an error that does not."""
    match error:
        case anyio.EndOfStream():
            return ENDED
        case anyio.ClosedResourceError():
            return "this end was closed"
        case anyio.BrokenResourceError():
            cause = error.__cause__
            return ENDED + (f" ({cause})" if cause else "")
        case ssl.SSLError():
            return f"TLS failed, {error}"
        case TimeoutError():
            return "the other end stalled"
        case OSError():
            return f"the system says {error}"
        case ProtocolError():
            return str(error)
        case _:
            return None
