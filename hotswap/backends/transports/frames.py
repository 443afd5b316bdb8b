"""The encoding of frames as bytes, and a parser that is fed pieces of any size; no I/O.

header    magic, version, length of the message, length of the payload     20 bytes, big-endian
CRC-32    of the header, so that a damaged length is never used              4 bytes
message
payload
CRC-32    of message and payload                                             4 bytes
"""

from __future__ import annotations

import struct
from collections.abc import Generator, Iterator

from hotswap.backends.crc import crc32
from hotswap.backends.memory import aligned_buffer
from hotswap.backends.transports.link_errors import ProtocolError
from hotswap.transport import Frame

__all__ = ["PIECE_BYTES", "FrameReader", "check_lengths", "frame_pieces", "short_frame"]

_MAGIC = b"HSKV"
_VERSION = 1
_HEADER = struct.Struct("!4sH2xIQ")
_SUM = struct.Struct("!I")
_START = struct.Struct(_HEADER.format + "I")  # the header and its sum
_START_BYTES = _START.size
_LEAST_BYTES = _START_BYTES + _SUM.size
_DAMAGED = "the checksum of a frame does not match its bytes"

# Bytes that are copied at once, and that are summed at once, so that the event loop is not blocked for long.
PIECE_BYTES = 256 << 10
_SUMMED_BYTES = 1 << 20


def frame_pieces(
    message: bytes, payload: memoryview, *, in_place: bool = False
) -> Iterator[bytes | memoryview]:
    """Yield the bytes of a frame, in pieces if they are many; each is a copy, or `in_place` the payload's."""
    if len(payload) <= PIECE_BYTES:
        yield short_frame(message, payload)
        return
    yield _start(message, payload)
    checksum = crc32(message, 0)
    piece_bytes = _SUMMED_BYTES if in_place else PIECE_BYTES
    for at in range(0, len(payload), piece_bytes):
        part = payload[at : at + piece_bytes]
        piece = part if in_place else bytes(part)
        checksum = crc32(piece, checksum)
        yield piece
    yield _SUM.pack(checksum)


def short_frame(message: bytes, payload: memoryview) -> bytes:
    """Return the bytes of a frame whose payload is short enough to be copied at once."""
    checksum = crc32(payload, crc32(message, 0))
    return b"".join((_start(message, payload), payload, _SUM.pack(checksum)))


def _start(message: bytes, payload: memoryview) -> bytes:
    header = _HEADER.pack(_MAGIC, _VERSION, len(message), len(payload))
    return header + _SUM.pack(crc32(header, 0)) + message


def check_lengths(lengths: tuple[int, int], limits: tuple[int, int]) -> None:
    """Refuse a frame by the lengths of its message and its payload.

    Raises:
        ProtocolError: one is over its limit.
    """
    if lengths[0] > limits[0] or lengths[1] > limits[1]:
        raise ProtocolError(
            f"a frame of {lengths[0]:,} and {lengths[1]:,} bytes was received; the limits are "
            f"{limits[0]:,} and {limits[1]:,}"
        )


