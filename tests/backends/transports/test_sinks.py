"""A remote sink behaves like a local one, and a broken link leaves nothing reserved."""

from __future__ import annotations

import socket
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager, suppress
from random import Random
from typing import Any

import anyio
import pytest
from anyio.abc import SocketAttribute, TaskGroup, TaskStatus
from anyio.lowlevel import checkpoint
from hypothesis import given
from hypothesis import strategies as st

from hotswap import ModelId, Request, RequestId
from hotswap.abc import Channel, KVPages
from hotswap.backends.transports import (
    StreamChannel,
    connect_tcp,
    memory_channels,
    remote_sink,
    serve_sink,
    serve_tcp,
    wire,
)
from hotswap.backends.transports.frames import frame_pieces
from hotswap.backends.transports.link_errors import ProtocolError
from hotswap.backends.transports.sockets import SocketBytes
from hotswap.errors import HotswapError, InstanceLost, MigrationAborted, UnknownAdapter
from hotswap.offline.virtual_time import run
from hotswap.testing import cancel_everywhere
from tests.backends.transports.links import LINKS
from tests.backends.transports.recording import LAYOUT, RecordingEngine

REQUEST = Request(id=RequestId("r"), model=ModelId("m"), prompt=tuple(range(40)), generated=(7, 8))
BLOCK = LAYOUT.block_bytes
HELLO_BYTES = 70  # of a client, before its first frame


def pages(first_block: int, num_blocks: int, *, seed: int = 0) -> KVPages:
    data = memoryview(bytearray(Random(seed).randbytes(num_blocks * BLOCK)))
    return KVPages(first_block, num_blocks * LAYOUT.block_tokens, data)


async def move(channel: Channel) -> None:
    async with remote_sink(channel, REQUEST) as sink:
        await sink.reserve(30)
        await sink.write(pages(0, 5))
        await sink.write(pages(5, 2))
        await sink.commit(REQUEST.tokens)


MOVED = [
    ("open",),
    ("reserve", 30),
    ("write", 0, 20, bytes(pages(0, 5).data)),
    ("write", 5, 8, bytes(pages(5, 2).data)),
    ("commit", REQUEST.tokens),
]


@asynccontextmanager
async def served(engine: RecordingEngine, kind: str = "memory") -> AsyncGenerator[Channel]:
    """One end of a link whose other end imports blocks into an engine."""
    async with anyio.create_task_group() as tasks, LINKS[kind]() as (near, far):
        tasks.start_soon(serve_sink, engine, far)
        yield near
        await near.aclose()


@pytest.mark.parametrize("kind", LINKS)
async def test_moves_arrive_one_after_another(kind: str) -> None:
    engine = RecordingEngine(num_present_blocks=2)
    async with served(engine, kind) as channel:
        for _ in range(3):
            async with remote_sink(channel, REQUEST) as sink:
                assert sink.layout == LAYOUT
                assert sink.num_present_blocks == 2
                assert engine.num_open == 1
            assert engine.num_open == 0
        engine.heard.clear()
        await move(channel)
        assert engine.num_open == 0
    assert engine.heard == MOVED
    assert engine.requests == [REQUEST] * 4


async def test_no_pages_are_written_too() -> None:
    async with served(engine := RecordingEngine()) as channel, remote_sink(channel, REQUEST) as sink:
        await sink.write(KVPages(0, 0, memoryview(bytearray())))
    assert engine.heard == [("open",), ("write", 0, 0, b"")]


async def test_pages_are_split_to_fit_the_channel() -> None:
    engine = RecordingEngine()
    near, far = memory_channels(max_payload_bytes=3 * BLOCK)
    whole = KVPages(4, 7 * LAYOUT.block_tokens - 1, pages(4, 7).data)
    async with near, far, anyio.create_task_group() as tasks:
        tasks.start_soon(serve_sink, engine, far)
        async with remote_sink(near, REQUEST) as sink:
            await sink.write(whole)
        await near.aclose()
    assert [heard[1:3] for heard in engine.heard[1:]] == [(4, 12), (7, 12), (10, 3)]
    assert b"".join(heard[3] for heard in engine.heard[1:]) == whole.data  # type: ignore[misc]


