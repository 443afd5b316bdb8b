"""A socket as a stream of bytes: what arrives is received once, whatever is cancelled meanwhile."""

from __future__ import annotations

import socket
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import anyio
import pytest
from anyio.lowlevel import checkpoint

from hotswap.backends.transports.sockets import SocketBytes


@asynccontextmanager
async def pair() -> AsyncGenerator[tuple[SocketBytes, socket.socket]]:
    mine, theirs = socket.socketpair()
    mine.setblocking(False)
    with theirs:
        async with SocketBytes(mine) as stream:
            yield stream, theirs


@pytest.mark.parametrize("turns", range(6))
async def test_bytes_that_arrive_as_a_receive_is_cancelled_are_for_the_next_one(turns: int) -> None:
    async with pair() as (stream, theirs):
        received = list[bytes]()

        async def receive() -> None:
            received.append(await stream.receive())

        for sent in (b"one", b"two"):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(receive)
                await checkpoint()
                theirs.send(sent)
                for _ in range(turns):
                    await checkpoint()
                tasks.cancel_scope.cancel()
        theirs.send(b"!")
        while not b"".join(received).endswith(b"!"):
            received.append(await stream.receive(2))
        assert b"".join(received) == b"onetwo!"


async def test_a_receive_of_a_stream_that_is_closed_ends_and_so_do_those_after_the_end() -> None:
    async with pair() as (stream, theirs), anyio.create_task_group() as tasks:

        async def receive() -> None:
            with pytest.raises(anyio.ClosedResourceError):
                await stream.receive()

        tasks.start_soon(receive)
        await checkpoint()
        with pytest.raises(anyio.BusyResourceError):
            await stream.receive()
        await stream.aclose()
    async with pair() as (stream, theirs):
        theirs.send(b"last")
        theirs.close()
        assert await stream.receive() == b"last"
        for _ in range(2):
            with pytest.raises(anyio.EndOfStream):
                await stream.receive()


async def test_a_sender_that_never_waits_lets_others_run() -> None:
    async with pair() as (stream, theirs), anyio.create_task_group() as tasks:
        theirs.setblocking(False)
        turns = 0

        async def count() -> None:
            nonlocal turns
            while True:
                turns += 1
                await checkpoint()

        tasks.start_soon(count)
        for _ in range(200):
            await stream.send(b"a small frame")
            theirs.recv(100)
        tasks.cancel_scope.cancel()
        assert turns > 5
