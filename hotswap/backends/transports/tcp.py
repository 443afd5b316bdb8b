"""Channels between machines, over TCP.

Both ends prove that they have one secret, before the first frame; without one a server listens on loopback
alone. Frames have checksums, because TCP's own 16 bits miss some errors, and are encrypted and signed by TLS
where an SSL context is given. Without TLS, one that can change packets on the way can change frames.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import ssl
from contextlib import suppress

import anyio
from anyio import TASK_STATUS_IGNORED
from anyio.abc import ByteStream, SocketAttribute, TaskStatus
from anyio.streams.tls import TLSStream

from hotswap.backends.transports.connections import LinkLimits
from hotswap.backends.transports.handshake import (
    TLS_ALERT,
    LinkSecret,
    authenticate_client,
    authenticate_server,
    check_secret,
)
from hotswap.backends.transports.link_errors import no_link, reason_for
from hotswap.backends.transports.serving import BACKLOG, ChannelHandler, serve_connections
from hotswap.backends.transports.sockets import SocketBytes
from hotswap.backends.transports.stream import MAX_PAYLOAD_BYTES, STALL_S, StreamChannel
from hotswap.errors import ConfigError
from hotswap.transport import Channel

__all__ = ["connect_tcp", "serve_tcp"]

# To detect a dead machine, the kernel probes after 30 s of silence, three times, 10 s apart.
_KEEP_ALIVE = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3}


async def connect_tcp(
    host: str,
    port: int,
    *,
    secret: LinkSecret | None = None,
    ssl_context: ssl.SSLContext | None = None,
    max_payload_bytes: int = MAX_PAYLOAD_BYTES,
    stall_s: float = STALL_S,
) -> Channel:
    """Return a channel to a server; use it with `async with`.

    Args:
        host: A name or an address; with TLS, the server's certificate must be for it.
        port: Where `serve_tcp` listens.
        secret: The secret of the server. A server with another or none is refused.
        ssl_context: For TLS, as `ssl.create_default_context(cafile=...)`; the server needs one too.
        max_payload_bytes: The longest payload, sent or received.
        stall_s: The time limit for connecting, and for a pause in the middle of a frame.

    Raises:
        MigrationAborted: the server cannot be reached, or has another secret or certificate.
        ConfigError: `secret` is none.
    """
    check_secret(secret)
    try:
        with anyio.fail_after(stall_s):
            stream = await _connected(host, port, secret, ssl_context)
    except Exception as exc:
        if (reason := reason_for(exc)) is None:
            raise
        raise no_link(f"{host}:{port}", reason) from exc
    return StreamChannel(stream, max_payload_bytes=max_payload_bytes, stall_s=stall_s)


async def serve_tcp(
    handle: ChannelHandler,
    host: str,
    port: int = 0,
    *,
    secret: LinkSecret | None = None,
    ssl_context: ssl.SSLContext | None = None,
    limits: LinkLimits | None = None,
    max_payload_bytes: int = MAX_PAYLOAD_BYTES,
    stall_s: float = STALL_S,
    task_status: TaskStatus[int] = TASK_STATUS_IGNORED,
) -> None:
    """Call `handle` with a channel for each connection, until this is cancelled.

    A channel is closed when its call ends. A link that breaks is logged and affects no other. The port is
    reported through `task_status`; `port=0` lets the system choose one.

    Args:
        handle: Called with each channel.
        host: A name or an address of this machine.
        port: Where to listen.
        secret: Clients without it are disconnected. Without a secret every user of this machine can connect,
            and the host must be a loopback address.
        ssl_context: For TLS, as `ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)` with a certificate.
        limits: How many connections there may be, and for how long without a handshake.
        max_payload_bytes: The longest payload, sent or received.
        stall_s: The time limit for a pause in the middle of a frame.
        task_status: Gets the port.

    Raises:
        ConfigError: the host is no loopback address, and there is no secret; or `secret` is none; or it
            cannot be listened at, as where the port is in use.
    """
    check_secret(secret)

    async def opened(stream: SocketBytes) -> Channel:
        _set_options(stream.connected)
        secured = stream if ssl_context is None else await _over_tls(stream, ssl_context)
        await authenticate_client(secured, secret)
        return StreamChannel(secured, max_payload_bytes=max_payload_bytes, stall_s=stall_s)

    with await _listening(host, port, secret) as listener:
        task_status.started(listener.getsockname()[1])
        await serve_connections(listener, opened, handle, limits or LinkLimits())


async def _connected(
    host: str, port: int, secret: LinkSecret | None, ssl_context: ssl.SSLContext | None
) -> ByteStream:
    """Return a stream to a server that has proved itself."""
    stream: ByteStream
    if ssl_context is None:
        stream = await _connected_socket(host, port)
        _set_options(stream.connected)
    else:
        stream = await anyio.connect_tcp(host, port, ssl_context=ssl_context, tls_standard_compatible=False)
        _set_options(stream.extra(SocketAttribute.raw_socket))
    try:
        await authenticate_server(stream, secret)
    except BaseException:
        await anyio.aclose_forcefully(stream)
        raise
    return stream


async def _connected_socket(host: str, port: int) -> SocketBytes:
    """Return a stream to the first of a host's addresses that accepts the connection."""
    failure: OSError | None = None
    for family, _, _, _, address in await anyio.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        connected = socket.socket(family, socket.SOCK_STREAM)
        try:
            connected.setblocking(False)
            await _connect(connected, address)
        except OSError as exc:
            connected.close()
            failure = exc
        except BaseException:
            connected.close()
            raise
        else:
            return SocketBytes(connected)
    raise failure or OSError(f"{host!r} has no address")


async def _connect(connected: socket.socket, address: tuple[object, ...]) -> None:
    with suppress(BlockingIOError):
        connected.connect(address)
        return
    await anyio.wait_writable(connected)
    if error := connected.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
        raise OSError(error, os.strerror(error))


async def _over_tls(stream: ByteStream, context: ssl.SSLContext) -> ByteStream:
    try:
        # Frames tell where they end, so the message of TLS that ends a stream is not waited for.
        return await TLSStream.wrap(stream, server_side=True, ssl_context=context, standard_compatible=False)
    except ssl.SSLError:
        with suppress(anyio.BrokenResourceError):  # the client has left
            await stream.send(TLS_ALERT)
        raise


async def _listening(host: str, port: int, secret: LinkSecret | None) -> socket.socket:
    """Return a socket that listens at the first of a host's addresses."""
    try:
        found = await anyio.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as exc:
        raise ConfigError(f"{host!r} is no address of this machine: {exc}. Name one that is.") from exc
    family, _, _, _, address = found[0]
    if secret is None and not ipaddress.ip_address(address[0]).is_loopback:
        raise ConfigError(
            f"{host!r} is no loopback address, and without a secret any client that reaches the port could "
            "send KV blocks to the engine. Give serve_tcp and connect_tcp a `secret=LinkSecret(...)`, or "
            "listen on '127.0.0.1'."
        )
    try:
        listener = socket.create_server(address, family=family, backlog=BACKLOG)
    except OSError as exc:
        raise ConfigError(
            f"Port {port} of {host!r} cannot be listened at: {exc.strerror or exc}. Stop what listens there, "
            "or choose another; port 0 takes a free one."
        ) from exc
    listener.setblocking(False)
    return listener


def _set_options(connected: socket.socket) -> None:
    with suppress(OSError):  # the other end has disconnected: the first method call raises it
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _KEEP_ALIVE.items():
            if hasattr(socket, name):  # not on every system
                connected.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
