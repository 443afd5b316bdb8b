"""Channels between processes of one machine: payloads are in memory that both processes map.

    Unix socket    the connection; carries messages, each with its payload if that is short, or its place
    two rings      payloads, one ring each way: written by one end, read in place by the other
    socket pair    one byte for each place that its reader has freed

The memory and the socket pair are unnamed. The connecting end makes them and sends them over the Unix socket,
so that the kernel frees them when the processes end, even if killed. Only the path of a listener stays, and
the next listener removes it.
"""

from __future__ import annotations

import os
import socket
import stat
import struct
from contextlib import ExitStack
from pathlib import Path

import anyio
from anyio import TASK_STATUS_IGNORED, ResourceGuard
from anyio.abc import ByteStream, TaskStatus
from anyio.lowlevel import checkpoint

from hotswap.backends.memory import copy_in_turns
from hotswap.backends.transports.connections import LinkLimits
from hotswap.backends.transports.frames import check_lengths
from hotswap.backends.transports.link_errors import ProtocolError, no_link, reason_for
from hotswap.backends.transports.pages import SharedPages
from hotswap.backends.transports.ring import Ring
from hotswap.backends.transports.serving import BACKLOG, ChannelHandler, serve_connections
from hotswap.backends.transports.sockets import SocketBytes
from hotswap.backends.transports.stream import MAX_MESSAGE_BYTES, STALL_S, StreamChannel
from hotswap.backends.transports.unix import check_same_user, listening_at
from hotswap.transport import Channel, Frame

__all__ = ["SharedChannel", "connect_shared", "serve_shared"]

_RING_BYTES = 32 << 20
_SMALL_BYTES = 4096  # so short a payload goes with its message: a place costs more than its bytes
_MAX_PLACES = 64  # so few bytes always fit in a socket buffer: freeing a place never waits
_HELLO = struct.Struct("=4sIQ")  # magic, version, bytes of a ring
_MAGIC, _VERSION = b"HSSM", 2
_PLACE = struct.Struct("=QQ")  # offset and length of a payload
_NO_PLACE = _PLACE.pack(0, 0)


class SharedChannel(Channel):
    """One end of a link; made by `connect_shared` and `serve_shared`.

    Args:
        control: Carries messages.
        places: Carries a byte for each freed place.
        out: The ring that this end writes.
        inward: The ring that the other end writes.
        stall_s: The link breaks if the other end frees no place for so long.
    """

    def __init__(
        self,
        control: ByteStream,
        places: ByteStream,
        out: SharedPages,
        inward: SharedPages,
        *,
        stall_s: float = STALL_S,
    ) -> None:
        self.max_message_bytes, self.max_payload_bytes = MAX_MESSAGE_BYTES, len(out.view)
        self._control = StreamChannel(
            control,
            max_message_bytes=_PLACE.size + MAX_MESSAGE_BYTES,
            max_payload_bytes=_SMALL_BYTES,
            stall_s=stall_s,
        )
        self._places, self._out, self._in, self._stall_s = places, out, inward, stall_s
        self._ring = Ring(len(out.view), _MAX_PLACES)
        self._lends = False  # the last payload to the caller of `receive`
        self._sending, self._receiving = ResourceGuard("sending on"), ResourceGuard("receiving from")

    async def send(self, message: bytes, payload: memoryview | None = None) -> None:
        data = self.fitting(message, payload)
        with self._sending:
            try:
                if len(data) <= _SMALL_BYTES:
                    await self._control.send(_NO_PLACE + message, data)
                else:
                    await self._send_by_ring(message, data)
            except BaseException as exc:
                await self._break_by(exc)
                raise

    async def receive(
        self, *, max_message_bytes: int | None = None, max_payload_bytes: int | None = None
    ) -> Frame:
        message_bytes, payload_bytes = self.limits(max_message_bytes, max_payload_bytes)
        with self._receiving:
            try:
                return await self._receive(message_bytes, payload_bytes)
            except BaseException as exc:
                await self._break_by(exc)
                raise

    async def aclose(self) -> None:
        await self._control.break_off("this end was closed")
        with anyio.CancelScope(shield=True):
            await self._places.aclose()
        self._out.close()
        self._in.close()

    async def _receive(self, message_bytes: int, payload_bytes: int) -> Frame:
        if self._lends:
            with anyio.fail_after(self._stall_s):
                await self._places.send(b"\0")
            self._lends = False
        frame = await self._control.receive(
            max_message_bytes=_PLACE.size + message_bytes, max_payload_bytes=min(_SMALL_BYTES, payload_bytes)
        )
        at, size_bytes = self._place_in(frame)
        if not size_bytes:
            return Frame(frame.message[_PLACE.size :], frame.payload)
        check_lengths((0, size_bytes), (0, payload_bytes))
        self._lends = True
        return Frame(frame.message[_PLACE.size :], self._in.view[at : at + size_bytes])

    # ------------------------------------------------------------------ places

    async def _send_by_ring(self, message: bytes, data: memoryview) -> None:
        at = await self._place_for(len(data))
        if self._control.is_broken:
            raise self._control.broken()
        try:
            await copy_in_turns(self._out.view[at : at + len(data)], data)
            await self._control.send(_PLACE.pack(at, len(data)) + message)
        except BaseException:
            self._ring.undo()  # if the other end got the message, the link is broken
            raise

    async def _place_for(self, size_bytes: int) -> int:
        """Allocate a place for a payload, waiting for room."""
        await checkpoint()
        while (at := self._ring.allocate(size_bytes)) is None:
            with anyio.fail_after(self._stall_s):
                freed = await self._places.receive(_MAX_PLACES)
            if len(freed) > self._ring.num_allocated:
                raise ProtocolError("the other end freed more places than it was lent")
            self._ring.free(len(freed))
        return at

    def _place_in(self, frame: Frame) -> tuple[int, int]:
        if len(frame.message) < _PLACE.size:
            raise ProtocolError("a message was received without the place of its payload")
        at, size_bytes = _PLACE.unpack_from(frame.message)
        if at + size_bytes > len(self._in.view):
            raise ProtocolError("the place of a payload is outside of the shared memory")
        return at, size_bytes

    async def _break_by(self, error: BaseException) -> None:
        """Break the whole link by an error of a part, and raise that of a broken link; return for others."""
        if (reason := reason_for(error)) is not None:
            await self._control.break_off(reason)
        if self._control.is_broken:
            await self.aclose()
        if reason is not None:
            raise self._control.broken() from error


