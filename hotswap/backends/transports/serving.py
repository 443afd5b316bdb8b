"""Serving connections: each in a task of its own, so that the failure of one does not affect the others."""

from __future__ import annotations

import socket
from collections.abc import Awaitable, Callable
from typing import TypeAlias

import anyio

from hotswap.backends.transports.connections import Connection, Connections, LinkLimits
from hotswap.backends.transports.link_errors import reason_for
from hotswap.backends.transports.link_log import LinkLog
from hotswap.backends.transports.sockets import SocketBytes
from hotswap.errors import HotswapError
from hotswap.transport import Channel

__all__ = ["BACKLOG", "ChannelHandler", "ChannelOpener", "LinkOpener", "serve_connections"]

ChannelHandler: TypeAlias = Callable[[Channel], Awaitable[object]]
LinkOpener: TypeAlias = Callable[[], Awaitable[Channel]]
"""Opens a link to a host, as `functools.partial(connect_tcp, "10.0.0.7", 7000, secret=secret)` does."""
ChannelOpener: TypeAlias = Callable[[SocketBytes], Awaitable[Channel]]

BACKLOG = 1024  # of connections that arrive in one turn of the event loop
_PAUSE_S = 0.1  # before the next attempt to accept


async def serve_connections(
    listener: socket.socket, opened: ChannelOpener, handle: ChannelHandler, limits: LinkLimits
) -> None:
    """Call `handle` with a channel for each connection, until this is cancelled.

    `opened` makes a channel of a stream by a handshake; it raises errors of `reason_for` where that fails.
    """
    server = _Server(opened, handle, limits)
    async with anyio.create_task_group() as tasks:
        while True:
            await anyio.wait_readable(listener)
            if (connection := await server.accept(listener)) is not None:
                tasks.start_soon(server.serve, connection)


class _Server:
    """Accepts connections and serves each; see `serve_connections`."""

    def __init__(self, opened: ChannelOpener, handle: ChannelHandler, limits: LinkLimits) -> None:
        self._opened, self._handle = opened, handle
        self._connections, self._log = Connections(limits), LinkLog()

    async def accept(self, listener: socket.socket) -> Connection | None:
        """Accept a connection, or close it at once if there are too many."""
        try:
            connected, address = listener.accept()
        except BlockingIOError:  # the client has left
            return None
        except OSError as exc:  # too many open files, for instance
            self._log.warn("A connection was not accepted: %s.", exc)
            await anyio.sleep(_PAUSE_S)
            return None
        connected.setblocking(False)
        is_inet = connected.family != getattr(socket, "AF_UNIX", None)
        connection = Connection(SocketBytes(connected), str(address[0]) if is_inet else "")
        if refused := self._connections.admit(connection):
            self._log.warn("A connection from %s was refused: %s.", connection, refused)
            connected.close()
            return None
        return connection

    async def serve(self, connection: Connection) -> None:
        """Serve a connection until its handler ends, or it is closed for another."""
        try:
            with connection.scope:
                async with connection.stream:
                    await self._serve(connection)
        except* HotswapError as errors:
            for exc in errors.exceptions:
                self._log.warn("An incoming link from %s ended early. %s", connection, exc)
        finally:
            self._connections.remove(connection)
        if connection.closed_for:
            self._log.warn("A connection from %s was closed: %s.", connection, connection.closed_for)

    async def _serve(self, connection: Connection) -> None:
        handshake_s = self._connections.limits.handshake_s
        try:
            with anyio.fail_after(handshake_s):
                channel = await self._opened(connection.stream)
        except Exception as exc:
            is_late = isinstance(exc, TimeoutError)
            reason = f"it was not complete within {handshake_s:g} s" if is_late else reason_for(exc)
            if reason is None:
                raise
            self._log.warn("A connection from %s was closed in its handshake: %s.", connection, reason)
            return
        connection.is_open = True
        async with channel:
            await self._handle(channel)
