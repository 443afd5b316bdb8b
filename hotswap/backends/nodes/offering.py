"""What a node has for others: its view, and shards for peers, within bounds."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from itertools import count
from typing import NamedTuple

import anyio

from hotswap.backends.nodes.messages import view_fields
from hotswap.backends.nodes.peers import PeerStore
from hotswap.backends.stores.held import from_byte
from hotswap.backends.stores.tiered import TieredStore
from hotswap.model import HostChunk, Shard
from hotswap.store import WeightStore

__all__ = ["Offering", "Refusal"]


class Refusal(NamedTuple):
    """Why a peer may not read from here, and whether it might soon."""

    reason: str
    later: bool = False


class Offering:
    """The store of a node as others see it; the arguments are those of `StoreHost`.

    Attributes:
        node: The name of the node.
        store: Its store.
        part_bytes: The longest payload of a frame.
        num_children: How many peers read from here.
    """

    def __init__(
        self, node: str, store: WeightStore, *, children: int, bytes_per_s: float | None, part_bytes: int
    ) -> None:
        self.node, self.store, self.part_bytes = node, store, part_bytes
        self.num_children = 0
        self._most_children, self._bytes_per_s, self._free_s = children, bytes_per_s, 0.0
        self._view_numbers = count()
        tiers = store.tiers if isinstance(store, TieredStore) else (store,)
        self._peers = next((tier for tier in tiers if isinstance(tier, PeerStore)), None)

    def view_now(self) -> dict[str, object]:
        """The fields of the present view, and its number: later ones have higher numbers."""
        return {"view_number": next(self._view_numbers), **view_fields(self.store.view())}

    def arrived_bytes(self, shard: Shard) -> int | None:
        """How many of a shard's first bytes are here; `None` if it is neither here nor under way."""
        if isinstance(self.store, TieredStore):
            return self.store.held.arrived_bytes(shard)
        return None if self.store.view().tier_of(shard.model) is None else shard.size_bytes

    def refusal(self, shard: Shard, reader: str, start: int) -> Refusal | None:
        """Why a peer that has the first `start` bytes may not read on from here; `None` if it may.

        A reader follows one that is further, or one that will be: one that reads the shard from the storage,
        and of those that look for a peer the one that is ranked higher. So readers form no circle.
        """
        arrived = self.arrived_bytes(shard)
        if arrived is None:
            return Refusal("it is not here")
        if not self._is_ahead(shard, reader, start, arrived):
            will_be = self._peers is not None and self._peers.will_lead(shard, reader)
            return Refusal("it is no further", later=will_be and arrived == start)
        if self.num_children >= self._most_children:
            return Refusal("as many read from here as may", later=True)
        return None

    def _is_ahead(self, shard: Shard, reader: str, start: int, arrived: int) -> bool:
        if arrived > start or arrived == shard.size_bytes or self._peers is None:
            return True
        return arrived == start and self._peers.leads(shard, reader)

    @asynccontextmanager
    async def opened(self, shard: Shard, start: int) -> AsyncGenerator[AsyncIterator[HostChunk]]:
        """Lend a shard from its byte `start` on, as an engine here would read it."""
        async with (
            self.store.open(shard) as whole,
            aclosing(from_byte(whole, shard.buffer_offset_bytes + start)) as chunks,
        ):
            yield chunks

    @asynccontextmanager
    async def reading(self, shard: Shard, start: int) -> AsyncGenerator[AsyncIterator[HostChunk]]:
        """Lend a shard to a peer from its byte `start` on."""
        self.num_children += 1
        try:
            if isinstance(self.store, TieredStore):
                held = self.store.held.open(shard, start, chunk_bytes=self.part_bytes)
            else:
                held = self.opened(shard, start)
            async with held as chunks:
                yield chunks
        finally:
            self.num_children -= 1

    async def admit(self, num_bytes: int) -> None:
        """Wait until so many bytes may be sent, in the order of the calls."""
        if self._bytes_per_s is not None:
            begin_s = max(self._free_s, anyio.current_time())
            self._free_s = begin_s + num_bytes / self._bytes_per_s
            await anyio.sleep_until(begin_s)
