"""Frames as bytes, without any I/O: how they are written, and read from pieces of any size.

head      magic, version, length of the message, length of the payload     20 bytes, big-endian
CRC-32    of the head, so that no length is believed that was not sent       4 bytes
message
payload
CRC-32    of message and payload                                             4 bytes
"""

from __future__ import annotations

import struct
from collections.abc import Generator, Iterator

from hotswap.backends.memory import aligned_buffer
from hotswap.backends.stores.crc import crc32
from hotswap.backends.transports.link_errors import ProtocolError
from hotswap.transport import Frame

__all__ = ["PIECE_BYTES", "FrameReader", "frame_pieces"]

_MAGIC = b"HSKV"
_VERSION = 1
_HEAD = struct.Struct("!4sH2xIQ")
_SUM = struct.Struct("!I")

# What is copied and summed in one go, so that the event loop gets its turn.
PIECE_BYTES = 256 << 10


def frame_pieces(message: bytes, payload: memoryview) -> Iterator[bytes]:
    """Yield a frame's bytes: at once if they are few, else in pieces; each is a copy."""
    head = _HEAD.pack(_MAGIC, _VERSION, len(message), len(payload))
    opening = head + _SUM.pack(crc32(head, 0)) + message
    checksum = crc32(message, 0)
    if len(payload) <= PIECE_BYTES:
        yield b"".join((opening, payload, _SUM.pack(crc32(payload, checksum))))
        return
    yield opening
    for at in range(0, len(payload), PIECE_BYTES):
        piece = bytes(payload[at : at + PIECE_BYTES])
        checksum = crc32(piece, checksum)
        yield piece
    yield _SUM.pack(checksum)


class FrameReader:
    """Puts frames together again; the payload of one is overwritten by that of the next.

    Args:
        max_message_bytes: A longer message is refused before anything is reserved for it.
        max_payload_bytes: Likewise.
    """

    def __init__(self, max_message_bytes: int, max_payload_bytes: int) -> None:
        self._max_message_bytes, self._max_payload_bytes = max_message_bytes, max_payload_bytes
        self._memory = memoryview(bytearray())
        self._parts: Generator[memoryview, None, Frame]
        self._room: memoryview
        self._begin()

    def take(self, data: memoryview) -> tuple[int, Frame | None]:
        """Take bytes, up to the end of a frame; return how many, and the frame if it is whole.

        Raises:
            ProtocolError: they are none that `frame_pieces` could have made; the reader is of no more use.
        """
        used = 0
        while True:
            while not self._room:
                try:
                    self._room = next(self._parts)
                except StopIteration as whole:
                    self._begin()
                    return used, whole.value
            if used == len(data):
                return used, None
            size = min(len(self._room), len(data) - used)
            self._room[:size] = data[used : used + size]
            self._room = self._room[size:]
            self.has_begun, used = True, used + size

    def _begin(self) -> None:
        self.has_begun = False  # whether a part of a frame was taken
        self._parts = self._read()
        self._room = next(self._parts)

    def _read(self) -> Generator[memoryview, None, Frame]:
        """Yield the memory to be filled next, until the frame is there."""
        head = bytearray(_HEAD.size + _SUM.size)
        yield memoryview(head)
        message_bytes, payload_bytes = self._lengths(bytes(head))
        message = bytearray(message_bytes)
        yield memoryview(message)
        checksum = crc32(message, 0)
        payload = self._memory_for(payload_bytes)
        for at in range(0, payload_bytes, PIECE_BYTES):
            piece = payload[at : at + PIECE_BYTES]
            yield piece
            checksum = crc32(piece, checksum)
        tail = bytearray(_SUM.size)
        yield memoryview(tail)
        if _SUM.unpack(tail) != (checksum,):
            raise ProtocolError(
                "the checksum of a frame is not that of its bytes: they were damaged on the way"
            )
        return Frame(bytes(message), payload)

    def _lengths(self, head: bytes) -> tuple[int, int]:
        magic, version, message_bytes, payload_bytes = _HEAD.unpack_from(head)
        if magic != _MAGIC:
            raise ProtocolError(f"{head[:4]!r} came where a frame should begin")
        if _SUM.unpack_from(head, _HEAD.size) != (crc32(head[: _HEAD.size], 0),):
            raise ProtocolError("the head of a frame was damaged on the way")
        if version != _VERSION:
            raise ProtocolError(f"the other end speaks version {version}, this one {_VERSION}")
        if message_bytes > self._max_message_bytes or payload_bytes > self._max_payload_bytes:
            raise ProtocolError(
                f"a frame of {message_bytes:,} and {payload_bytes:,} bytes came, and no more than "
                f"{self._max_message_bytes:,} and {self._max_payload_bytes:,} are taken"
            )
        return message_bytes, payload_bytes

    def _memory_for(self, size_bytes: int) -> memoryview:
        if len(self._memory) < size_bytes:
            try:
                self._memory = aligned_buffer(size_bytes)
            except MemoryError as exc:
                raise ProtocolError(str(exc)) from exc
        return self._memory[:size_bytes]
