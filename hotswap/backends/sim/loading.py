"""Reading a simulated model: its bytes are checked, and none is kept."""

from __future__ import annotations

from dataclasses import dataclass

import anyio

from hotswap.backends.sim.content import check_chunk
from hotswap.errors import ShardCorrupt
from hotswap.hardware import DeviceProfile
from hotswap.model import ModelCard, Shard
from hotswap.store import WeightStore

__all__ = ["Weights", "read_weights"]


@dataclass(frozen=True, slots=True)
class Weights:
    """A model whose weights take device memory."""

    model: ModelCard
    size_bytes: int


async def read_weights(model: ModelCard, store: WeightStore, profile: DeviceProfile) -> Weights:
    """Read all shards, then sleep for as long as the copy to the device takes.

    Raises:
        ShardCorrupt: bytes are missing or not the model's.
    """
    manifest = await store.manifest(model.id)
    for rank in range(manifest.world_size):
        for shard in manifest.shards_of(rank):
            await _read_shard(shard, store)
    await anyio.sleep(profile.load_s(model.weight_bytes))
    return Weights(model, model.weight_bytes)


async def _read_shard(shard: Shard, store: WeightStore) -> None:
    at = shard.buffer_offset_bytes
    async with store.open(shard) as chunks:
        async for chunk in chunks:
            if chunk.offset_bytes != at:
                raise ShardCorrupt(f"Shard {shard.file!r} of {shard.model!r} has a gap at byte {at}.")
            check_chunk(shard, chunk)
            at += len(chunk.data)
    if at != shard.buffer_offset_bytes + shard.size_bytes:
        raise ShardCorrupt(f"Shard {shard.file!r} of {shard.model!r} ends early, at byte {at}.")
