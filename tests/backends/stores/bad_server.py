"""An HTTP server on loopback with faults on request: stalls, resets, wrong ranges, wrong bytes."""

from __future__ import annotations

import socket
import struct
from collections import defaultdict, deque
from collections.abc import AsyncGenerator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

import anyio
from anyio.abc import SocketAttribute, SocketStream

from hotswap.backends.stores.reading import background

__all__ = ["BadServer", "Fault", "Kind"]

Kind: TypeAlias = Literal[
    "stall",  # sends some bytes, then nothing more
    "reset",  # sends some bytes, then tears the connection
    "truncate",  # sends some bytes, then ends the connection as if that were all
    "dwindle",  # sends some bytes in chunks, and ends them properly, too soon
    "status",  # answers with an error status
    "whole",  # ignores the range: 200 with the whole body
    "short",  # answers a shorter range than was asked for, correctly labelled
    "shifted",  # answers another range than was asked for, correctly labelled
    "excess",  # sends more bytes than were asked for
    "etag",  # the object has another entity tag
    "longer",  # the object has another length
    "flip",  # one bit of the body is wrong
    "garbage",  # answers what is not HTTP
]


@dataclass(frozen=True)
class Fault:
    """The fault of one response: after `after` bytes of the body, or in its `status`."""

    kind: Kind
    after: int = 0
    status: int = 503


@dataclass(frozen=True)
class Request:
    method: str
    path: str
    headers: dict[str, str]

    def range_of(self, size: int) -> tuple[int, int] | None:
        """The half-open range asked for, cut at the end of the body; `None` if none was."""
        unit, _, span = self.headers.get("range", "").partition("=")
        if unit != "bytes":
            return None
        first, _, last = span.partition("-")
        return int(first), min(int(last) + 1, size) if last else size


class BadServer:
    """Serves the files under `root`, read-only, with the faults planned for each path."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.requests: list[Request] = []
        self.url = ""
        self._planned: defaultdict[str, deque[Fault | None]] = defaultdict(deque)
        self._forever: dict[str, Fault] = {}

    def plan(self, path: str, faults: Iterable[Fault | None]) -> None:
        """Plan a fault for each of the next requests for `path`; `None` is no fault."""
        self._planned[path].extend(faults)

    def always(self, path: str, fault: Fault | None) -> None:
        """Plan a fault for all requests for `path` that have no other plan."""
        self._forever.pop(path, None)
        if fault is not None:
            self._forever[path] = fault

    def clear(self) -> None:
        """Remove all plans."""
        self._planned.clear()
        self._forever.clear()
        self.requests.clear()

    def asked(self, path: str) -> list[Request]:
        """The requests for `path` so far."""
        return [request for request in self.requests if request.path == path]

    @asynccontextmanager
    async def run(self) -> AsyncGenerator[BadServer]:
        """Listen on a free port while the block runs."""
        async with await anyio.create_tcp_listener(local_host="127.0.0.1") as listener, background() as tasks:
            self.url = f"http://127.0.0.1:{listener.extra(SocketAttribute.local_port)}"
            tasks.start_soon(listener.serve, self._serve)
            yield self

    async def _serve(self, stream: SocketStream) -> None:
        async with stream:
            try:
                while True:
                    await self._answer(stream, await _receive(stream))
            except (anyio.BrokenResourceError, anyio.EndOfStream, _HungUp):
                pass

    async def _answer(self, stream: SocketStream, request: Request) -> None:
        self.requests.append(request)
        planned = self._planned[request.path]
        fault = planned.popleft() if planned else self._forever.get(request.path)
        kind = fault.kind if fault else None
        file = self.root / request.path.lstrip("/")
        if fault is not None and kind == "status":
            await _send(stream, fault.status, {}, b"no\n")
        elif kind == "garbage":
            await stream.send(b"\x16\x03\x01 good morning\r\n\r\n")
            raise _HungUp
        elif not file.is_file():
            await _send(stream, 404, {}, b"")
        else:
            body = file.read_bytes() + (b"\0" if kind == "longer" else b"")
            await _send_body(stream, request, fault, body, f"{file.stat().st_mtime_ns:x}-{len(body):x}")


async def _send_body(
    stream: SocketStream, request: Request, fault: Fault | None, body: bytes, tag: str
) -> None:
    kind = fault.kind if fault else None
    quoted = f'"{tag}-new"' if kind == "etag" else f'"{tag}"'
    if request.headers.get("if-none-match") == quoted:
        await _send(stream, 304, {"ETag": quoted}, b"")
        return
    span = None if kind == "whole" else request.range_of(len(body))
    status, (first, last) = (206, span) if span else (200, (0, len(body)))
    if span and first >= len(body):
        await _send(stream, 416, {"Content-Range": f"bytes */{len(body)}"}, b"")
        return
    if kind == "short" and span:
        last = max(last - 1, first + 1)
    if kind == "shifted" and first:
        first, last = first - 1, last - 1
    headers = {"ETag": quoted, "Last-Modified": "Wed, 01 Jan 2025 00:00:00 GMT"}
    if span:
        headers["Content-Range"] = f"bytes {first}-{last - 1}/{len(body)}"
    data = bytearray(body[first:last])
    after = min(fault.after, max(len(data) - 1, 0)) if fault else 0
    if kind == "excess" and span:
        data += b"\1\2\3"
    if kind == "flip":
        data[after] ^= 8
    if kind in ("stall", "reset", "truncate"):
        await _send(stream, status, headers, bytes(data), cut=after)
        await _break_off(stream, kind)
    if kind == "dwindle" and span:
        await _send_chunked(stream, status, headers, bytes(data[:after]))
        return
    await _send(stream, status, headers, bytes(data), cut=0 if request.method == "HEAD" else None)


class _HungUp(Exception):
    """The connection was closed."""


async def _receive(stream: SocketStream) -> Request:
    text = b""
    while b"\r\n\r\n" not in text:
        text += await stream.receive()
    head, *lines = text.decode("latin-1").split("\r\n")
    method, target, _ = head.split(" ")
    pairs = (line.partition(":") for line in lines if line)
    return Request(method, target, {name.lower(): value.strip() for name, _, value in pairs})


async def _send(
    stream: SocketStream, status: int, headers: dict[str, str], body: bytes, *, cut: int | None = None
) -> None:
    """Send an answer; with `cut` only so many bytes of its body, though it announces all of it."""
    lines = [f"HTTP/1.1 {status} Status", f"Content-Length: {len(body)}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    await stream.send("\r\n".join([*lines, "", ""]).encode() + body[:cut])


async def _send_chunked(stream: SocketStream, status: int, headers: dict[str, str], body: bytes) -> None:
    lines = [f"HTTP/1.1 {status} Status", "Transfer-Encoding: chunked"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    chunk = b"%x\r\n%b\r\n" % (len(body), body) if body else b""
    await stream.send("\r\n".join([*lines, "", ""]).encode() + chunk + b"0\r\n\r\n")


async def _break_off(stream: SocketStream, how: str) -> None:
    if how == "stall":
        await anyio.sleep_forever()
    if how == "reset":
        await anyio.wait_all_tasks_blocked()
        linger = struct.pack("ii", 1, 0)  # closing with zero linger time sends a reset
        stream.extra(SocketAttribute.raw_socket).setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    raise _HungUp
