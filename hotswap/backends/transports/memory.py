"""Channels within a process, on memory object streams of anyio."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeAlias

import anyio
from anyio import ResourceGuard
from anyio.lowlevel import checkpoint
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

from hotswap.backends.memory import aligned_buffer, copy_in_turns
from hotswap.backends.transports.frames import check_lengths
from hotswap.backends.transports.link_errors import ProtocolError, link_broken
from hotswap.backends.transports.stream import MAX_MESSAGE_BYTES, MAX_PAYLOAD_BYTES
from hotswap.transport import Channel, Frame

__all__ = ["MemoryChannel", "memory_channels"]

_Out: TypeAlias = MemoryObjectSendStream[Frame]
_In: TypeAlias = MemoryObjectReceiveStream[Frame]


class MemoryChannel(Channel):
    """One end of a pair made by `memory_channels`.

    Args:
        out: The frames to the other end.
        inward: The frames from the other end.
        close: Closes all streams of both ends.
        max_message_bytes: The longest message.
        max_payload_bytes: The longest payload.
    """

    def __init__(
        self,
        out: _Out,
        inward: _In,
        close: Callable[[], None],
        max_message_bytes: int,
        max_payload_bytes: int,
    ) -> None:
        self.max_message_bytes, self.max_payload_bytes = max_message_bytes, max_payload_bytes
        self._out, self._in, self._close = out, inward, close
        self._closed = False
        self._sending, self._receiving = ResourceGuard("sending on"), ResourceGuard("receiving from")

    async def send(self, message: bytes, payload: memoryview | None = None) -> None:
        data = self.fitting(message, payload)
        with self._sending:
            try:
                copy = aligned_buffer(len(data))
                await copy_in_turns(copy, data)
                await self._out.send(Frame(message, copy))
            except (anyio.ClosedResourceError, anyio.BrokenResourceError):
                raise self._broken() from None

    async def receive(
        self, *, max_message_bytes: int | None = None, max_payload_bytes: int | None = None
    ) -> Frame:
        limits = self.limits(max_message_bytes, max_payload_bytes)
        with self._receiving:
            try:
                frame = await self._in.receive()
                check_lengths((len(frame.message), len(frame.payload)), limits)
            except (anyio.ClosedResourceError, anyio.EndOfStream):
                raise self._broken() from None
            except ProtocolError as exc:
                await self.aclose()
                raise link_broken(str(exc)) from exc
            return frame

    async def aclose(self) -> None:
        self._closed = True
        self._close()
        await checkpoint()

    def _broken(self) -> Exception:
        return link_broken("this end was closed" if self._closed else "the other end has closed it")


def memory_channels(
    *,
    num_frames: int = 4,
    max_message_bytes: int = MAX_MESSAGE_BYTES,
    max_payload_bytes: int = MAX_PAYLOAD_BYTES,
) -> tuple[Channel, Channel]:
    """Return the two ends of a link that holds up to `num_frames` frames each way."""
    forth = anyio.create_memory_object_stream[Frame](num_frames)
    back = anyio.create_memory_object_stream[Frame](num_frames)

    def close() -> None:
        for stream in (*forth, *back):
            stream.close()

    end = partial(
        MemoryChannel, close=close, max_message_bytes=max_message_bytes, max_payload_bytes=max_payload_bytes
    )
    return end(forth[0], back[1]), end(back[0], forth[1])
