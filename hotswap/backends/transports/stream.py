"""A channel over any byte stream of anyio: TCP, TLS round it, a Unix socket."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import anyio
from anyio import ResourceGuard
from anyio.abc import ByteStream
from anyio.lowlevel import checkpoint

from hotswap.backends.transports.frames import PIECE_BYTES, FrameReader, frame_pieces
from hotswap.backends.transports.link_errors import broken, why
from hotswap.errors import MigrationAborted
from hotswap.transport import Channel, Frame

__all__ = ["MAX_MESSAGE_BYTES", "MAX_PAYLOAD_BYTES", "STALL_S", "StreamChannel"]

MAX_MESSAGE_BYTES = 1 << 20
MAX_PAYLOAD_BYTES = 64 << 20
STALL_S = 30.0


class StreamChannel(Channel):
    """Frames with checksums, one after another.

    Args:
        stream: What carries them; it is closed with the channel.
        max_message_bytes: The longest message, sent or received.
        max_payload_bytes: The longest payload, likewise.
        stall_s: How long the other end may send nothing in the middle of a frame, or take nothing, until the
            link counts as broken. Between frames it may be silent for ever.
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
        self._broken_because = ""
        self._sending, self._receiving = ResourceGuard("sending on"), ResourceGuard("receiving from")

    @property
    def is_broken(self) -> bool:
        """Whether this end knows that the link is broken."""
        return bool(self._broken_because)

    def broken(self) -> MigrationAborted:
        """Return a new error that says why the link is broken."""
        return broken(self._broken_because)

    async def send(self, message: bytes, payload: memoryview | None = None) -> None:
        data = self.fitting(message, payload)
        with self._sending:
            await checkpoint()  # cancelled here, nothing is sent
            async with self._whole_or_broken():
                self._refuse_if_broken()
                for piece in frame_pieces(message, data):
                    with anyio.fail_after(self._stall_s):
                        await self._stream.send(piece)

    async def receive(self) -> Frame:
        with self._receiving:
            await checkpoint()
            while True:
                self._refuse_if_broken()
                async with self._or_broken():
                    used, frame = self._reader.take(self._left)
                    self._left = self._left[used:]
                    if frame is not None:
                        return frame
                    with anyio.fail_after(self._stall_s if self._reader.has_begun else None):
                        self._left = memoryview(await self._stream.receive(PIECE_BYTES))

    async def aclose(self) -> None:
        await self.break_off("this end was closed")

    # ------------------------------------------------------------------ breaking

    @asynccontextmanager
    async def _or_broken(self) -> AsyncGenerator[None]:
        """Break the link by what the stream raises, and raise that it is broken."""
        try:
            yield
        except Exception as exc:
            if (because := why(exc)) is None:
                raise
            await self.break_off(because)
            raise self.broken() from exc

    @asynccontextmanager
    async def _whole_or_broken(self) -> AsyncGenerator[None]:
        """As above; and break the link if what is begun is cancelled half way."""
        try:
            async with self._or_broken():
                yield
        except BaseException:
            await self.break_off("a frame was cancelled half way")
            raise

    async def break_off(self, because: str) -> None:
        """Break the link for a reason that all verbs tell from now on; the first one counts."""
        self._broken_because = self._broken_because or because
        with anyio.CancelScope(shield=True):
            await anyio.aclose_forcefully(self._stream)  # TLS would say goodbye first, and wait for an answer

    def _refuse_if_broken(self) -> None:
        if self._broken_because:
            raise self.broken()
