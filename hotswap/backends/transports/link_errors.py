"""The errors of a link, all told to callers as one: `MigrationAborted` of stage `"link"`."""

from __future__ import annotations

import ssl

import anyio

from hotswap.errors import MigrationAborted

__all__ = ["ENDED", "ProtocolError", "first_reason_in", "link_broken", "no_link", "reason_for", "reason_in"]

ENDED = "the other end has closed it, or its process has ended"
_BROKEN, _GOES_ON = "The link of a move is broken: ", " Open a new one; the request goes on where it is."
_NO_LINK_GOES_ON = " The request of a move goes on where it is."


class ProtocolError(Exception):
    """The other end sent bytes that are damaged or not of the protocol; private to transports."""


def link_broken(reason: str) -> MigrationAborted:
    """Return the error of a broken link."""
    return MigrationAborted(
        f"{_BROKEN}{reason.removesuffix('.')}.{_GOES_ON}",
        stage="link",
    )


def no_link(where: str, reason: str) -> MigrationAborted:
    """Return the error of a connection that did not become a link."""
    return MigrationAborted(
        f"{where} cannot be reached, or gives no link: {reason.removesuffix('.')}.{_NO_LINK_GOES_ON}",
        stage="link",
    )


def reason_in(error: MigrationAborted) -> str:
    """Return what the error of a link says of its reason, without what it says of moves."""
    text = str(error).removeprefix(_BROKEN).removesuffix(_GOES_ON).removesuffix(_NO_LINK_GOES_ON)
    return text.removesuffix(".")


def first_reason_in(errors: BaseExceptionGroup[MigrationAborted]) -> str:
    """Return the same of the first of the errors with which the tasks of a link have ended."""
    first = errors.exceptions[0]
    return first_reason_in(first) if isinstance(first, BaseExceptionGroup) else reason_in(first)


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
