"""`Address`: where an actor serves an engine, or a stage of one, and its store."""

from __future__ import annotations

from dataclasses import dataclass, field

from hotswap.backends.transports import LinkSecret, connect_tcp
from hotswap.transport import Channel

__all__ = ["Address"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """Where an actor serves an engine, or a stage of one, and its store; only calls of Ray tell the secret.

    Attributes:
        node: The address of its node.
        port: Where the engine or the stage is served.
        store_port: Where its store is served.
        key: Of the secret of both.
        pid: The id of its process, on that node.
    """

    node: str
    port: int
    store_port: int
    key: bytes = field(repr=False)
    pid: int

    async def link(self) -> Channel:
        """Open a link to the engine or the stage; raises `MigrationAborted`."""
        return await connect_tcp(self.node, self.port, secret=LinkSecret(self.key))

    async def link_to_store(self) -> Channel:
        """Open a link to the store; raises `MigrationAborted`."""
        return await connect_tcp(self.node, self.store_port, secret=LinkSecret(self.key))
