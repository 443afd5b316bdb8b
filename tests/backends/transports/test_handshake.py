"""Without the secret of a link nothing is written to an engine, and nothing is told to an impostor."""

from __future__ import annotations

import socket
import ssl
import traceback
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any

import anyio
import pytest
from anyio.abc import TaskStatus
from anyio.lowlevel import checkpoint
from hypothesis import given
from hypothesis import strategies as st

from hotswap.abc import Channel
from hotswap.backends.transports import LinkLimits, LinkSecret, connect_tcp, serve_sink, serve_tcp, wire
from hotswap.backends.transports.handshake import authenticate_client, authenticate_server
from hotswap.backends.transports.link_errors import ProtocolError
from hotswap.backends.transports.sockets import SocketBytes
from hotswap.errors import ConfigError, MigrationAborted
from hotswap.testing.cancel import cancel_at
from tests.backends.transports.certificates import contexts
from tests.backends.transports.links import SECRET
from tests.backends.transports.recording import RecordingEngine
from tests.backends.transports.strangers import (
    PAGES,
    REQUEST,
    frame,
    logged,
    move,
    read_to_end,
    served,
    stranger,
)

OTHER = LinkSecret(b"another secret, of 32 bytes and more")
SMALL = 100  # bytes of any handshake


async def expect_no_link(port: int, reason: str, secret: LinkSecret | None) -> str:
    """Connect in vain; returns all that the error and its causes say."""
    with pytest.raises(MigrationAborted, match=reason) as refused:
        await connect_tcp("127.0.0.1", port, secret=secret)
    assert refused.value.stage == "link"
    return "".join(traceback.format_exception(refused.value))


# ---------------------------------------------------------------------- the secret


def test_a_secret_is_not_shown() -> None:
    assert repr(SECRET) == "LinkSecret()"
    assert SECRET.key.decode() not in f"{SECRET} {SECRET!r} {[SECRET]} {partial(serve_tcp, secret=SECRET)}"


@pytest.mark.parametrize("key", [b"", b"fifteen bytes..", "text, which is no bytes"])
def test_a_secret_that_is_short_or_no_bytes_is_refused_and_not_shown(key: bytes | str) -> None:
    with pytest.raises(ConfigError, match=r"token_hex\(32\)") as refused:
        LinkSecret(key)  # type: ignore[arg-type]
    assert not key or str(key) not in str(refused.value)


async def test_what_is_no_secret_is_refused_before_a_connection_and_not_shown() -> None:
    wrong: Any = SECRET.key
    for opening in (
        connect_tcp("127.0.0.1", 1, secret=wrong),
        serve_tcp(partial(serve_sink, RecordingEngine()), "127.0.0.1", secret=wrong),
    ):
        with anyio.fail_after(5), pytest.raises(ConfigError, match="give secret=LinkSecret") as refused:
            await opening
        assert SECRET.key.decode() not in str(refused.value)


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
async def test_without_a_secret_a_server_listens_on_loopback_alone(host: str) -> None:
    with pytest.raises(ConfigError, match=r"secret=LinkSecret.*listen on '127\.0\.0\.1'"):
        await serve_tcp(RecordingEngine().import_kv, host)  # type: ignore[arg-type]


async def test_with_a_secret_a_server_listens_anywhere() -> None:
    engine = RecordingEngine()
    async with anyio.create_task_group() as tasks:
        port = await tasks.start(partial(serve_tcp, secret=SECRET), partial(serve_sink, engine), "0.0.0.0")
        async with await connect_tcp("127.0.0.1", port, secret=SECRET) as channel:
            await move(channel)
        tasks.cancel_scope.cancel()
    assert [heard[0] for heard in engine.heard] == ["open", "reserve", "write", "commit"]


# ---------------------------------------------------------------------- other secrets


