"""Links of every kind, both ends in this process."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TypeAlias

import anyio

from hotswap.abc import Channel
from hotswap.backends.transports import (
    LinkSecret,
    connect_shared,
    connect_tcp,
    memory_channels,
    serve_shared,
    serve_tcp,
)
from tests.backends.transports.certificates import contexts

SECRET = LinkSecret(b"the secret of these tests, 32 bytes and more")

Link: TypeAlias = Callable[[], AbstractAsyncContextManager[tuple[Channel, Channel]]]


class Accepted:
    """Keeps the channel of each connection."""

    def __init__(self) -> None:
        self._channel: Channel | None = None
        self._arrived, self._done = anyio.Event(), anyio.Event()

    async def handle(self, channel: Channel) -> None:
        self._channel = channel
        self._arrived.set()
        await self._done.wait()

    @asynccontextmanager
    async def channel(self) -> AsyncGenerator[Channel]:
        await self._arrived.wait()
        assert self._channel is not None
        try:
            yield self._channel
        finally:
            self._done.set()


@asynccontextmanager
async def memory_link() -> AsyncGenerator[tuple[Channel, Channel]]:
    left, right = memory_channels(max_payload_bytes=8 << 20)
    async with left, right:
        yield left, right


@asynccontextmanager
async def tcp_link(
    secret: LinkSecret | None = None, *, tls: bool = False
) -> AsyncGenerator[tuple[Channel, Channel]]:
    accepted = Accepted()
    server, client = contexts() if tls else (None, None)
    serve = partial(serve_tcp, secret=secret, ssl_context=server)
    async with anyio.create_task_group() as tasks:
        port = await tasks.start(serve, accepted.handle, "127.0.0.1")
        async with (
            await connect_tcp("127.0.0.1", port, secret=secret, ssl_context=client) as left,
            accepted.channel() as right,
        ):
            yield left, right
        tasks.cancel_scope.cancel()


@asynccontextmanager
async def shared_link(ring_bytes: int = 8 << 20) -> AsyncGenerator[tuple[Channel, Channel]]:
    accepted = Accepted()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "s"
        async with anyio.create_task_group() as tasks:
            await tasks.start(serve_shared, accepted.handle, path)
            async with (
                await connect_shared(path, ring_bytes=ring_bytes) as left,
                accepted.channel() as right,
            ):
                yield left, right
            tasks.cancel_scope.cancel()


def secret_link() -> AbstractAsyncContextManager[tuple[Channel, Channel]]:
    return tcp_link(SECRET)


LINKS: dict[str, Link] = {
    "memory": memory_link,
    "shared": shared_link,
    "tcp": tcp_link,
    "secret": secret_link,
}
