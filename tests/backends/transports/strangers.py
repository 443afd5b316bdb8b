"""Clients and servers that speak the bytes of a TCP link by hand, and the log of what became of them."""

from __future__ import annotations

import logging
import socket
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import partial
from pathlib import Path

import anyio

from hotswap import ModelId, Request, RequestId
from hotswap.abc import Channel, KVPages
from hotswap.backends.transports import (
    LinkLimits,
    LinkSecret,
    remote_sink,
    serve_shared,
    serve_sink,
    serve_tcp,
)
from hotswap.backends.transports.frames import frame_pieces
from hotswap.backends.transports.handshake import authenticate_server
from hotswap.backends.transports.sockets import SocketBytes
from tests.backends.transports.links import SECRET
from tests.backends.transports.recording import LAYOUT, RecordingEngine

REQUEST = Request(id=RequestId("r"), model=ModelId("m"), prompt=tuple(range(12)))
PAGES = memoryview(bytearray(3 * LAYOUT.block_bytes))


async def move(channel: Channel) -> None:
    """Move three blocks and leave."""
    async with remote_sink(channel, REQUEST) as sink:
        await sink.reserve(12)
        await sink.write(KVPages(0, 12, PAGES))
        await sink.commit(REQUEST.tokens)


def frame(message: bytes, payload: bytes | memoryview = b"") -> bytes:
    """The bytes of a frame."""
    return b"".join(frame_pieces(message, memoryview(payload)))


@asynccontextmanager
async def served(
    engine: RecordingEngine,
    *,
    secret: LinkSecret | None = SECRET,
    limits: LinkLimits | None = None,
) -> AsyncGenerator[int]:
    """Serve an engine over TCP; yields the port."""
    async with anyio.create_task_group() as tasks:
        serve = partial(serve_tcp, secret=secret, limits=limits)
        yield await tasks.start(serve, partial(serve_sink, engine), "127.0.0.1")
        tasks.cancel_scope.cancel()


@asynccontextmanager
async def served_at(path: Path, engine: RecordingEngine) -> AsyncGenerator[None]:
    """Serve an engine through shared memory, at a path."""
    async with anyio.create_task_group() as tasks:
        await tasks.start(serve_shared, partial(serve_sink, engine), path)
        yield
        tasks.cancel_scope.cancel()


@contextmanager
def stranger(port: int) -> Generator[socket.socket]:
    """A connection without a handshake."""
    with socket.create_connection(("127.0.0.1", port)) as connected:
        connected.setblocking(False)
        yield connected


async def insider(connected: socket.socket, secret: LinkSecret = SECRET) -> None:
    """Complete the handshake of a client on a connection."""
    await authenticate_server(SocketBytes(connected), secret)


async def read_to_end(connected: socket.socket) -> bytes:
    """Everything that comes before the other end closes the connection."""
    connected.setblocking(False)
    data = b""
    with suppress(ConnectionError):  # where something was left unread
        while True:
            await anyio.wait_readable(connected)
            with suppress(BlockingIOError):
                if not (piece := connected.recv(1 << 16)):
                    break
                data += piece
    return data


@contextmanager
def logged() -> Generator[list[str]]:
    """The lines that links log meanwhile."""
    lines: list[str] = []

    class Lines(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    handler, logger = Lines(), logging.getLogger("hotswap.transports")
    logger.addHandler(handler)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)