@pytest.mark.parametrize(
    ("client", "server", "told", "log"),
    [
        (OTHER, SECRET, "give both ends the same secret", "did not prove that it has the secret"),
        (None, SECRET, "give connect_tcp the secret of the server", "closed in its handshake"),
        (SECRET, None, "give serve_tcp the same", "closed in its handshake"),
    ],
)
async def test_ends_with_different_secrets_get_no_link(
    client: LinkSecret | None, server: LinkSecret | None, told: str, log: str
) -> None:
    engine = RecordingEngine()
    with logged() as lines:
        async with served(engine, secret=server) as port:
            text = await expect_no_link(port, told, client)
            while not lines:
                await checkpoint()
            async with await connect_tcp("127.0.0.1", port, secret=server) as channel:
                await move(channel)
    assert log in lines[0]
    assert len(engine.requests) == 1
    for key in (SECRET.key, OTHER.key):
        assert key.decode() not in text + "".join(lines)


@asynccontextmanager
async def impostor(*says: bytes) -> AsyncGenerator[tuple[int, list[bytes]]]:
    """A server without the secret, that says one thing after the other; yields its port and what it heard."""
    heard: list[bytes] = []

    async def serve(*, task_status: TaskStatus[int]) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            task_status.started(listener.getsockname()[1])
            await anyio.wait_readable(listener)
            connected, _ = listener.accept()
        with connected:
            connected.setblocking(False)
            for said in says:
                connected.sendall(said)
                with suppress(anyio.EndOfStream):
                    heard.append(await SocketBytes(connected).receive())

    async with anyio.create_task_group() as tasks:
        yield await tasks.start(serve), heard


async def recorded() -> tuple[list[bytes], list[bytes]]:
    """What a client and a server with the secret say to each other, in turn."""
    said: tuple[list[bytes], list[bytes]] = [], []
    near, far = socket.socketpair()
    for end in (near, far):
        end.setblocking(False)

    class Recorder(SocketBytes):
        def __init__(self, connected: socket.socket, by: int) -> None:
            super().__init__(connected)
            self.by = by

        async def send(self, item: bytes | memoryview) -> None:
            said[self.by].append(bytes(item))
            await super().send(item)

    async with Recorder(near, 0) as client, Recorder(far, 1) as server, anyio.create_task_group() as tasks:
        tasks.start_soon(authenticate_client, server, SECRET)
        await authenticate_server(client, SECRET)
    return said


async def test_a_server_that_replays_a_recorded_handshake_gets_no_frame() -> None:
    _, server = await recorded()
    async with impostor(*server) as (port, heard):
        await expect_no_link(port, "did not prove", SECRET)
    assert sum(map(len, heard)) < SMALL, "more than a handshake was sent to an impostor"


async def test_a_client_that_replays_a_recorded_hello_is_refused() -> None:
    hello = b"".join((await recorded())[0])
    engine = RecordingEngine()
    with logged() as lines:
        async with served(engine) as port:
            with stranger(port) as client:
                client.sendall(hello + frame(wire.pack("open", 1, **wire.request_fields(REQUEST))))
                assert len(await read_to_end(client)) < SMALL
    assert engine.heard == []
    assert "did not prove that it has the secret" in lines[0]


async def test_proofs_differ_by_connection_and_by_direction() -> None:
    conversations = [await recorded() for _ in range(2)]
    proofs = {proof for (*_, hello), (_, welcome) in conversations for proof in (hello[-32:], welcome)}
    assert len(proofs) == 4
    assert not any(SECRET.key in said for sides in conversations for side in sides for said in side)


async def test_a_block_planted_without_the_secret_is_not_written() -> None:
    engine = RecordingEngine()
    planted = [
        frame(wire.pack("open", 1, **wire.request_fields(REQUEST)), wire.pack_tokens(REQUEST.tokens)),
        frame(wire.pack("reserve", 2, num_tokens=12)),
        frame(wire.pack("write", 3, first_block=0, num_tokens=12), PAGES),
        frame(wire.pack("commit", 4), wire.pack_tokens(REQUEST.tokens)),
    ]
    with logged() as lines:
        async with served(engine) as port:
            with stranger(port) as client:
                client.sendall(b"".join(planted))
                assert len(await read_to_end(client)) < SMALL
            async with await connect_tcp("127.0.0.1", port, secret=SECRET) as channel:
                await move(channel)
    assert len(engine.requests) == 1, "the planted request was taken"
    assert "in the place of a handshake" in lines[0]


