"""Frames are parsed from pieces of any size, and other bytes raise an error."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotswap.backends.transports.frames import PIECE_BYTES, FrameReader, frame_pieces
from hotswap.backends.transports.link_errors import ProtocolError
from hotswap.backends.transports.ring import Ring

MESSAGES = st.binary(max_size=100)
# Around the length at which payloads are sent in pieces, too.
PAYLOADS = st.binary(max_size=300) | st.builds(
    lambda size, fill: bytes([fill]) * size,
    st.integers(PIECE_BYTES - 2, 2 * PIECE_BYTES + 2),
    st.integers(0, 255),
)
FRAMES = st.tuples(MESSAGES, PAYLOADS)


def written(message: bytes, payload: bytes) -> bytes:
    return b"".join(frame_pieces(message, memoryview(payload)))


def read(data: bytes, *, step: int = 1 << 30, most: int = 1 << 20) -> list[tuple[bytes, bytes]]:
    """Parse all frames in `data`, fed `step` bytes at a time."""
    reader, frames = FrameReader(most, most), list[tuple[bytes, bytes]]()
    for at in range(0, len(data), step):
        left = memoryview(data)[at : at + step]
        while left:
            used, frame = reader.take(left)
            left = left[used:]
            if frame is not None:
                frames.append((frame.message, bytes(frame.payload)))
    return frames


@given(st.lists(FRAMES, max_size=4), st.integers(1, 400))
def test_frames_come_back_from_pieces_of_any_size(frames: list[tuple[bytes, bytes]], step: int) -> None:
    step = step if sum(len(payload) for _, payload in frames) < 5000 else step * 1000
    assert read(b"".join(written(*frame) for frame in frames), step=step) == frames


@given(st.lists(FRAMES, max_size=4), st.integers(1, 400), st.booleans())
def test_frames_that_fill_the_room_of_a_reader_are_the_same(
    frames: list[tuple[bytes, bytes]], step: int, in_place: bool
) -> None:
    data = b"".join(
        bytes(piece)
        for message, payload in frames
        for piece in frame_pieces(message, memoryview(payload), in_place=in_place)
    )
    step = step if len(data) < 5000 else step * 1000
    reader, found, at = FrameReader(1 << 20, 1 << 20), list[tuple[bytes, bytes]](), 0
    while at < len(data):
        size = min(step, len(reader.room), len(data) - at)
        reader.room[:size] = data[at : at + size]
        at += size
        if (frame := reader.filled(size)) is not None:
            found.append((frame.message, bytes(frame.payload)))
    assert found == frames
    assert not reader.has_begun


@given(st.binary(max_size=200), MESSAGES)
def test_garbage_is_never_a_frame(garbage: bytes, message: bytes) -> None:
    with suppress(ProtocolError):
        assert read(garbage) == []
    with pytest.raises(ProtocolError):
        read(garbage + b"x" + written(message, b"") * 2)


@given(st.binary(max_size=40), st.binary(max_size=200), st.data())
def test_a_flipped_bit_anywhere_is_found(message: bytes, payload: bytes, data: st.DataObject) -> None:
    bits = bytearray(written(message, payload))
    at = data.draw(st.integers(0, 8 * len(bits) - 1))
    bits[at // 8] ^= 1 << at % 8
    with pytest.raises(ProtocolError):
        read(bytes(bits) + written(message, payload))


@given(FRAMES, st.data())
def test_a_truncated_frame_is_not_returned(frame: tuple[bytes, bytes], data: st.DataObject) -> None:
    whole = written(*frame)
    assert read(whole[: data.draw(st.integers(0, len(whole) - 1))]) == []


def test_lengths_beyond_the_limits_are_refused_by_the_header() -> None:
    for message, payload in ((b"x" * 101, b""), (b"", b"x" * 101)):
        with pytest.raises(ProtocolError, match="101"):
            read(written(message, payload)[:24], most=100)
    assert read(written(b"x" * 100, b"x" * 100), most=100) == [(b"x" * 100, b"x" * 100)]


@given(st.lists(st.integers(1, 40) | st.just(0), max_size=80))
def test_a_ring_allocates_no_byte_twice_and_all_of_it_when_empty(steps: list[int]) -> None:
    ring, taken = Ring(40, max_places=5), list[range]()
    for size in steps:
        if size == 0:
            ring.free(len(taken[:1]))
            del taken[:1]
        elif (at := ring.allocate(size)) is not None:
            place = range(at, at + size)
            assert place.start >= 0
            assert place.stop <= 40
            assert all(place.stop <= other.start or other.stop <= place.start for other in taken)
            taken.append(place)
        else:
            assert taken
    assert ring.num_allocated == len(taken) <= 5
    ring.free(len(taken))
    assert ring.allocate(40) == 0


def test_places_of_a_ring_wrap_around_its_end() -> None:
    ring = Ring(10, max_places=8)
    assert [ring.allocate(4), ring.allocate(4), ring.allocate(4)] == [0, 4, None]
    ring.free(1)
    assert ring.allocate(4) == 0, "what is free at the end is too little"
    assert ring.allocate(1) is None
    ring.undo()
    assert [ring.allocate(2), ring.allocate(2), ring.allocate(1)] == [8, 0, 2]
