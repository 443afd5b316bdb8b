"""Connections that do nothing cost a server little, and those that work go on beside them."""

from __future__ import annotations

import os
import resource
import socket
import subprocess
import sys
from collections.abc import AsyncGenerator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path

import anyio
import pytest
from anyio import to_thread
from anyio.lowlevel import checkpoint
from hypothesis import given
from hypothesis import strategies as st

from hotswap.backends.transports import LinkLimits, connect_tcp, remote_sink
from hotswap.backends.transports.connections import Connection, Connections
from hotswap.backends.transports.link_log import LinkLog
from hotswap.backends.transports.sockets import SocketBytes
from hotswap.errors import ConfigError, MigrationAborted
from hotswap.offline.virtual_time import run
from tests.backends.transports.links import SECRET
from tests.backends.transports.recording import RecordingEngine
from tests.backends.transports.strangers import (
    REQUEST,
    insider,
    logged,
    move,
    read_to_end,
    served,
    stranger,
)

ROOT = Path(__file__).parents[3]
FILES = "/proc/self/fd"
FLOOD = 5000


@asynccontextmanager
async def flood(port: int, number: int, num_addresses: int) -> AsyncGenerator[None]:
    """Hold connections of another process that say nothing."""
    process = subprocess.Popen(  # noqa: ASYNC220  # to start one takes a moment only
        [sys.executable, "-m", "tests.backends.transports.flood", *map(str, (port, number, num_addresses))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    try:
        assert process.stdout is not None
        assert await to_thread.run_sync(process.stdout.readline) == f"{number}\n"
        yield
    finally:
        process.kill()
        with anyio.CancelScope(shield=True):
            await to_thread.run_sync(process.communicate)


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc, and has one address for loopback")
@pytest.mark.skipif(
    -1 < resource.getrlimit(resource.RLIMIT_NOFILE)[1] < FLOOD + 100,
    reason="a process may not open so many files here",
)
@pytest.mark.parametrize(("number", "num_addresses", "most"), [(FLOOD, 1, 64), (1000, 100, 256)])
async def test_thousands_of_idle_connections_are_closed_and_moves_go_on(
    number: int, num_addresses: int, most: int
) -> None:
    engine, num_moves, most_files = RecordingEngine(), 0, 0
    with logged() as lines:
        async with served(engine) as port, anyio.create_task_group() as tasks:

            async def move_on() -> None:
                nonlocal num_moves, most_files
                async with await connect_tcp("127.0.0.1", port, secret=SECRET) as channel:
                    while True:
                        await move(channel)
                        num_moves += 1
                        await anyio.sleep(0.02)  # leaves the processor to the flood
                        most_files = max(most_files, len(os.listdir(FILES)))

            tasks.start_soon(move_on)
            while not num_moves:
                await checkpoint()
            before, files = num_moves, len(os.listdir(FILES))
            async with flood(port, number, num_addresses):
                assert num_moves > before, "moves stopped"
                async with await connect_tcp("127.0.0.1", port, secret=SECRET) as channel:
                    await move(channel)
            assert most_files <= files + most + 50, "the server kept more connections than it may"
            tasks.cancel_scope.cancel()
    assert engine.num_open == 0
    assert f"there are {most} connections" in lines[0]
    assert len(lines) < number / 20, "the log was flooded"


@pytest.mark.parametrize("begun", [b"", b"HSHS", b"HSHS\x00\x01" + bytes(60)])
async def test_a_handshake_that_stalls_is_closed(begun: bytes) -> None:
    limits = LinkLimits(handshake_s=0.05)
    with logged() as lines:
        async with served(RecordingEngine(), limits=limits) as port:
            with stranger(port) as client:
                client.sendall(begun)
                await read_to_end(client)
    assert "not complete within 0.05 s" in lines[0]


async def test_a_handshake_that_drips_is_closed() -> None:
    async def drip() -> None:
        while True:
            client.send(b"H")
            await anyio.sleep(0.001)

    limits = LinkLimits(handshake_s=0.02)
    with logged() as lines:
        async with served(RecordingEngine(), limits=limits) as port:
            with stranger(port) as client, pytest.raises(ExceptionGroup):
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(drip)
    assert "in its handshake" in lines[0]


async def test_a_new_connection_is_refused_where_all_links_are_in_use() -> None:
    engine = RecordingEngine()
    with logged() as lines:
        async with (
            served(engine, limits=LinkLimits(connections=2)) as port,
            await connect_tcp("127.0.0.1", port, secret=SECRET) as first,
            await connect_tcp("127.0.0.1", port, secret=SECRET) as second,
            remote_sink(first, REQUEST) as sink,
        ):
            with pytest.raises(MigrationAborted, match="has closed it"):
                await connect_tcp("127.0.0.1", port, secret=SECRET)
            await sink.reserve(4)
            await move(second)
    assert lines == [
        "A connection from 127.0.0.1 was refused: there are 2 connections, the most that there may be, and "
        "none is idle."
    ]


async def test_a_silent_link_makes_room_for_a_new_one() -> None:
    engine = RecordingEngine()
    limits = LinkLimits(connections=1, idle_s=1e-9)
    with logged() as lines:
        async with served(engine, limits=limits) as port:
            with stranger(port) as silent:
                await insider(silent)
                async with await connect_tcp("127.0.0.1", port, secret=SECRET) as channel:
                    await move(channel)
                await read_to_end(silent)
    assert "was closed: there are 1 connections, the most that there may be, and it was idle" in lines[0]


@given(st.data())
def test_links_in_use_are_never_closed_and_limits_hold(data: st.DataObject) -> None:
    limits = LinkLimits(connections=4, per_peer=2, idle_s=10)

    async def play() -> None:
        with ExitStack() as sockets:
            connections, held = Connections(limits), list[Connection]()
            for _ in range(data.draw(st.integers(1, 20))):
                match data.draw(st.sampled_from(["new", "open", "use", "end", "wait"])):
                    case "new":
                        ends = socket.socketpair()
                        for end in ends:
                            sockets.enter_context(end)
                        peer = data.draw(st.sampled_from(["a", "b", "c", ""]))
                        new = Connection(SocketBytes(ends[0]), peer)
                        if not connections.admit(new):
                            held.append(new)
                    case "wait":
                        await anyio.sleep(6)
                    case verb if held:
                        one = data.draw(st.sampled_from(held))
                        if verb == "open":
                            one.is_open = True
                        elif verb == "use":
                            one.stream.last_used_s = anyio.current_time()
                        else:
                            connections.remove(one)
                            held.remove(one)
                    case _:
                        pass
                for one in [one for one in held if one.closed_for]:
                    assert not one.is_open or anyio.current_time() - one.stream.last_used_s >= 10
                    assert one.scope.cancel_called
                    held.remove(one)
                assert len(held) <= 4
                assert all(sum(one.peer == peer for one in held) <= 2 for peer in "abc")

    run(play)


def test_a_flood_of_lines_is_counted() -> None:
    async def flood_the_log() -> None:
        log = LinkLog()
        for number in range(1000):
            log.warn("A %s.", number)
        log.warn("B %s.", 0)
        await anyio.sleep(11)
        log.warn("A %s.", "later")

    with logged() as lines:
        run(flood_the_log)
    assert lines[:11] == [*(f"A {number}." for number in range(10)), "B 0."]
    assert lines[11:] == ["990 more such lines were left out: 'A %s.'.", "A later."]


@pytest.mark.parametrize("wrong", [{"connections": 0}, {"per_peer": 1.5}, {"handshake_s": 0}, {"idle_s": -1}])
def test_limits_that_make_no_sense_are_refused_by_name(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        LinkLimits(**wrong)  # type: ignore[arg-type]