@pytest.mark.parametrize("kind", LINKS)
@pytest.mark.parametrize("verb", ["open", "reserve", "write", "commit"])
async def test_errors_arrive_unchanged_and_the_link_stays_open(kind: str, verb: str) -> None:
    async with served(engine := RecordingEngine(), kind) as channel:
        for error in (MigrationAborted("no room", stage="reserve"), InstanceLost("it is gone")):
            engine.fail[verb] = error
            with pytest.raises(type(error)) as raised:
                await move(channel)
            assert str(raised.value) == str(error)
            assert getattr(raised.value, "stage", None) == getattr(error, "stage", None)
            assert engine.num_open == 0
        engine.fail[verb] = UnknownAdapter("no such adapter")
        with pytest.raises(MigrationAborted, match="no such adapter") as aborted:
            await move(channel)
        assert aborted.value.stage == verb
        engine.fail.clear()
        await move(channel)
        assert engine.heard[-len(MOVED) :] == MOVED


@pytest.mark.parametrize("kind", LINKS)
async def test_a_move_that_fails_at_this_end_is_left_at_the_other(kind: str) -> None:
    async with served(engine := RecordingEngine(), kind) as channel:
        with suppress(KeyError):
            async with remote_sink(channel, REQUEST) as sink:
                await sink.reserve(4)
                raise KeyError
        assert engine.num_open == 0
        await move(channel)


@pytest.mark.parametrize("kind", LINKS)
async def test_a_broken_link_frees_the_reserved_blocks(kind: str) -> None:
    engine = RecordingEngine()
    async with LINKS[kind]() as (near, far), anyio.create_task_group() as tasks:

        async def serve() -> None:
            with pytest.raises(MigrationAborted) as raised:
                await serve_sink(engine, far)
            assert raised.value.stage == "link"
            assert engine.num_open == 0

        tasks.start_soon(serve)
        async with remote_sink(near, REQUEST) as sink:
            await near.aclose()
            with pytest.raises(MigrationAborted) as raised:
                await sink.reserve(5)
        assert raised.value.stage == "link"


@pytest.mark.parametrize("kind", LINKS)
async def test_a_link_that_breaks_at_the_other_end_raises_at_this_one(kind: str) -> None:
    async with LINKS[kind]() as (near, far), anyio.create_task_group() as tasks:
        tasks.start_soon(serve_sink, engine := RecordingEngine(), far)
        async with remote_sink(near, REQUEST) as sink:
            tasks.cancel_scope.cancel()
            with anyio.CancelScope(shield=True), pytest.raises(MigrationAborted) as raised:
                await sink.reserve(5)
        assert raised.value.stage == "link"
    assert engine.num_open == 0


def test_silence_during_a_move_frees_the_reserved_blocks() -> None:
    engine = RecordingEngine()

    async def silent() -> None:
        near, far = memory_channels()
        async with near, far, anyio.create_task_group() as tasks:
            tasks.start_soon(in_vain, far)
            async with remote_sink(near, REQUEST) as sink:
                await anyio.sleep(11)
                assert engine.num_open == 0
                with pytest.raises(MigrationAborted, match="link"):
                    await sink.reserve(5)

    async def in_vain(far: Channel) -> None:
        with pytest.raises(MigrationAborted, match="sent nothing for 10 s"):
            await serve_sink(engine, far, silence_s=10)

    run(silent)


def test_silence_between_moves_is_allowed() -> None:
    async def patient() -> None:
        async with served(engine := RecordingEngine()) as channel:
            await move(channel)
            await anyio.sleep(3600)
            await move(channel)
        assert engine.heard == 2 * MOVED

    run(patient)


def test_an_answer_that_takes_too_long_breaks_the_link() -> None:
    async def mute() -> None:
        near, far = memory_channels()
        async with near, far:
            with pytest.raises(MigrationAborted, match="did not answer 'open' within 5 s"):
                async with remote_sink(near, REQUEST, answer_s=5):
                    pass
            with pytest.raises(MigrationAborted):
                await far.receive()

    run(mute)


def test_a_move_that_is_cancelled_anywhere_leaves_nothing() -> None:
    engine = RecordingEngine()

    async def cancelled(tasks: TaskGroup) -> None:
        near, far = memory_channels()

        async def serve() -> None:
            with suppress(MigrationAborted):
                await serve_sink(engine, far)

        async def twice() -> None:
            await move(near)
            await move(near)

        async def check() -> None:
            nonlocal near, far
            assert engine.num_open == 0 or await closed(near)
            while engine.num_open:
                await checkpoint()
            if await closed(near):
                near, far = memory_channels()
                tasks.start_soon(serve)
            await move(near)
            assert engine.heard[-len(MOVED) :] == MOVED

        tasks.start_soon(serve)
        assert await cancel_everywhere(twice, check) > 20
        await near.aclose()

    async def in_tasks() -> None:
        async with anyio.create_task_group() as tasks:
            await cancelled(tasks)

    run(in_tasks)


