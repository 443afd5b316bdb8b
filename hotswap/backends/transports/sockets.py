"""A connected socket as a byte stream that reads nothing before it is asked to.

anyio has such streams, and in two points (4.16) they do not keep what a `Channel` promises. The TCP stream of
whoever accepts a connection reads on behind their back, without bound, until `receive` has waited for the
first time: a sender would find room for ever. The Unix stream closes its descriptor while somebody may still
wait on it, and in that turn the number can become another socket's.
"""

from __future__ import annotations

import socket

import anyio
from anyio.abc import ByteStream
from anyio.lowlevel import cancel_shielded_checkpoint, checkpoint

__all__ = ["SocketBytes"]


class SocketBytes(ByteStream):
    """Bytes over a socket that does not block; the socket is closed with the stream."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        self._closed = False

    async def receive(self, max_bytes: int = 65536) -> bytes:
        await checkpoint()
        while True:
            self._refuse_if_closed()
            try:
                data = self._socket.recv(max_bytes)
            except BlockingIOError:
                await anyio.wait_readable(self._socket)
            except OSError as exc:
                raise anyio.BrokenResourceError from exc
            else:
                if not data:
                    raise anyio.EndOfStream
                return data

    async def send(self, item: bytes) -> None:
        await checkpoint()
        left = memoryview(item)
        while left:
            self._refuse_if_closed()
            try:
                left = left[self._socket.send(left) :]
            except BlockingIOError:
                await anyio.wait_writable(self._socket)
            except OSError as exc:
                raise anyio.BrokenResourceError from exc

    async def send_eof(self) -> None:
        self._refuse_if_closed()
        self._socket.shutdown(socket.SHUT_WR)

    async def aclose(self) -> None:
        if not self._closed:
            self._closed = True
            anyio.notify_closing(self._socket)
            try:
                # Who waits looks at the descriptor's number again, so that stays taken for this turn.
                await cancel_shielded_checkpoint()
            finally:
                self._socket.close()

    def _refuse_if_closed(self) -> None:
        if self._closed:
            raise anyio.ClosedResourceError
