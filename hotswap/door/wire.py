"""The bytes of answers: JSON, server-sent events, and chunks of text made from parts that are ready."""

from __future__ import annotations

import json
from collections.abc import Mapping
from json.encoder import encode_basestring_ascii as _escaped
from typing import Any

from starlette.types import Send

__all__ = ["DONE", "STREAM_HEADERS", "TextChunks", "comment", "event", "named_event", "send_json", "to_json"]

DONE = b"data: [DONE]\n\n"
STREAM_HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),  # or nginx collects what is streamed
)


def to_json(value: object) -> bytes:
    """Return a value as JSON, without spaces."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()


def event(value: object) -> bytes:
    """Return a server-sent event without a name."""
    return b"data: " + to_json(value) + b"\n\n"


def named_event(name: str, value: object) -> bytes:
    """Return a server-sent event with a name."""
    return b"event: " + name.encode() + b"\ndata: " + to_json(value) + b"\n\n"


def comment(text: str) -> bytes:
    """Return a line that clients skip, which keeps a connection from being taken for dead."""
    return b": " + text.replace("\n", " ").encode() + b"\n\n"


async def send_json(send: Send, status: int, value: object, headers: Mapping[str, str] | None = None) -> None:
    """Answer by JSON."""
    body = to_json(value)
    lines = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    lines += [(name.encode(), text.encode()) for name, text in (headers or {}).items()]
    await send({"type": "http.response.start", "status": status, "headers": lines})
    await send({"type": "http.response.body", "body": body})


class TextChunks:
    """Chunks of text that differ in their text alone: most of each is made once.

    A chunk costs 0.3 us of a processor instead of the 8 us of a validated object.

    Args:
        base: The fields that all chunks of an answer have.
        before: The JSON of a choice up to its text, without the number of the choice.
        after: The JSON of a choice behind its text, up to its `finish_reason`.
        end: What follows the choices.
    """

    def __init__(self, base: Mapping[str, Any], *, before: bytes, after: bytes, end: bytes) -> None:
        self._head = b"data: " + to_json(base)[:-1] + b',"choices":[{"index":'
        self._before, self._after, self._end = before, after, b"}]" + end + b"}\n\n"
        self._heads = dict[int, bytes]()  # of each choice
        self._goes_on = after + b"null" + self._end

    def chunk(self, index: int, text: str, finish_reason: str | None = None) -> bytes:
        """Return the event of some text of a choice, and of its end if it has a reason."""
        if (head := self._heads.get(index)) is None:
            head = self._heads[index] = self._head + str(index).encode() + self._before
        if finish_reason is None:
            return b"".join((head, _escaped(text).encode(), self._goes_on))
        reason = b'"' + finish_reason.encode() + b'"'
        return b"".join((head, _escaped(text).encode(), self._after, reason, self._end))
