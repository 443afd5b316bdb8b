"""A server keeps listening, whatever its clients do."""

from __future__ import annotations

import os
import resource
import socket
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import anyio
import pytest
from anyio.abc import TaskStatus
from anyio.lowlevel import checkpoint

from hotswap.abc import Channel
from hotswap.backends.transports import LinkSecret, connect_shared, connect_tcp, serve_shared, serve_tcp
from hotswap.errors import ConfigError, InstanceLost, MigrationAborted
from tests.backends.transports.strangers import read_to_end

KINDS = pytest.mark.parametrize("kind", ["shared", "tcp"])
FILES = "/proc/self/fd"


class Server:
    """Echoes every message, unless it has `errors` to raise."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.errors: list[Exception] = []
        self._kind, self._path, self._port = kind, folder / "s", 0

    async def handle(self, channel: Channel) -> None:
        message = (await channel.receive()).message
        if self.errors:
            raise self.errors.pop()
        await channel.send(message)

    @asynccontextmanager
    async def serving(self) -> AsyncGenerator[None]:
        async with anyio.create_task_group() as tasks:
            if self._kind == "tcp":
                self._port = await tasks.start(serve_tcp, self.handle, "127.0.0.1")
            else:
                await tasks.start(serve_shared, self.handle, self._path)
            yield
            tasks.cancel_scope.cancel()

    async def connected(self) -> Channel:
        if self._kind == "tcp":
            return await connect_tcp("127.0.0.1", self._port)
        return await connect_shared(self._path, ring_bytes=1 << 16)

    def connected_by_hand(self) -> socket.socket:
        if self._kind == "tcp":
            return socket.create_connection(("127.0.0.1", self._port))
        connected = socket.socket(socket.AF_UNIX)
        connected.connect(os.fspath(self._path))
        return connected

    async def answers(self) -> bool:
        async with await self.connected() as channel:
            await channel.send(b"hello")
            return (await channel.receive()).message == b"hello"


@KINDS
@pytest.mark.parametrize(
    "error",
    [
        MigrationAborted("no room", stage="reserve"),
        InstanceLost("gone"),
        ExceptionGroup("of tasks", [MigrationAborted("no room", stage="reserve")]),
    ],
)
async def test_a_handler_that_fails_affects_no_other(
    kind: str, error: Exception, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server = Server(kind, tmp_path)
    async with server.serving():
        server.errors.append(error)
        with pytest.raises(MigrationAborted, match="closed"):
            await server.answers()
        assert await server.answers()
    assert "ended early" in caplog.text


@KINDS
@pytest.mark.parametrize("hello", [b"", b"GET / HTTP/1.1\r\n\r\n" + bytes(100)])
async def test_clients_of_another_protocol_are_disconnected(kind: str, hello: bytes, tmp_path: Path) -> None:
    server = Server(kind, tmp_path)
    async with server.serving():
        with server.connected_by_hand() as stranger:
            stranger.sendall(hello)
            stranger.shutdown(socket.SHUT_WR)
            await read_to_end(stranger)
        assert await server.answers()


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
@KINDS
async def test_too_many_open_files_are_a_pause(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server = Server(kind, tmp_path)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    async with server.serving():
        with server.connected_by_hand():
            # The connection is accepted when this task waits; no descriptor is free then.
            fillers: list[int] = []
            try:
                resource.setrlimit(resource.RLIMIT_NOFILE, (1 + max(map(int, os.listdir(FILES))), hard))
                with suppress(OSError):
                    while True:
                        fillers.append(os.dup(0))
                while "not accepted" not in caplog.text:
                    await checkpoint()
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
                for filler in fillers:
                    os.close(filler)
        assert await server.answers()


async def test_a_path_is_taken_over_and_kept(tmp_path: Path) -> None:
    first, second = Server("shared", tmp_path), Server("shared", tmp_path)
    first_scope, first_ended = anyio.CancelScope(), anyio.Event()

    async def serve_first(*, task_status: TaskStatus[None]) -> None:
        with first_scope:
            async with first.serving():
                task_status.started()
                await anyio.sleep_forever()
        first_ended.set()

    async with anyio.create_task_group() as tasks:
        await tasks.start(serve_first)
        async with second.serving():
            first_scope.cancel()
            await first_ended.wait()
            assert await second.answers(), "the first has removed the path of the second"
    assert os.listdir(tmp_path) == []


async def test_a_path_that_is_no_socket_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "s").write_text("precious")
    with pytest.raises(ConfigError, match=r"in use.*choose another path"):
        await serve_shared(Server("shared", tmp_path).handle, tmp_path / "s")
    assert (tmp_path / "s").read_text() == "precious"


async def test_a_path_that_is_too_long_is_refused_with_what_is_possible(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"too long.*107 bytes"):
        await serve_shared(Server("shared", tmp_path).handle, tmp_path / ("s" * 120))


async def test_a_port_in_use_is_refused_with_what_to_do(tmp_path: Path) -> None:
    handle = Server("tcp", tmp_path).handle
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"Port {port} .*in use.*port 0 takes a free one"):
            await serve_tcp(handle, "127.0.0.1", port)


async def test_an_address_of_another_machine_is_refused_with_what_to_do(tmp_path: Path) -> None:
    secret = LinkSecret(b"a secret of the tests alone")
    with pytest.raises(ConfigError, match=r"'192\.0\.2\.1' cannot be listened at"):
        await serve_tcp(Server("tcp", tmp_path).handle, "192.0.2.1", secret=secret)