async def connect_shared(
    path: Path | str, *, ring_bytes: int = _RING_BYTES, stall_s: float = STALL_S
) -> Channel:
    """Return a channel to the server at a path; use it with `async with`.

    Args:
        path: The path of a Unix socket.
        ring_bytes: The size of each ring, and of the longest payload; pages are allocated on first use.
        stall_s: The link breaks if the other end receives nothing for so long.

    Raises:
        MigrationAborted: the server cannot be reached or is another user's, or there is not enough memory.
    """
    await checkpoint()
    with ExitStack() as undo:
        connected = undo.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        connected.setblocking(False)
        try:
            connected.connect(os.fspath(path))
            check_same_user(connected)
            channel = _offer(connected, ring_bytes, stall_s)
        except (OSError, MemoryError, ProtocolError) as exc:
            raise no_link(repr(str(path)), reason_for(exc) or str(exc)) from exc
        undo.pop_all()
        return channel


async def serve_shared(
    handle: ChannelHandler,
    path: Path | str,
    *,
    limits: LinkLimits | None = None,
    max_ring_bytes: int = 1 << 30,
    stall_s: float = STALL_S,
    task_status: TaskStatus[None] = TASK_STATUS_IGNORED,
) -> None:
    """Call `handle` with a channel for each connection, until this is cancelled.

    A channel is closed when its call ends. A link that breaks is logged and affects no other. Only
    processes of the same user can connect. A path that another process serves is taken over.

    Args:
        handle: Called with each channel.
        path: The path of the socket, of mode 600, in a directory of mode 700, which is made if it is missing.
        limits: How many connections there may be, and for how long without a handshake.
        max_ring_bytes: The largest ring that a client may offer.
        stall_s: The link breaks if the other end receives nothing for so long.
        task_status: Told when clients can connect.

    Raises:
        ConfigError: other users may use the directory, or the path cannot be listened at.
    """

    async def opened(stream: SocketBytes) -> Channel:
        check_same_user(stream.connected)
        return await _accept(stream, max_ring_bytes, stall_s)

    with listening_at(os.fspath(path), BACKLOG) as listener:
        task_status.started()
        await serve_connections(listener, opened, handle, limits or LinkLimits())


def _offer(connected: socket.socket, ring_bytes: int, stall_s: float) -> SharedChannel:
    """Make the memory and the socket pair of a link, and send them to the other end."""
    with ExitStack() as sent:
        rings: list[SharedPages] = []
        files: list[int] = []
        for _ in range(2):
            pages, file = SharedPages.make(ring_bytes)
            sent.callback(os.close, file)
            rings.append(pages)
            files.append(file)
        mine, theirs = socket.socketpair()
        sent.enter_context(theirs)
        try:
            hello = _HELLO.pack(_MAGIC, _VERSION, ring_bytes)
            socket.send_fds(connected, [hello], [*files, theirs.fileno()])
        except BaseException:
            mine.close()
            raise
        mine.setblocking(False)
        return SharedChannel(SocketBytes(connected), SocketBytes(mine), *rings, stall_s=stall_s)


async def _accept(stream: SocketBytes, max_ring_bytes: int, stall_s: float) -> SharedChannel:
    """Receive the memory and the socket pair that the other end has made.

    Raises:
        ProtocolError: something else was received.
        OSError: likewise.
    """
    hello, files = await _hello(stream.connected)
    with ExitStack() as received:
        for file in files:
            received.callback(os.close, file)
            os.set_inheritable(file, False)
        if len(hello) != _HELLO.size or len(files) != 3 or not stat.S_ISSOCK(os.fstat(files[2]).st_mode):
            raise ProtocolError("the other end sent something else than a link")
        magic, version, ring_bytes = _HELLO.unpack(hello)
        if magic == _MAGIC and version != _VERSION:
            raise ProtocolError(f"the other end speaks version {version}, this one {_VERSION}")
        if magic != _MAGIC or not 0 < ring_bytes <= max_ring_bytes:
            raise ProtocolError(f"the other end offers {magic!r} and rings of {ring_bytes:,} bytes")
        try:
            inward, out = (SharedPages.adopt(file, ring_bytes) for file in files[:2])
        except ValueError as exc:
            raise ProtocolError(str(exc)) from exc
        places = socket.fromfd(files[2], socket.AF_UNIX, socket.SOCK_STREAM)
    places.setblocking(False)
    return SharedChannel(stream, SocketBytes(places), out, inward, stall_s=stall_s)


async def _hello(connected: socket.socket) -> tuple[bytes, list[int]]:
    while True:
        try:
            hello, files, _, _ = socket.recv_fds(connected, _HELLO.size, 3)
        except BlockingIOError:
            await anyio.wait_readable(connected)
        else:
            return hello, files
