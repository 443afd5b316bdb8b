"""Nodes with real stores, linked in memory or over TCP, that can be cut off."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Self

import anyio
import anyio.lowlevel
from anyio.abc import TaskGroup

from hotswap.abc import Channel, WeightStore, WrapperStore
from hotswap.backends.nodes import PeerStore, StoreHost
from hotswap.backends.stores import NvmeStore, PinnedStore, TieredStore
from hotswap.backends.transports import LinkSecret, connect_tcp, memory_channels, serve_tcp
from hotswap.errors import MigrationAborted
from tests.backends.stores.models import UNIT

SECRET = LinkSecret(b"the secret of these tests, 32 bytes and more")


@dataclass(eq=False)
class Door:
    """Links in memory to a host; while it is shut there are none."""

    tasks: TaskGroup
    host: StoreHost | None = None
    is_open: bool = True
    channels: list[Channel] = field(default_factory=list)
    max_payload_bytes: int = 8 << 20

    async def connect(self) -> Channel:
        await anyio.lowlevel.checkpoint()
        if not self.is_open or self.host is None:
            raise MigrationAborted("The node cannot be reached.", stage="link")
        near, far = memory_channels(max_payload_bytes=self.max_payload_bytes)
        self.channels += [near, far]
        self.tasks.start_soon(self._serve, self.host, far)
        return near

    async def _serve(self, host: StoreHost, channel: Channel) -> None:
        async with channel:
            await host.serve(channel)

    async def cut(self) -> None:
        """Break all links, and open none from now on."""
        self.is_open = False
        for channel in self.channels:
            await channel.aclose()
        self.channels.clear()


@asynccontextmanager
async def doors(*nodes: str) -> AsyncGenerator[dict[str, Door]]:
    """Doors of nodes, to which hosts are to be given."""
    async with anyio.create_task_group() as tasks:
        yield {node: Door(tasks) for node in nodes}
        tasks.cancel_scope.cancel()


@asynccontextmanager
async def in_memory(store: WeightStore, **options: Any) -> AsyncGenerator[Door]:
    """The door of one node with a store, which is opened here."""
    async with doors("n0") as each, store:
        each["n0"].host = StoreHost("n0", store, **options)
        yield each["n0"]


@asynccontextmanager
async def over_tcp(host: StoreHost, address: str = "127.0.0.1") -> AsyncGenerator[Any]:
    """An opener of links over TCP to a host that is served here."""
    async with anyio.create_task_group() as tasks:
        port = await tasks.start(partial(serve_tcp, secret=SECRET), host.serve, address)
        yield partial(connect_tcp, address, port, secret=SECRET)
        tasks.cancel_scope.cancel()


class Entered(WrapperStore):
    """A store that is open already, for several users."""

    @asynccontextmanager
    async def __asynccontextmanager__(self) -> AsyncGenerator[Self]:
        yield self


@dataclass(eq=False)
class Node:
    """A node of a cluster: its store of three tiers, and the store of them that reads from peers."""

    name: str
    store: TieredStore
    peers: PeerStore
    door: Door


@asynccontextmanager
async def cluster(
    storage: WeightStore, directory: Path, names: list[str], *, children: int = 2, **options: Any
) -> AsyncGenerator[dict[str, Node]]:
    """Nodes that read a storage, each with memory and a disk of its own, and read from each other."""
    async with doors(*names) as each, anyio.create_task_group() as tasks:
        openers = {name: door.connect for name, door in each.items()}
        nodes: dict[str, Node] = {}
        done = anyio.Event()

        async def keep(node: Node, *, task_status: Any) -> None:
            async with node.store:
                task_status.started()
                await done.wait()

        for name in names:
            peers = PeerStore(Entered(storage), openers, node=name, **options)
            disk = NvmeStore(directory / name, chunk_bytes=UNIT)
            store = TieredStore(PinnedStore("64 MiB", chunk_bytes=UNIT), disk, peers)
            nodes[name] = Node(name, store, peers, each[name])
            each[name].host = StoreHost(name, store, children=children, part_bytes=UNIT)
            await tasks.start(partial(keep, nodes[name]))
        try:
            yield nodes
        finally:
            done.set()
