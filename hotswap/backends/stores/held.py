"""What a tiered store has of its shards, whole or as far as they have arrived, for other nodes to read."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import replace

from anyio.lowlevel import checkpoint

from hotswap.backends.stores.host_tier import HostTier
from hotswap.backends.stores.loading import Fill, FillReader
from hotswap.backends.stores.nvme import NvmeStore
from hotswap.backends.stores.write_through import QuarantineStore
from hotswap.errors import ShardMissing, StoreError
from hotswap.model import HostChunk, Shard
from hotswap.store import WeightStore

__all__ = ["HeldShards", "from_byte"]


class HeldShards:
    """Reads shards from host memory, from the disk, or from a load under way; nothing is loaded for a reader.

    Args:
        host: The tier in host memory, if there is one.
        below: The tiers below; of them the disks are read.
        fills: The loads into host memory that run.
    """

    def __init__(
        self, host: HostTier | None, below: Sequence[WeightStore], fills: Mapping[Shard, Fill]
    ) -> None:
        self._host, self._fills = host, fills
        self._disks = [tier for tier in below if isinstance(tier, NvmeStore | QuarantineStore)]

    def has(self, shard: Shard) -> bool:
        """Whether the shard is here whole, as far as views tell; `open` may find that it is not."""
        if self._host is not None and self._host.holds(shard):
            return True
        return any(disk.view().tier_of(shard.model) is not None for disk in self._disks)

    def arrived_bytes(self, shard: Shard) -> int | None:
        """How many of its first bytes are here; `None` if it is neither here nor under way."""
        if self.has(shard):
            return shard.size_bytes
        fill = self._arriving(shard)
        return None if fill is None else fill.filled_bytes

    @asynccontextmanager
    async def open(
        self, shard: Shard, start: int = 0, *, chunk_bytes: int = 8 << 20
    ) -> AsyncGenerator[AsyncIterator[HostChunk]]:
        """Lend a shard from its byte `start` on, in chunks of at most `chunk_bytes`, as they arrive.

        A load under way goes on for as long as it has a reader, this one included.

        Raises:
            ShardMissing: it is neither here nor under way.
            StoreError: reading it, or the load, failed; also between chunks.
        """
        if self._host is not None and self._host.holds(shard):
            async with (
                self._host.lend_shard(shard) as data,
                aclosing(_cut(data, shard, start, chunk_bytes)) as chunks,
            ):
                yield chunks
        elif (fill := self._arriving(shard)) is not None:
            async with fill.reading():
                reader = FillReader(fill, chunk_bytes, start)
                try:
                    yield reader
                finally:
                    reader.close()
        else:
            async with (
                (await self._disk_of(shard)).open(shard) as whole,
                aclosing(from_byte(whole, shard.buffer_offset_bytes + start)) as chunks,
            ):
                yield chunks

    def _arriving(self, shard: Shard) -> Fill | None:
        fill = self._fills.get(shard)
        return None if fill is None or fill.closing or fill.error is not None else fill

    async def _disk_of(self, shard: Shard) -> WeightStore:
        for disk in self._disks:
            with suppress(StoreError):
                if shard in (await disk.manifest(shard.model)).shards:
                    return disk
        raise ShardMissing(f"{shard.file!r} of model {shard.model!r} is not here, or of another conversion.")


async def _cut(data: memoryview, shard: Shard, start: int, chunk_bytes: int) -> AsyncGenerator[HostChunk]:
    for at in range(start, len(data), chunk_bytes):
        await checkpoint()
        with data[at : at + chunk_bytes] as part:
            yield HostChunk(shard.buffer_offset_bytes + at, part)


async def from_byte(chunks: AsyncIterator[HostChunk], start_bytes: int) -> AsyncGenerator[HostChunk]:
    """Yield what lies at or after a place in the rank's buffer."""
    async for chunk in chunks:
        before = start_bytes - chunk.offset_bytes
        if before <= 0:
            yield chunk
        elif before < len(chunk.data):
            with chunk.data[before:] as part:
                yield replace(chunk, offset_bytes=start_bytes, data=part)
