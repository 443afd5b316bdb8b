"""Links that carry the KV blocks of a move: within a process, between processes, between machines.

Each is a `Channel`.
"""

from __future__ import annotations

from hotswap.backends.transports.memory import MemoryChannel, memory_channels
from hotswap.backends.transports.shared import SharedChannel, connect_shared, serve_shared
from hotswap.backends.transports.stream import StreamChannel
from hotswap.backends.transports.tcp import connect_tcp, serve_tcp

__all__ = [
    "MemoryChannel",
    "SharedChannel",
    "StreamChannel",
    "connect_shared",
    "connect_tcp",
    "memory_channels",
    "serve_shared",
    "serve_tcp",
]