async def test_a_handshake_that_is_cancelled_anywhere_closes_its_connection() -> None:
    engine, number, cancelled = RecordingEngine(), 0, True
    channels: list[Channel] = []
    async with served(engine) as port:

        async def connect() -> None:
            channels.append(await connect_tcp("127.0.0.1", port, secret=SECRET))

        while cancelled:
            number += 1
            cancelled = await cancel_at(number, connect)
        for channel in channels:
            await channel.aclose()
        async with await connect_tcp("127.0.0.1", port, secret=SECRET) as channel:
            await move(channel)
    assert number > 3


@given(st.binary(max_size=SMALL), st.binary(max_size=SMALL))
def test_no_bytes_are_a_proof(hello: bytes, answer: bytes) -> None:
    async def try_both() -> None:
        for ask, said in ((authenticate_client, hello), (authenticate_server, answer)):
            near, far = socket.socketpair()
            with near:
                near.sendall(said)
                near.shutdown(socket.SHUT_WR)
                far.setblocking(False)
                async with SocketBytes(far) as stream:
                    with pytest.raises((ProtocolError, anyio.EndOfStream, anyio.BrokenResourceError)):
                        await ask(stream, SECRET)

    anyio.run(try_both)


# ---------------------------------------------------------------------- TLS


async def test_tls_needs_a_certificate_that_the_client_trusts() -> None:
    server, client = contexts()
    _, other = contexts("127.0.0.2")
    engine = RecordingEngine()
    with logged() as lines:
        async with anyio.create_task_group() as tasks:
            serve = partial(serve_tcp, secret=SECRET, ssl_context=server)
            port = await tasks.start(serve, partial(serve_sink, engine), "127.0.0.1")
            for context in (other, ssl.create_default_context()):
                with pytest.raises(MigrationAborted, match="TLS failed"):
                    await connect_tcp("127.0.0.1", port, secret=SECRET, ssl_context=context)
            with stranger(port) as plain:
                plain.sendall(frame(wire.pack("open", 1)))
                await read_to_end(plain)
            while len(lines) < 3:
                await checkpoint()
            async with await connect_tcp("127.0.0.1", port, secret=SECRET, ssl_context=client) as channel:
                await move(channel)
            tasks.cancel_scope.cancel()
    assert all("closed in its handshake" in line for line in lines)
    assert len(engine.requests) == 1


async def test_tls_with_another_secret_gets_no_link() -> None:
    server, client = contexts()
    engine = RecordingEngine()
    async with anyio.create_task_group() as tasks:
        serve = partial(serve_tcp, secret=SECRET, ssl_context=server)
        port = await tasks.start(serve, partial(serve_sink, engine), "127.0.0.1")
        with pytest.raises(MigrationAborted, match="give both ends the same secret"):
            await connect_tcp("127.0.0.1", port, secret=OTHER, ssl_context=client)
        tasks.cancel_scope.cancel()
    assert engine.heard == []


async def test_a_server_without_tls_gives_no_link_to_a_client_with_it() -> None:
    _, client = contexts()
    with logged() as lines:
        async with served(RecordingEngine()) as port:
            with pytest.raises(MigrationAborted, match="TLS failed"):
                await connect_tcp("127.0.0.1", port, secret=SECRET, ssl_context=client)
            while not lines:
                await checkpoint()
    assert "speaks TLS, and this end does not: give serve_tcp an `ssl_context`" in lines[0]


@pytest.mark.parametrize("secret", [SECRET, None])
async def test_a_client_without_tls_is_told_that_the_server_has_it(secret: LinkSecret | None) -> None:
    """At once: neither end has a limit of time that ends in this test."""
    server, _ = contexts()
    never = LinkLimits(handshake_s=3600)
    async with anyio.create_task_group() as tasks:
        serve = partial(serve_tcp, secret=secret, ssl_context=server, limits=never)
        port = await tasks.start(serve, partial(serve_sink, RecordingEngine()), "127.0.0.1")
        with pytest.raises(MigrationAborted, match="and this end does not: give connect_tcp an"):
            await connect_tcp("127.0.0.1", port, secret=secret, stall_s=3600)
        tasks.cancel_scope.cancel()
