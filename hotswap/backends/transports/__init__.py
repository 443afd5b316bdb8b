"""Links that carry the KV blocks of a move: within a process, between processes, between machines.

Each is a `Channel`. With `remote_sink` at one end and `serve_sink` at the other, an engine of another process
receives blocks like a local one. `docs/migration.md` shows how.
"""

from __future__ import annotations

from hotswap.backends.transports.connections import LinkLimits
from hotswap.backends.transports.handshake import LinkSecret
from hotswap.backends.transports.memory import MemoryChannel, memory_channels
from hotswap.backends.transports.serving import ChannelHandler, LinkOpener
from hotswap.backends.transports.shared import SharedChannel, connect_shared, serve_shared
from hotswap.backends.transports.sinks import RemoteSink, remote_sink, serve_sink
from hotswap.backends.transports.stream import StreamChannel
from hotswap.backends.transports.tcp import connect_tcp, serve_tcp

__all__ = [
    "ChannelHandler",
    "LinkLimits",
    "LinkOpener",
    "LinkSecret",
    "MemoryChannel",
    "RemoteSink",
    "SharedChannel",
    "StreamChannel",
    "connect_shared",
    "connect_tcp",
    "memory_channels",
    "remote_sink",
    "serve_shared",
    "serve_sink",
    "serve_tcp",
]
