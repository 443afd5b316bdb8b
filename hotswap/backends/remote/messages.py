"""The messages of a control link and their encoding in frames.

A frame carries all that one end has said in a turn of its event loop: its number, then messages in the order
in which they were said, as JSON. A message is a verb, the number of a call or a stream, fields, and how many
bytes of the frame's payload belong to it. Tokens of all streams are one message: pairs of 64-bit numbers. A
frame of this message alone, as most frames are, has no JSON.

Messages are not trusted. None names a class to be made; what cannot be read raises `ProtocolError`, which
ends the link. Frames are counted, so that one that is lost, repeated or out of order is noticed.
"""

from __future__ import annotations

import json
import logging
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, cast

from hotswap.backends.fields import LARGEST, Fields
from hotswap.backends.transports import wire
from hotswap.backends.transports.link_errors import ProtocolError, link_broken
from hotswap.errors import MigrationAborted
from hotswap.transport import Frame

__all__ = [
    "MAX_MESSAGE_BYTES",
    "MAX_PAYLOAD_BYTES",
    "VERSION",
    "Message",
    "Said",
    "check_version",
    "frames_of",
    "messages_of",
    "said",
    "taking",
    "tokens_frame",
]

log = logging.getLogger("hotswap")

VERSION: Final = 6
# Of one frame: longer ones would hold up the event loop, and are split between messages.
MAX_MESSAGE_BYTES: Final = 1 << 20
MAX_PAYLOAD_BYTES: Final = 8 << 20
_FULL_BYTES, _FULL_PAYLOAD_BYTES, _FULL_BRACKETS = 128 << 10, 1 << 20, wire.MAX_BRACKETS // 2
_ENVELOPE_BYTES = 64
_TOKENS_MARK = b"T"  # no JSON begins so
_TOKENS = struct.Struct("!cQI")  # the mark, the number of the frame, and the bytes of its payload

_NO_BYTES = memoryview(b"")
_NO_FIELDS = Fields({}, "the message 'tokens'", "Use one version of hotswap.")


@dataclass(frozen=True, slots=True)
class Message(wire.Message):
    """One message as it was received; `payload` is valid until the next frame."""

    payload: memoryview


@dataclass(frozen=True, slots=True)
class Said:
    """One message as it is sent."""

    encoded: bytes
    payload: memoryview


def said(verb: str, number: int, fields: dict[str, object], payload: memoryview = _NO_BYTES) -> Said:
    """Encode a message.

    Raises:
        ValueError: it is longer than a frame may be.
    """
    encoded = wire.encoded([verb, number, fields, len(payload)])
    if len(encoded) + _ENVELOPE_BYTES > MAX_MESSAGE_BYTES or len(payload) > MAX_PAYLOAD_BYTES:
        raise ValueError(
            f"{len(encoded):,} bytes and a payload of {len(payload):,} are over the limits of a link, "
            f"{MAX_MESSAGE_BYTES:,} and {MAX_PAYLOAD_BYTES:,}"
        )
    return Said(encoded, payload)


def check_version(first: Message) -> None:
    """Check the version that the first message of an end tells.

    Raises:
        MigrationAborted: it is another than that of this end.
    """
    with taking(first):
        version = first.fields.size("version")
    if version != VERSION:
        raise link_broken(f"the other end speaks version {version}, this one {VERSION}")


def frames_of(messages: list[Said], first: int) -> Iterator[tuple[bytes, memoryview]]:
    """Yield the frames of messages, numbered from `first`; one without messages is a beat."""
    batch = list[Said]()
    num_bytes = num_payload_bytes = num_brackets = 0
    for message in messages:
        brackets = wire.num_brackets(message.encoded)
        if batch and (
            num_bytes + len(message.encoded) > _FULL_BYTES
            or num_payload_bytes + len(message.payload) > _FULL_PAYLOAD_BYTES
            or num_brackets + brackets > _FULL_BRACKETS
        ):
            yield _frame(batch, first)
            first, batch = first + 1, []
            num_bytes = num_payload_bytes = num_brackets = 0
        batch.append(message)
        num_bytes += len(message.encoded)
        num_payload_bytes += len(message.payload)
        num_brackets += brackets
    if batch or not messages:
        yield _frame(batch, first)


class taking:
    """Brackets what is done with a message: whatever goes wrong breaks the link, and nothing else.

    A class, because a generator in its place would take a good part of the time of a message.

    Raises:
        MigrationAborted: the message is not valid, or could not be taken.
    """

    __slots__ = ("_message",)

    def __init__(self, message: wire.Message) -> None:
        self._message = message

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: object, error: BaseException | None, __: TracebackType | None) -> None:
        if isinstance(error, Exception):
            raise _link_error(error, self._message.verb[:40]) from error


def _link_error(error: Exception, verb: str) -> MigrationAborted:
    try:
        with wire.protocol_errors():
            raise error
    except ProtocolError as exc:
        return link_broken(str(exc))
    except Exception as exc:
        log.exception("The message %r of a link could not be taken.", verb)
        return link_broken(f"the message {verb!r} could not be taken ({exc!r})")


def tokens_frame(number: int, payload: memoryview) -> bytes:
    """Return the message of a frame with the payload of `tokens`, and no other message."""
    return _TOKENS.pack(_TOKENS_MARK, number, len(payload))


def _frame(messages: list[Said], number: int) -> tuple[bytes, memoryview]:
    encoded = b",".join((b"%d" % number, *(message.encoded for message in messages)))
    payloads = [message.payload for message in messages if message.payload]
    payload = payloads[0] if len(payloads) == 1 else memoryview(b"".join(payloads))
    return b"[" + encoded + b"]", payload


def messages_of(frame: Frame, number: int) -> list[Message]:
    """Decode a frame, which must have this number.

    Raises:
        ProtocolError: it is not valid, or is another frame.
    """
    if frame.message[:1] == _TOKENS_MARK:
        if frame.message != tokens_frame(number, frame.payload):
            raise ProtocolError(
                f"{frame.message[:40]!r} was received in the place of tokens in frame {number}"
            )
        return [Message("tokens", 0, _NO_FIELDS, frame.payload)]
    wire.check_brackets(frame.message)
    try:
        told: object = json.loads(frame.message)
    except (ValueError, RecursionError) as exc:
        raise ProtocolError(f"a frame is not JSON ({exc})") from exc
    if not isinstance(told, list):
        raise ProtocolError("a frame is no list of messages")
    items = cast("list[object]", told)
    if not items or items[0] != number or type(items[0]) is not int:
        raise ProtocolError(f"frame {items[:1]!r} was received in the place of frame {number}")
    messages, at = list[Message](), 0
    for item in items[1:]:
        match item:
            case [str(verb), int(about), dict(), int(size)] if 0 <= about < LARGEST and size >= 0:
                raw = cast("list[dict[str, Any]]", item)[2]
                named = Fields(raw, f"the message {verb[:40]!r}", "Use one version of hotswap.")
                messages.append(Message(verb, about, named, frame.payload[at : at + size]))
                at += size
            case _:
                raise ProtocolError(f"{str(item)[:80]!r} is no message")
    if at != len(frame.payload):
        raise ProtocolError(f"a payload has {len(frame.payload):,} bytes, of which messages name {at:,}")
    return messages
