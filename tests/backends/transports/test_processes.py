"""A link to a killed process raises at once, and all its resources are released."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import AsyncGenerator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import anyio
import pytest
from anyio import to_thread

from hotswap.abc import Channel
from hotswap.backends.transports import connect_shared, connect_tcp, serve_shared, serve_tcp
from hotswap.errors import MigrationAborted
from tests.backends.transports.child import PAYLOAD
from tests.backends.transports.links import Accepted
from tests.backends.transports.processes import nothing_stays, open_files, run_module, said

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")


def child(kind: str, work: str, where: str) -> AbstractAsyncContextManager[subprocess.Popen[str]]:
    return run_module("child", kind, work, where)


async def expect_end(channel: Channel) -> None:
    async def receive() -> None:
        while True:
            frame = await channel.receive()
            assert frame.payload == bytes([int(frame.message) % 256]) * PAYLOAD, "a damaged frame"

    with pytest.raises(MigrationAborted, match="ended") as raised:
        await receive()
    assert raised.value.stage == "link"


@asynccontextmanager
async def served(kind: str, accepted: Accepted, folder: Path) -> AsyncGenerator[str]:
    """Serve links of a kind; yields the address."""
    async with anyio.create_task_group() as tasks:
        if kind == "tcp":
            yield str(await tasks.start(serve_tcp, accepted.handle, "127.0.0.1"))
        else:
            await tasks.start(serve_shared, accepted.handle, folder / "s")
            yield str(folder / "s")
        tasks.cancel_scope.cancel()


@pytest.mark.parametrize("kind", ["shared", "tcp"])
async def test_a_killed_sender(kind: str, tmp_path: Path) -> None:
    accepted = Accepted()
    await to_thread.run_sync(int)  # the thread pool has its files before they are counted
    with nothing_stays():
        async with (
            served(kind, accepted, tmp_path) as where,
            child(kind, "send", where) as process,
            accepted.channel() as channel,
        ):
            for _ in range(30):
                await channel.receive()
            named = [file for file in open_files(Path(f"/proc/{process.pid}")) if "/dev/shm" in file]
            assert named == [], "files with names outlive their process"
            process.kill()
            await expect_end(channel)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("kind", ["shared", "tcp"])
async def test_a_killed_receiver(kind: str, tmp_path: Path) -> None:
    accepted = Accepted()
    with nothing_stays():
        async with (
            served(kind, accepted, tmp_path) as where,
            child(kind, "receive", where) as process,
            accepted.channel() as channel,
            anyio.create_task_group() as tasks,
        ):
            tasks.start_soon(flood, channel)
            await anyio.wait_all_tasks_blocked()
            process.kill()


@pytest.mark.parametrize("kind", ["shared", "tcp"])
async def test_a_killed_server_that_another_replaces(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "s"
    with nothing_stays():
        for _ in range(2):
            async with child(kind, "send", "serve" if kind == "tcp" else f"serve:{path}") as process:
                at = await said(process)
                async with await (
                    connect_tcp("127.0.0.1", int(at)) if kind == "tcp" else connect_shared(path)
                ) as channel:
                    await channel.receive()
                    process.kill()
                    await expect_end(channel)


async def flood(channel: Channel) -> None:
    async def send() -> None:
        while True:
            await channel.send(b"", memoryview(bytes(PAYLOAD)))

    with pytest.raises(MigrationAborted, match="ended") as raised:
        await send()
    assert raised.value.stage == "link"


async def test_an_address_without_a_server(tmp_path: Path) -> None:
    with nothing_stays():
        with pytest.raises(MigrationAborted, match="cannot be reached"):
            await connect_shared(tmp_path / "nowhere")
        with pytest.raises(MigrationAborted, match="cannot be reached"):
            await connect_tcp("127.0.0.1", 1)