async def closed(channel: Channel) -> bool:
    with anyio.move_on_after(0.001):
        try:
            await channel.receive()
        except MigrationAborted:
            return True
    return False


STRANGE = [
    wire.pack("sing", 1),
    wire.pack("reserve", 2, num_tokens=-1),
    wire.pack("write", 2, first_block=0),
    wire.pack("open", 1, id="r"),
]


@given(st.binary(max_size=60) | st.sampled_from(STRANGE), st.binary(max_size=30), st.booleans())
def test_garbage_in_whole_frames_ends_the_link(message: bytes, payload: bytes, in_a_move: bool) -> None:
    async def garbage() -> None:
        near, far = memory_channels()
        engine = RecordingEngine()
        async with near, far, anyio.create_task_group() as tasks:
            tasks.start_soon(refuse, engine, far)
            if in_a_move:
                with suppress(MigrationAborted):
                    async with remote_sink(near, REQUEST):
                        await near.send(message, memoryview(payload))
            else:
                await near.send(message, memoryview(payload))
        assert engine.num_open == 0

    async def refuse(engine: RecordingEngine, far: Channel) -> None:
        with pytest.raises(
            MigrationAborted,
            match=r"is broken: (a message cannot be read|the first call|'.*' is no method|\d+ bytes)",
        ):
            await serve_sink(engine, far)
        with pytest.raises(MigrationAborted, match="closed"):
            await far.receive()

    run(garbage)


@pytest.mark.parametrize(
    "answer",
    [b"", wire.pack("done", 7), wire.pack("done", 1), wire.pack("aborted", 1), wire.pack("sing", 1)],
)
def test_an_answer_that_is_none_ends_the_link(answer: bytes) -> None:
    async def strange() -> None:
        near, far = memory_channels()
        async with near, far:
            await far.send(answer)
            with pytest.raises(
                MigrationAborted, match=r"is broken: (a message cannot be read|the other end answered)"
            ):
                async with remote_sink(near, REQUEST):
                    pass
            with pytest.raises(MigrationAborted, match="closed"):
                await near.receive()

    run(strange)


# ---------------------------------------------------------------------- damaged bytes


@asynccontextmanager
async def damaged_link(
    engine: RecordingEngine, damage: Callable[[int, bytes], bytes | None]
) -> AsyncGenerator[tuple[Channel, list[HotswapError]]]:
    """A TCP link through a proxy that changes the bytes to the engine; `None` closes it."""
    errors: list[HotswapError] = []

    async def serve(channel: Channel) -> None:
        try:
            await serve_sink(engine, channel)
        except MigrationAborted as exc:
            errors.append(exc)

    async def between(near: Any) -> None:
        async with near, await anyio.connect_tcp("127.0.0.1", port) as far, anyio.create_task_group() as both:
            both.start_soon(pass_on, near, far, damage)
            await pass_on(far, near, lambda at, data: data)

    async def pass_on(source: Any, target: Any, change: Callable[[int, bytes], bytes | None]) -> None:
        at = -HELLO_BYTES
        with suppress(anyio.EndOfStream, anyio.BrokenResourceError, anyio.ClosedResourceError):
            while (data := change(at, await source.receive())) is not None:
                await target.send(data)
                at += len(data)
        await source.aclose()
        await target.aclose()

    async def stand_between(*, task_status: TaskStatus[int]) -> None:
        async with await anyio.create_tcp_listener(local_host="127.0.0.1") as listener:
            task_status.started(listener.extra(SocketAttribute.local_port))
            await listener.serve(between)

    async with anyio.create_task_group() as tasks:
        port = await tasks.start(serve_tcp, serve, "127.0.0.1")
        middle = await tasks.start(stand_between)
        async with await connect_tcp("127.0.0.1", middle, stall_s=5) as channel:
            yield channel, errors
        while engine.num_open:
            await checkpoint()
        tasks.cancel_scope.cancel()


def flip(position: int) -> Callable[[int, bytes], bytes]:
    def damage(at: int, data: bytes) -> bytes:
        if at <= position < at + len(data):
            changed = bytearray(data)
            changed[position - at] ^= 0x10
            return bytes(changed)
        return data

    return damage


def cut(position: int) -> Callable[[int, bytes], bytes | None]:
    return lambda at, data: None if at <= position < at + len(data) else data


