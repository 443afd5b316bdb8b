"""Channels between machines, over TCP.

Frames have checksums, because TCP's own 16 bits miss some errors. They are neither encrypted nor signed, and
any client of the port can send KV blocks to the engine: listen on a private network only.
"""

from __future__ import annotations

import socket
from contextlib import suppress

import anyio
from anyio import TASK_STATUS_IGNORED
from anyio.abc import SocketAttribute, TaskStatus

from hotswap.backends.transports.link_errors import link_broken, reason_for
from hotswap.backends.transports.serving import BACKLOG, ChannelHandler, serve_connections
from hotswap.backends.transports.sockets import SocketBytes
from hotswap.backends.transports.stream import MAX_PAYLOAD_BYTES, STALL_S, StreamChannel
from hotswap.transport import Channel

__all__ = ["connect_tcp", "serve_tcp"]

# To detect a dead machine, the kernel probes after 30 s of silence, three times, 10 s apart.
_KEEP_ALIVE = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3}


async def connect_tcp(
    host: str, port: int, *, max_payload_bytes: int = MAX_PAYLOAD_BYTES, stall_s: float = STALL_S
) -> Channel:
    """Return a channel to a server; use it with `async with`.

    Args:
        host: A name or an address.
        port: Where `serve_tcp` listens.
        max_payload_bytes: The longest payload, sent or received.
        stall_s: The time limit for connecting, and for a pause in the middle of a frame.

    Raises:
        MigrationAborted: the server cannot be reached.
    """
    try:
        with anyio.fail_after(stall_s):
            stream = await anyio.connect_tcp(host, port)
    except OSError as exc:
        raise link_broken(f"{host}:{port} cannot be reached, {reason_for(exc)}") from exc
    _set_options(stream.extra(SocketAttribute.raw_socket))
    return StreamChannel(stream, max_payload_bytes=max_payload_bytes, stall_s=stall_s)


async def serve_tcp(
    handle: ChannelHandler,
    host: str,
    port: int = 0,
    *,
    max_payload_bytes: int = MAX_PAYLOAD_BYTES,
    stall_s: float = STALL_S,
    task_status: TaskStatus[int] = TASK_STATUS_IGNORED,
) -> None:
    """Call `handle` with a channel for each connection, until this is cancelled.

    A channel is closed when its call ends. A link that breaks is logged and affects no other. The port is
    reported through `task_status`; `port=0` lets the system choose one.
    """

    async def opened(connected: socket.socket) -> Channel:
        _set_options(connected)
        return StreamChannel(SocketBytes(connected), max_payload_bytes=max_payload_bytes, stall_s=stall_s)

    with await _listening(host, port) as listener:
        task_status.started(listener.getsockname()[1])
        await serve_connections(listener, opened, handle)


async def _listening(host: str, port: int) -> socket.socket:
    """Return a socket that listens at the first of a host's addresses."""
    found = await anyio.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, _, _, _, address = found[0]
    listener = socket.create_server(address, family=family, backlog=BACKLOG)
    listener.setblocking(False)
    return listener


def _set_options(connected: socket.socket) -> None:
    with suppress(OSError):  # the other end has disconnected: the first method call raises it
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _KEEP_ALIVE.items():
            if hasattr(socket, name):  # not on every system
                connected.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
