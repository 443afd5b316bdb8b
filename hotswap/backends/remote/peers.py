"""How hosts reach each other, so that KV blocks go from one to the other and not through the controller."""

from __future__ import annotations

import os
import ssl
from pathlib import Path
from typing import Protocol

from hotswap.backends.transports import LinkSecret, connect_shared, connect_tcp
from hotswap.errors import MigrationAborted
from hotswap.transport import Channel

__all__ = ["PeerLinks", "SharedPeers", "TcpPeers"]


class PeerLinks(Protocol):
    """Where other hosts reach a host, and how it reaches them.

    Attributes:
        address: Where `EngineHost.serve` is served to them, in a form that `connect` of the others takes.
    """

    address: str

    async def connect(self, address: str) -> Channel:
        """Return a link to another host.

        Raises:
            MigrationAborted: it cannot be reached, or has another secret.
        """
        ...


class TcpPeers(PeerLinks):
    """Hosts that serve over TCP, all with one secret.

    Args:
        host: The name or address of this host, as others reach it.
        port: Where its `serve_tcp` listens.
        secret: The secret of all hosts.
        ssl_context: For TLS to the others.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        secret: LinkSecret | None = None,
        ssl_context: ssl.SSLContext | None = None,
    ) -> None:
        self.address = f"{host}:{port}"
        self._secret, self._ssl_context = secret, ssl_context

    async def connect(self, address: str) -> Channel:
        host, _, port = address.rpartition(":")
        if not port.isdecimal():
            raise MigrationAborted(f"{address!r} is no address of a host over TCP.", stage="link")
        return await connect_tcp(host, int(port), secret=self._secret, ssl_context=self._ssl_context)


class SharedPeers(PeerLinks):
    """Hosts of one user on one machine, which serve over shared memory.

    Args:
        path: The path of this host's `serve_shared`.
    """

    def __init__(self, path: Path | str) -> None:
        self.address = os.fspath(path)

    async def connect(self, address: str) -> Channel:
        return await connect_shared(address)
