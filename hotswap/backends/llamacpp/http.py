"""Requests to llama.cpp's server over its Unix socket, one connection each."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import anyio

__all__ = ["RefusedByServer", "call"]


class RefusedByServer(Exception):
    """The server answered with an error; the text is its message."""


async def call(socket: Path, key: str, path: str, body: bytes | None = None) -> dict[str, Any]:
    """Send a request and return the answer; `POST` with a body, else `GET`.

    A cancellation is honoured once the server has stopped computing the answer, which takes until the end of
    its step: it polls its idle connections once a second.

    Raises:
        RefusedByServer: it answered with an error.
        OSError, anyio.EndOfStream: it has ended.
    """
    connection = await anyio.connect_unix(socket)
    try:
        await connection.send(_head(key, path, body) + (body or b""))
        return _parse(await _read_to_end(connection))
    except anyio.get_cancelled_exc_class():
        with anyio.CancelScope(shield=True):
            await _abort(connection)
        raise
    finally:
        with anyio.CancelScope(shield=True):
            await connection.aclose()


def _head(key: str, path: str, body: bytes | None) -> bytes:
    return (
        f"{'GET' if body is None else 'POST'} {path} HTTP/1.1\r\n"
        "Host: localhost\r\n"
        "Connection: close\r\n"
        f"Authorization: Bearer {key}\r\n"
        "Content-Type: application/json\r\n"
        f"Content-Length: {len(body or b'')}\r\n\r\n"
    ).encode()


async def _read_to_end(connection: anyio.abc.SocketStream) -> bytes:
    parts: list[bytes] = []
    try:
        while True:
            parts.append(await connection.receive())
    except anyio.EndOfStream:
        return b"".join(parts)


async def _abort(connection: anyio.abc.SocketStream) -> None:
    """Close this end; the server then stops, and closes its own."""
    try:
        await connection.send_eof()
        await _read_to_end(connection)
    except (OSError, anyio.BrokenResourceError):
        return


def _parse(answer: bytes) -> dict[str, Any]:
    head, separator, body = answer.partition(b"\r\n\r\n")
    if not separator:
        raise anyio.EndOfStream
    status = int(head.split(b" ", 2)[1])
    parsed: dict[str, Any] = json.loads(body)
    if status != 200:
        raise RefusedByServer(str(parsed.get("error", {}).get("message", f"status {status}")))
    return parsed