class FrameReader:
    """Parses frames from bytes; the payload of a frame is valid until the next frame.

    Args:
        max_message_bytes: A longer message is refused before memory is allocated for it.
        max_payload_bytes: Likewise.
    """

    def __init__(self, max_message_bytes: int, max_payload_bytes: int) -> None:
        self._limits = max_message_bytes, max_payload_bytes
        self._memory = memoryview(bytearray())
        self._target: memoryview | None = None
        self._parts: Generator[memoryview, None, Frame]
        self._room: memoryview
        self._begin()

    def limit(self, max_message_bytes: int, max_payload_bytes: int, target: memoryview | None = None) -> None:
        """Set the limits of the next frame, of which a part may have been consumed.

        Its payload goes to `target` if it fits and its header was not consumed; else to memory of the reader.

        Raises:
            ProtocolError: its lengths are known and over them; the reader cannot be used further.
        """
        self._limits, self._target = (max_message_bytes, max_payload_bytes), target
        check_lengths(self._lengths, self._limits)

    @property
    def room(self) -> memoryview:
        """The memory that the next bytes go to, never empty; `take` fills it, or `filled` says that it is."""
        return self._room

    def filled(self, num_bytes: int) -> Frame | None:
        """Count bytes that were received straight into `room`; return the frame that they complete.

        Raises:
            ProtocolError: the bytes are no frames; the reader cannot be used further.
        """
        self.has_begun, self._room = True, self._room[num_bytes:]
        return self._go_on()

    def take(self, data: memoryview) -> tuple[int, Frame | None]:
        """Consume bytes up to the end of a frame; return their number, and the frame if it is complete.

        Raises:
            ProtocolError: the bytes are no frames; the reader cannot be used further.
        """
        if not self.has_begun and self._target is None and (whole := self._first_in(data)) is not None:
            return whole
        used, frame = 0, None
        while frame is None and used < len(data):
            size = min(len(self._room), len(data) - used)
            self._room[:size] = data[used : used + size]
            used, frame = used + size, self.filled(size)
        return used, frame

    def _first_in(self, data: memoryview) -> tuple[int, Frame] | None:
        """Return the frame that `data` begins with, if it is all there: in a quarter of the time of parts."""
        if len(data) < _LEAST_BYTES:
            return None
        message_bytes, payload_bytes = lengths = _lengths_in(data)
        end = _START_BYTES + message_bytes + payload_bytes
        if len(data) < end + _SUM.size or payload_bytes > PIECE_BYTES:
            return None
        check_lengths(lengths, self._limits)
        if _SUM.unpack_from(data, end)[0] != crc32(data[_START_BYTES:end], 0):
            raise ProtocolError(_DAMAGED)
        payload_at = _START_BYTES + message_bytes
        payload = self._memory_for(payload_bytes)
        payload[:] = data[payload_at:end]
        return end + _SUM.size, Frame(bytes(data[_START_BYTES:payload_at]), payload)

    def _go_on(self) -> Frame | None:
        """Have room for the next bytes, unless the frame is complete: then for those of the next frame."""
        while not self._room:
            try:
                self._room = next(self._parts)
            except StopIteration as whole:
                frame: Frame = whole.value
                self._begin()
                return frame
        return None

    def _begin(self) -> None:
        self.has_begun = False  # whether a part of a frame was consumed
        self._lengths = 0, 0  # of its message and its payload, once the header was consumed
        self._parts = self._read()
        self._room = next(self._parts)

    def _read(self) -> Generator[memoryview, None, Frame]:
        """Yield the memory to fill next, until the frame is complete."""
        header = bytearray(_HEADER.size + _SUM.size)
        yield memoryview(header)
        self._lengths = message_bytes, payload_bytes = _lengths_in(header)
        check_lengths(self._lengths, self._limits)
        message = bytearray(message_bytes)
        yield memoryview(message)
        checksum = crc32(message, 0)
        payload = self._memory_for(payload_bytes)
        for at in range(0, payload_bytes, _SUMMED_BYTES):
            piece = payload[at : at + _SUMMED_BYTES]
            yield piece
            checksum = crc32(piece, checksum)
        tail = bytearray(_SUM.size)
        yield memoryview(tail)
        if _SUM.unpack(tail) != (checksum,):
            raise ProtocolError(_DAMAGED)
        return Frame(bytes(message), payload)

    def _memory_for(self, size_bytes: int) -> memoryview:
        if self._target is not None and size_bytes <= len(self._target):
            return self._target[:size_bytes]
        if len(self._memory) < size_bytes:
            try:
                self._memory = aligned_buffer(size_bytes)
            except MemoryError as exc:
                raise ProtocolError(str(exc)) from exc
        return self._memory[:size_bytes]


def _lengths_in(data: bytearray | memoryview) -> tuple[int, int]:
    """Return the lengths that a header tells, which `data` begins with."""
    magic, version, message_bytes, payload_bytes, checksum = _START.unpack_from(data)
    if magic != _MAGIC:
        raise ProtocolError(f"{magic!r} was received in the place of a frame")
    if checksum != crc32(data[: _HEADER.size], 0):
        raise ProtocolError("the header of a frame is damaged")
    if version != _VERSION:
        raise ProtocolError(f"the other end speaks version {version}, this one {_VERSION}")
    return message_bytes, payload_bytes
