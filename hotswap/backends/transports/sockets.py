"""A connected socket as a byte stream that reads from the socket only in `receive`.

anyio's own streams (4.16) break the contract of a `Channel` in two points. The TCP stream of an accepted
connection reads ahead without bound until `receive` has waited for the first time, so that a sender never
blocks. The Unix stream closes its descriptor while a task may still wait on it, and in that turn of the event
loop the number may become another socket's.
"""

from __future__ import annotations

import socket

import anyio
from anyio.abc import ByteStream
from anyio.lowlevel import cancel_shielded_checkpoint, checkpoint_if_cancelled

__all__ = ["SocketBytes"]


class SocketBytes(ByteStream):
    """Bytes over a non-blocking socket; the socket is closed with the stream.

    Attributes:
        connected: The socket.
        last_used_s: When bytes were sent or received last, on anyio's clock.
    """

    def __init__(self, connected: socket.socket) -> None:
        self.connected = connected
        self.last_used_s = anyio.current_time()
        self._closed = False

    async def receive(self, max_bytes: int = 65536) -> bytes:
        room = memoryview(bytearray(max_bytes))
        return bytes(room[: await self.receive_into(room)])

    async def receive_into(self, room: memoryview) -> int:
        """Receive at least one byte, and at most as many as there is room for, straight into it."""
        await checkpoint_if_cancelled()
        has_waited = False
        while True:
            self._refuse_if_closed()
            try:
                num_bytes = self.connected.recv_into(room)
            except BlockingIOError:
                await anyio.wait_readable(self.connected)
                has_waited = True
            except OSError as exc:
                raise anyio.BrokenResourceError from exc
            else:
                break
        if not num_bytes:
            raise anyio.EndOfStream
        self.last_used_s = anyio.current_time()
        if not has_waited:
            await cancel_shielded_checkpoint()  # a cancellation would lose the bytes
        return num_bytes

    async def send(self, item: bytes | memoryview) -> None:
        await checkpoint_if_cancelled()
        left = memoryview(item)
        left = left[self.send_at_once(left) :]
        if not left:
            await cancel_shielded_checkpoint()
        while left:
            await anyio.wait_writable(self.connected)
            left = left[self.send_at_once(left) :]

    def send_at_once(self, item: memoryview) -> int:
        """Send what the socket takes without waiting, and return how many bytes that is."""
        self._refuse_if_closed()
        try:
            num_bytes = self.connected.send(item)
        except BlockingIOError:
            return 0
        except OSError as exc:
            raise anyio.BrokenResourceError from exc
        self.last_used_s = anyio.current_time()
        return num_bytes

    async def send_eof(self) -> None:
        self._refuse_if_closed()
        self.connected.shutdown(socket.SHUT_WR)

    async def aclose(self) -> None:
        if not self._closed:
            self._closed = True
            anyio.notify_closing(self.connected)
            try:
                # A waiting task uses the descriptor's number once more: keep it open for this turn.
                await cancel_shielded_checkpoint()
            finally:
                self.connected.close()

    def _refuse_if_closed(self) -> None:
        if self._closed:
            raise anyio.ClosedResourceError
