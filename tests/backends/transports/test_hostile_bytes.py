"""Whatever bytes a server gets: it closes the connection, logs the reason, and serves the others."""

from __future__ import annotations

import dataclasses
import gc
import json
import os
import socket
import struct
import sys
import tempfile
from collections.abc import Awaitable, Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import anyio
import pytest
from anyio.lowlevel import checkpoint
from hypothesis import given, settings
from hypothesis import strategies as st

from hotswap import Sampling
from hotswap.abc import KVPages
from hotswap.backends.crc import crc32
from hotswap.backends.transports import connect_shared, connect_tcp, remote_sink, wire
from hotswap.backends.transports.handshake import authenticate_server
from hotswap.backends.transports.link_errors import ProtocolError
from hotswap.backends.transports.pages import SharedPages
from hotswap.backends.transports.sockets import SocketBytes
from tests.backends.transports.links import SECRET
from tests.backends.transports.processes import nothing_stays
from tests.backends.transports.recording import RecordingEngine
from tests.backends.transports.strangers import (
    PAGES,
    REQUEST,
    frame,
    insider,
    logged,
    move,
    read_to_end,
    served,
    served_at,
    stranger,
)

OPEN = wire.pack("open", 1, **wire.request_fields(REQUEST))
TOKENS = wire.pack_tokens(REQUEST.tokens)
MOVE = [
    frame(OPEN, TOKENS),
    frame(wire.pack("reserve", 2, num_tokens=12)),
    frame(wire.pack("write", 3, first_block=0, num_tokens=12), PAGES),
    frame(wire.pack("commit", 4), TOKENS),
    frame(wire.pack("leave", 5)),
]
KIB, MIB = 1 << 10, 1 << 20
FEW = settings(max_examples=60)  # each takes a server and a move
NUM_HELD = 60  # connections, fewer than one address may have
SLACK_KIB = 200  # of a connection without its frame, and of what else this process does


def announced(message_bytes: int, payload_bytes: int) -> bytes:
    """The header of a frame of such lengths, with its checksum."""
    header = struct.pack("!4sH2xIQ", b"HSKV", 1, message_bytes, payload_bytes)
    return header + struct.pack("!I", crc32(header, 0))


@st.composite
def damaged(draw: st.DrawFn, data: bytes) -> bytes:
    """These bytes with a byte changed, the end cut off, or some bytes inserted or removed; never none."""
    at = draw(st.integers(0, len(data) - 1))
    match draw(st.sampled_from(["flip", "cut", "insert", "remove"])):
        case "flip":
            return data[:at] + bytes([data[at] ^ draw(st.integers(1, 255))]) + data[at + 1 :]
        case "cut":
            return data[: max(at, 1)]
        case "insert":
            return data[:at] + draw(st.binary(min_size=1, max_size=40)) + data[at:]
        case _:
            return data[: max(at, 1)] + data[max(at, 1) + draw(st.integers(1, 40)) :]


def one_wrong(wrong: st.SearchStrategy[bytes]) -> st.SearchStrategy[bytes]:
    """A move with wrong bytes in the place of a frame, which may be the last that is sent."""
    places = st.integers(0, len(MOVE) - 1)
    ends = st.integers(1, len(MOVE))
    return st.builds(
        lambda at, bad, end: b"".join([*MOVE[:at], bad, *MOVE[at + 1 : end]]), places, wrong, ends
    )


NO_FRAMES = (
    st.binary(min_size=1, max_size=200)
    | one_wrong(st.sampled_from(MOVE).flatmap(damaged))
    | one_wrong(st.builds(frame, st.binary(max_size=60), st.binary(max_size=40)))
    | one_wrong(st.sampled_from([frame(wire.pack("sing", 1)), frame(wire.pack("write", 2, first_block=-1))]))
    | one_wrong(st.builds(announced, st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)))
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@st.composite
def strange_requests(draw: st.DrawFn) -> bytes:
    """The request of a move with some fields of other values, and tokens that are any numbers."""
    fields: dict[str, Any] = json.loads(OPEN)
    parameters = [field.name for field in dataclasses.fields(Sampling)]
    for part, names in ((fields, sorted(fields)), (fields["sampling"], parameters)):
        for name in draw(st.lists(st.sampled_from([*names, "unknown"]), max_size=2)):
            part[name] = draw(JSON)
    tokens = draw(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=10, max_size=20))
    return frame(json.dumps(fields).encode(), wire.pack_tokens(tokens))


