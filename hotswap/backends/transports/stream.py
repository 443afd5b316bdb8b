"""`StreamChannel`: a channel over any byte stream of anyio: TCP, TLS, a Unix socket."""

from __future__ import annotations

import anyio
from anyio import ResourceGuard
from anyio.abc import ByteStream, SocketAttribute
from anyio.lowlevel import checkpoint, checkpoint_if_cancelled

from hotswap.backends.memory import address_of, copy_in_turns
from hotswap.backends.transports.frames import PIECE_BYTES, FrameReader, frame_pieces, short_frame
from hotswap.backends.transports.link_errors import ENDED, ProtocolError, link_broken, reason_for
from hotswap.backends.transports.sockets import SocketBytes
from hotswap.errors import MigrationAborted
from hotswap.transport import Channel, Frame

__all__ = ["MAX_MESSAGE_BYTES", "MAX_PAYLOAD_BYTES", "STALL_S", "StreamChannel"]

MAX_MESSAGE_BYTES = 1 << 20
MAX_PAYLOAD_BYTES = 64 << 20
STALL_S = 30.0

# What a socket has is received together up to this length: messages, and the ends of frames.
_SMALL_BYTES = 64 << 10


class StreamChannel(Channel):
    """Sends frames with checksums over a byte stream.

    Over `SocketBytes` the bytes of a payload are copied by the kernel alone: from the caller's memory, and
    into the memory that `receive` lends.

    Args:
        stream: The byte stream; it is closed with the channel.
        max_message_bytes: The longest message, sent or received.
        max_payload_bytes: The longest payload, likewise.
        stall_s: The link breaks if the other end sends nothing for so long in the middle of a frame, or
            receives nothing. Between frames it may be silent for any time.
    """

    def __init__(
        self,
        stream: ByteStream,
        *,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
        max_payload_bytes: int = MAX_PAYLOAD_BYTES,
        stall_s: float = STALL_S,
    ) -> None:
        self.max_message_bytes, self.max_payload_bytes = max_message_bytes, max_payload_bytes
        self._stream, self._stall_s = stream, stall_s
        self._reader = FrameReader(max_message_bytes, max_payload_bytes)
        self._left = memoryview(b"")  # received beyond the frame that was returned
        self._socket = stream if isinstance(stream, SocketBytes) else None
        self._small = memoryview(bytearray(_SMALL_BYTES if self._socket else 0))
        self._broken_reason = ""
        self._sending, self._receiving = ResourceGuard("sending on"), ResourceGuard("receiving from")

    @property
    def is_broken(self) -> bool:
        """Whether the link is known to be broken at this end."""
        return bool(self._broken_reason)

    @property
    def own_address(self) -> str:
        """The address of this end: that by which the other end reaches this machine; "" if there is none."""
        address: object = self._stream.extra(SocketAttribute.local_address, "")
        return str(address[0]) if isinstance(address, tuple) else ""

    def broken(self) -> MigrationAborted:
        """Return a new error with the reason why the link is broken."""
        return link_broken(self._broken_reason)

    async def send(self, message: bytes, payload: memoryview | None = None) -> None:
        data = self.fitting(message, payload)
        with self._sending:
            await checkpoint_if_cancelled()  # cancelled here, nothing is sent
            self._refuse_if_broken()
            try:
                if len(data) <= PIECE_BYTES:
                    await self._send(short_frame(message, data))
                    return
                for piece in frame_pieces(message, data, in_place=self._socket is not None):
                    await self._send(piece)
            except BaseException as exc:
                await self._break_by(exc)
                await self.break_off("a frame was cancelled half way")
                raise

    async def receive(
        self, *, max_message_bytes: int | None = None, max_payload_bytes: int | None = None
    ) -> Frame:
        return await self._receive(*self.limits(max_message_bytes, max_payload_bytes), None)

    async def receive_into(self, target: memoryview, *, max_message_bytes: int | None = None) -> Frame:
        """Return the next frame, as `receive`, with its payload at the beginning of `target`.

        A longer payload breaks the link. After a cancelled call the content of `target` is undefined.
        """
        frame = await self._receive(*self.limits(max_message_bytes, len(target)), target)
        payload = target[: len(frame.payload)]
        if len(payload) and address_of(payload) != address_of(frame.payload):  # a receive had begun it before
            await copy_in_turns(payload, frame.payload)
        return Frame(frame.message, payload)

    async def _receive(
        self, max_message_bytes: int, max_payload_bytes: int, target: memoryview | None
    ) -> Frame:
        with self._receiving:
            if self._left:
                await checkpoint()  # a frame that was received already is returned without waiting
            elif self._socket is None:
                await checkpoint_if_cancelled()  # a socket does so itself
            frame: Frame | None = None
            while frame is None:
                self._refuse_if_broken()
                try:
                    self._reader.limit(max_message_bytes, max_payload_bytes, target)
                    used, frame = self._reader.take(self._left)
                    self._left = self._left[used:]
                    if frame is None:
                        frame = await self._receive_some()
                except Exception as exc:
                    await self._break_by(exc)
                    raise
            return frame

    async def aclose(self) -> None:
        await self.break_off("this end was closed")

    async def _send(self, piece: bytes | memoryview) -> None:
        if self._socket is None:
            with anyio.fail_after(self._stall_s):
                await self._stream.send(bytes(piece))
            return
        left = memoryview(piece)
        left = left[self._socket.send_at_once(left) :]
        if not left:
            if self._socket.has_sent_much:
                await self._socket.take_turns()
            return
        with anyio.fail_after(self._stall_s):
            await self._socket.send(left)

    async def _receive_some(self) -> Frame | None:
        """Receive bytes into `_left`, or straight into a long payload; return a frame that is complete."""
        if not self._reader.has_begun:  # between frames there is no limit
            return await self._receive_once()
        with anyio.fail_after(self._stall_s):
            return await self._receive_once()

    async def _receive_once(self) -> Frame | None:
        try:
            if self._socket is None:
                self._left = memoryview(await self._stream.receive(PIECE_BYTES))
            elif len(self._reader.room) >= _SMALL_BYTES:
                return self._reader.filled(await self._socket.receive_into(self._reader.room))
            else:
                self._left = self._small[: await self._socket.receive_into(self._small)]
            return None
        except anyio.EndOfStream:
            if not self._reader.has_begun:
                raise
            raise ProtocolError(f"{ENDED}, in the middle of a frame") from None

    # ------------------------------------------------------------------ breaking

    async def _break_by(self, error: BaseException) -> None:
        """Break the link by an error of a link, and raise the error of a broken link; return for others."""
        if (reason := reason_for(error)) is not None:
            await self.break_off(reason)
            raise self.broken() from error

    async def break_off(self, reason: str) -> None:
        """Break the link; all methods raise the reason from now on, the first one given."""
        self._broken_reason = self._broken_reason or reason
        with anyio.CancelScope(shield=True):
            await anyio.aclose_forcefully(
                self._stream
            )  # TLS would send a close message first, and wait for an answer

    def _refuse_if_broken(self) -> None:
        if self._broken_reason:
            raise self.broken()
