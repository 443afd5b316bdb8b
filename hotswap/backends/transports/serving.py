"""Serving connections: each in a task of its own, so that the failure of one does not affect the others."""

from __future__ import annotations

import logging
import socket
from collections.abc import Awaitable, Callable
from typing import TypeAlias

import anyio

from hotswap.errors import HotswapError
from hotswap.transport import Channel

__all__ = ["BACKLOG", "ChannelHandler", "serve_connections"]

_log = logging.getLogger("hotswap.transports")

ChannelHandler: TypeAlias = Callable[[Channel], Awaitable[object]]

BACKLOG = 128
_PAUSE_S = 0.1  # before the next attempt to accept


async def serve_connections(
    listener: socket.socket, opened: Callable[[socket.socket], Awaitable[Channel]], handle: ChannelHandler
) -> None:
    """Call `handle` with a channel for each connection, until this is cancelled.

    `opened` makes a channel of a connected socket, and owns the socket.
    """

    async def serve(connected: socket.socket) -> None:
        try:
            async with await opened(connected) as channel:
                await handle(channel)
        except* HotswapError as errors:
            for exc in errors.exceptions:
                _log.warning("An incoming link ended early. %s", exc)

    async with anyio.create_task_group() as tasks:
        while True:
            await anyio.wait_readable(listener)
            try:
                connected, _ = listener.accept()
            except OSError as exc:  # the client has disconnected, or there are too many open files
                _log.warning("A connection was not accepted: %s.", exc)
                await anyio.sleep(_PAUSE_S)
            else:
                connected.setblocking(False)
                tasks.start_soon(serve, connected)