class Damager(SocketBytes):
    """The stream of a client, which ends with a damaged message, the first or a later one."""

    def __init__(self, connected: socket.socket, data: st.DataObject) -> None:
        super().__init__(connected)
        self._data, self._num_whole = data, data.draw(st.integers(0, 1))

    async def send(self, item: bytes | memoryview) -> None:
        if self._num_whole:
            self._num_whole -= 1
            await super().send(item)
        else:
            await super().send(self._data.draw(damaged(bytes(item))))
            await self.send_eof()


def say(client: socket.socket, data: bytes) -> None:
    """Say this and no more."""
    with suppress(BrokenPipeError):
        client.sendall(data)
        client.shutdown(socket.SHUT_WR)


def lines_after(attack: Callable[[socket.socket], Awaitable[object]], engine: RecordingEngine) -> list[str]:
    """Attack an engine's server over a connection, beside a move; returns what the server logged."""
    with logged() as lines:
        anyio.run(beside_a_move, attack, engine)
    return lines


async def beside_a_move(
    attack: Callable[[socket.socket], Awaitable[object]], engine: RecordingEngine
) -> None:
    async with (
        served(engine) as port,
        await connect_tcp("127.0.0.1", port, secret=SECRET) as channel,
        remote_sink(channel, REQUEST) as sink,
    ):
        await sink.reserve(12)
        with stranger(port) as client:
            await attack(client)
            await read_to_end(client)
        await sink.write(KVPages(7, 12, PAGES))
        await sink.commit(REQUEST.tokens)
    assert ("write", 7, 12, PAGES) in engine.heard
    assert engine.num_open == 0, "blocks are still reserved"


# ---------------------------------------------------------------------- TCP


@FEW
@given(st.binary(max_size=200))
def test_bytes_that_are_no_handshake_are_refused(data: bytes) -> None:
    async def attack(client: socket.socket) -> None:
        say(client, data)

    (line,) = lines_after(attack, RecordingEngine())
    assert "was closed in its handshake: " in line


@FEW
@given(st.data())
def test_a_damaged_handshake_is_refused(data: st.DataObject) -> None:
    async def attack(client: socket.socket) -> None:
        with suppress(ProtocolError, anyio.EndOfStream, anyio.BrokenResourceError):
            await authenticate_server(Damager(client, data), SECRET)

    assert len(lines_after(attack, RecordingEngine())) == 1


@FEW
@given(NO_FRAMES)
def test_bytes_that_are_no_frames_break_the_link(data: bytes) -> None:
    async def attack(client: socket.socket) -> None:
        await insider(client)
        say(client, data)

    (line,) = lines_after(attack, RecordingEngine())
    assert "ended early. The link of a move is broken: " in line


@FEW
@given(strange_requests())
def test_a_strange_request_is_served_or_refused(data: bytes) -> None:
    async def attack(client: socket.socket) -> None:
        await insider(client)
        say(client, data + b"".join(MOVE[1:]))

    engine = RecordingEngine()
    lines = lines_after(attack, engine)
    assert len(engine.requests) + len(lines) == 2  # one of them is that of the other move


# ---------------------------------------------------------------------- shared memory


def unsealed(size_bytes: int) -> int:
    """A file of memory that any process which has it can shorten."""
    file = os.memfd_create("hotswap")
    os.ftruncate(file, size_bytes)
    return file