@pytest.mark.parametrize("damage", [flip, cut])
@pytest.mark.parametrize("position", [0, 5, 12, 21, 30, 400, 900, 1100, 1200, 2000, 4000, 4190])
async def test_damaged_pages_are_never_written(
    damage: Callable[[int], Callable[[int, bytes], bytes | None]], position: int
) -> None:
    engine = RecordingEngine()
    async with damaged_link(engine, damage(position)) as (channel, errors):
        with pytest.raises(MigrationAborted) as raised:
            await move(channel)
        assert raised.value.stage == "link"
        while engine.num_open:
            await checkpoint()
    assert engine.heard == MOVED[: len(engine.heard)], "damage came through"
    assert len(engine.heard) < len(MOVED)
    assert all(isinstance(error, MigrationAborted) for error in errors)


async def test_an_undamaged_link_through_the_same_proxy() -> None:
    engine = RecordingEngine()
    async with damaged_link(engine, lambda at, data: data) as (channel, errors):
        await move(channel)
    assert engine.heard == MOVED
    assert errors == []


# ---------------------------------------------------------------------- frames that are too long


@pytest.mark.parametrize("kind", LINKS)
async def test_a_request_that_is_too_long_is_refused_before_it_is_read(kind: str) -> None:
    tokens = wire.pack_tokens(range(9))
    engine = RecordingEngine()
    async with LINKS[kind]() as (near, far), anyio.create_task_group() as tasks:
        tasks.start_soon(refuse_long, engine, far, "72 bytes was received; the limits are .* and 64")
        await near.send(wire.pack("open", 1, **wire.request_fields(REQUEST)), tokens)
    assert engine.heard == []


@pytest.mark.parametrize("kind", LINKS)
async def test_a_commit_of_more_tokens_than_a_request_may_have_is_refused(kind: str) -> None:
    engine = RecordingEngine()
    request = Request(id=RequestId("r"), model=ModelId("m"), prompt=(1,))
    async with LINKS[kind]() as (near, far), anyio.create_task_group() as tasks:
        tasks.start_soon(refuse_long, engine, far, "72 bytes of tokens are over 8 tokens")
        with pytest.raises(MigrationAborted):
            async with remote_sink(near, request) as sink:
                await sink.commit(range(9))
    assert engine.heard == [("open",)]
    assert engine.num_open == 0


@pytest.mark.parametrize("kind", LINKS)
async def test_a_call_with_a_long_message_is_refused(kind: str) -> None:
    engine = RecordingEngine()
    async with LINKS[kind]() as (near, far), anyio.create_task_group() as tasks:
        tasks.start_soon(refuse_long, engine, far, "the limits are")
        request = Request(id=RequestId("r"), model=ModelId("m"), prompt=(1,))
        with suppress(MigrationAborted):
            async with remote_sink(near, request):
                await near.send(wire.pack("reserve", 2, num_tokens=1, padding="x" * 10_000))
    assert engine.heard == [("open",)]


async def refuse_long(engine: RecordingEngine, far: Channel, reason: str) -> None:
    with pytest.raises(MigrationAborted, match=reason):
        await serve_sink(engine, far, max_tokens=8)


async def test_an_open_of_61_mib_is_refused_by_its_header() -> None:
    """The rest is never sent: a server that waited for it would wait for ever."""
    message, payload = wire.pack("open", 1, **wire.request_fields(REQUEST)), memoryview(bytes(61 << 20))
    near, far = socket.socketpair()
    near.sendall(next(iter(frame_pieces(message, payload))))
    far.setblocking(False)
    with near:
        async with StreamChannel(SocketBytes(far)) as channel:
            with pytest.raises(MigrationAborted, match="63,963,136 bytes was received"):
                await serve_sink(engine := RecordingEngine(), channel)
        assert near.recv(1) == b""
    assert engine.heard == []


def test_a_long_request_is_decoded_in_many_turns_of_the_event_loop() -> None:
    engine, turns = RecordingEngine(), 0

    async def count_turns() -> None:
        nonlocal turns
        while not engine.requests:
            await checkpoint()
            turns += 1

    async def long_move() -> None:
        request = Request(id=RequestId("r"), model=ModelId("m"), prompt=tuple(range(1 << 18)))
        async with served(engine) as channel, anyio.create_task_group() as tasks:
            tasks.start_soon(count_turns)
            async with remote_sink(channel, request):
                assert engine.requests == [request]

    run(long_move)
    assert turns > 16


def test_json_with_countless_lists_is_refused_before_it_is_parsed() -> None:
    bomb = b'{"version":4,"verb":"open","number":1,"a":[' + b"[]," * 100_000 + b"[]]}"
    with pytest.raises(ProtocolError, match="brackets"):
        wire.unpack(bomb)
