"""A connected socket as a byte stream that reads from the socket only in `receive`.

anyio's own streams (4.16) break the contract of a `Channel` in two points. The TCP stream of an accepted
connection reads ahead without bound until `receive` has waited for the first time, so that a sender never
blocks. The Unix stream closes its descriptor while a task may still wait on it, and in that turn of the event
loop the number may become another socket's.

They also register with the event loop anew for each wait, and let other tasks run after each send: with
frames of a few tokens that is most of what a link costs.
"""

from __future__ import annotations

import asyncio
import socket

import anyio
from anyio.abc import ByteStream
from anyio.lowlevel import cancel_shielded_checkpoint, checkpoint_if_cancelled

__all__ = ["SocketBytes"]

# Other tasks run after so many bytes that were sent without waiting; a send counts as a few of them.
_TURN_BYTES, _SEND_BYTES = 64 << 10, 4 << 10


class SocketBytes(ByteStream):
    """Bytes over a non-blocking socket; the socket is closed with the stream.

    Attributes:
        connected: The socket.
        last_used_s: When bytes were sent or received last, on anyio's clock.
    """

    def __init__(self, connected: socket.socket) -> None:
        self.connected = connected
        self._loop = asyncio.get_running_loop()
        self.last_used_s = self._loop.time()
        self._arrivals = _Arrivals(connected, self._loop)
        self._turn_bytes = 0
        self._closed = False

    async def receive(self, max_bytes: int = 65536) -> bytes:
        room = memoryview(bytearray(max_bytes))
        return bytes(room[: await self.receive_into(room)])

    async def receive_into(self, room: memoryview) -> int:
        """Receive at least one byte, and at most as many as there is room for, straight into it."""
        self._refuse_if_closed()
        if (num_bytes := await self._arrivals.take(room)) == 0:
            raise anyio.EndOfStream
        self.last_used_s = self._loop.time()
        return num_bytes

    async def send(self, item: bytes | memoryview) -> None:
        await checkpoint_if_cancelled()
        left = memoryview(item)
        left = left[self.send_at_once(left) :]
        if not left:
            await self.take_turns()
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
        self.last_used_s = self._loop.time()
        self._turn_bytes += num_bytes + _SEND_BYTES
        return num_bytes

    @property
    def has_sent_much(self) -> bool:
        """Whether so much was sent since other tasks ran that they should."""
        return self._turn_bytes >= _TURN_BYTES

    async def take_turns(self) -> None:
        """Let other tasks run if much was sent since they did; not cancelled."""
        if self.has_sent_much:
            self._turn_bytes = 0
            await cancel_shielded_checkpoint()

    async def send_eof(self) -> None:
        self._refuse_if_closed()
        self.connected.shutdown(socket.SHUT_WR)

    async def aclose(self) -> None:
        if not self._closed:
            self._closed = True
            self._arrivals.close()
            anyio.notify_closing(self.connected)
            try:
                # A waiting task uses the descriptor's number once more: keep it open for this turn.
                await cancel_shielded_checkpoint()
            finally:
                self.connected.close()

    def _refuse_if_closed(self) -> None:
        if self._closed:
            raise anyio.ClosedResourceError


class _Arrivals:
    """Receives what arrives at a socket, by one registration with the event loop for many waits.

    Bytes are received by the event loop's call, so that it has nothing to tell again; that of a task which
    was cancelled in that turn are kept for the next one. A call that finds no task ends the registration.
    """

    def __init__(self, connected: socket.socket, loop: asyncio.AbstractEventLoop) -> None:
        self._connected, self._loop = connected, loop
        self._is_registered = False
        self._waiting: asyncio.Future[int] | None = None
        self._room = memoryview(b"")  # of the waiting task
        self._kept = memoryview(b"")
        self._is_drained = False  # the last receive took all that there was

    async def take(self, room: memoryview) -> int:
        """Receive into `room`, and return how many bytes; 0 at the end of the stream.

        Raises:
            BusyResourceError: another task receives.
            BrokenResourceError: the socket is broken.
            ClosedResourceError: it was closed meanwhile.
        """
        if self._waiting is not None:
            raise anyio.BusyResourceError("receiving from")
        if self._kept or not self._is_drained:
            await checkpoint_if_cancelled()
            if (num_bytes := self._at_once(room)) is not None:
                await cancel_shielded_checkpoint()  # a cancellation would lose the bytes
                return num_bytes
        waiting: asyncio.Future[int] = self._loop.create_future()
        self._waiting, self._room = waiting, room
        if not self._is_registered:
            self._loop.add_reader(self._connected, self._arrive)
            self._is_registered = True
        try:
            return await waiting
        except BaseException:
            if waiting.done() and not waiting.cancelled() and waiting.exception() is None:
                self._kept = memoryview(bytes(room[: waiting.result()]))
            raise
        finally:
            self._waiting, self._room = None, memoryview(b"")

    def close(self) -> None:
        """End the registration; a task that waits gets `ClosedResourceError`."""
        self._stop()
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_exception(anyio.ClosedResourceError())

    def _at_once(self, room: memoryview) -> int | None:
        """Receive what there is; `None` if there is nothing yet."""
        if self._kept:
            num_bytes = min(len(self._kept), len(room))
            room[:num_bytes], self._kept = self._kept[:num_bytes], self._kept[num_bytes:]
            return num_bytes
        try:
            num_bytes = self._connected.recv_into(room)
        except BlockingIOError:
            self._is_drained = True
            return None
        except OSError as exc:
            raise anyio.BrokenResourceError from exc
        self._is_drained = 0 < num_bytes < len(room)
        return num_bytes

    def _arrive(self) -> None:
        """Receive for the task that waits; called by the event loop while there is something to receive."""
        waiting = self._waiting
        if waiting is None or waiting.done():
            self._is_drained = False
            self._stop()
            return
        try:
            num_bytes = self._at_once(self._room)
        except anyio.BrokenResourceError as exc:
            waiting.set_exception(exc)
        else:
            if num_bytes is not None:
                waiting.set_result(num_bytes)

    def _stop(self) -> None:
        if self._is_registered:
            self._is_registered = False
            self._loop.remove_reader(self._connected)