RING = 4 * KIB
HELLO = struct.pack("=4sIQ", b"HSSM", 2, RING)
MAKERS: dict[str, Callable[[], int]] = {
    "ring": lambda: SharedPages.make(RING)[1],
    "small ring": lambda: SharedPages.make(RING // 2)[1],
    "ring that can be shortened": lambda: unsealed(RING),
    "socket": lambda: socket.socket(socket.AF_UNIX).detach(),
    "device": lambda: os.open(os.devnull, os.O_RDWR),
    "directory": lambda: os.open("/", os.O_RDONLY),
}
HELLOS = st.just(HELLO) | damaged(HELLO) | st.binary(max_size=30)
KINDS = st.sampled_from(sorted(MAKERS))
FILES = KINDS.map(lambda kind: ["ring", "ring", kind]) | st.lists(KINDS, max_size=4)
NO_PLACES = st.builds(
    lambda at, size, message: frame(struct.pack("=QQ", at, size) + message),
    st.integers(0, RING) | st.integers(0, 2**64 - 1),
    st.integers(0, RING) | st.integers(0, 2**64 - 1),
    st.just(OPEN) | st.binary(max_size=20),
)


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_a_strange_offer_of_memory_is_refused_and_nothing_of_it_is_kept() -> None:
    @FEW
    @given(HELLOS, FILES, NO_FRAMES | NO_PLACES)
    def attack(hello: bytes, files: list[str], data: bytes) -> None:
        with logged() as lines:
            anyio.run(offer, hello, files, data)
        assert len(lines) == 1

    with nothing_stays():
        attack()


async def offer(hello: bytes, kinds: list[str], data: bytes) -> None:
    """Send a hello, files of these kinds and more bytes to a server where a move is under way."""
    engine = RecordingEngine()
    with tempfile.TemporaryDirectory() as folder, ExitStack() as files:
        path = Path(folder) / "s"
        numbers = [MAKERS[kind]() for kind in kinds]
        for number in numbers:
            files.callback(os.close, number)
        async with (
            served_at(path, engine),
            await connect_shared(path, ring_bytes=1 << 16) as channel,
            remote_sink(channel, REQUEST) as sink,
        ):
            await sink.reserve(12)
            with socket.socket(socket.AF_UNIX) as client:
                client.connect(os.fspath(path))
                socket.send_fds(client, [hello], numbers)
                say(client, data)
                await read_to_end(client)
            await sink.write(KVPages(7, 12, PAGES))
            await sink.commit(REQUEST.tokens)
    assert engine.num_open == 0, "blocks are still reserved"


# ---------------------------------------------------------------------- memory


async def begin_nothing(client: socket.socket) -> None:
    """Say all of a hello but its last byte."""
    client.sendall(b"HSHS\x00\x01" + bytes(63))


async def begin_open(client: socket.socket) -> None:
    """Begin the longest frame that a move may begin with."""
    await insider(client)
    client.sendall(announced(MIB, 2 * MIB))


async def begin_pages(client: socket.socket) -> None:
    """Begin the longest frame of a move, up to its pages."""
    await insider(client)
    client.sendall(MOVE[0])
    await anyio.wait_readable(client)
    message = wire.pack("write", 2, first_block=0, num_tokens=12)
    client.sendall(announced(len(message), 64 * MIB) + message)


async def begin_too_much(client: socket.socket) -> None:
    """Begin a frame that may not be so long."""
    await insider(client)
    client.sendall(announced(2**32 - 1, 2**63))


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
@pytest.mark.parametrize(
    ("begin", "most_kib"),
    [(begin_nothing, 0), (begin_open, KIB), (begin_pages, 0), (begin_too_much, 0)],
)
async def test_a_frame_that_is_announced_takes_memory_for_its_message_alone(
    begin: Callable[[socket.socket], Awaitable[None]], most_kib: int
) -> None:
    async with served(RecordingEngine()) as port:
        async with await connect_tcp("127.0.0.1", port, secret=SECRET) as channel:
            await move(channel)
        gc.collect()
        before = resident_kib()
        with ExitStack() as held:
            for _ in range(NUM_HELD):
                client = held.enter_context(stranger(port))
                await begin(client)
                for _ in range(20):
                    await checkpoint()
            taken_kib = (resident_kib() - before) / NUM_HELD
    assert taken_kib < most_kib + SLACK_KIB


def resident_kib() -> int:
    """The memory of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") // KIB
