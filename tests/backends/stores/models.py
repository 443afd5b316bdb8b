"""Models for the tests of stores: random bytes in the layout, and tiny checkpoints."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Iterable
from pathlib import Path

from hotswap import ModelId
from hotswap.abc import HostChunk, Manifest, Shard, TensorSpec, WeightStore
from hotswap.backends.stores.writer import write_model

UNIT = 4096


def blank(model: str = "m", *, size: int = 5 * UNIT, world_size: int = 1) -> Manifest:
    """A manifest with two tensors, one under two names."""
    head = TensorSpec(
        name="head", dtype="uint8", shape=(size - 256,), offset_bytes=256, size_bytes=size - 256
    )
    norm = TensorSpec(name="norm", dtype="float32", shape=(8, 8), offset_bytes=0, size_bytes=256)
    tied = TensorSpec(name="tied", dtype="float32", shape=(8, 8), offset_bytes=0, size_bytes=256)
    return Manifest(
        model=ModelId(model),
        shards=(),
        buffer_bytes=size,
        tensors=(head, norm, tied),
        world_size=world_size,
        architecture="TestForCausalLM",
        config="{}",
        eos_token_ids=(2,),
        max_context_tokens=64,
    )


def content(manifest: Manifest, *, seed: int = 0) -> list[bytes]:
    """Each rank's buffer, padding not included."""
    rng = random.Random(f"{manifest.model}-{seed}")
    return [rng.randbytes(manifest.buffer_bytes) for _ in range(manifest.world_size)]


def put(
    root: Path,
    model: str = "m",
    *,
    size: int = 5 * UNIT,
    world_size: int = 1,
    file_bytes: int = 2 * UNIT,
    seed: int = 0,
) -> tuple[Manifest, list[bytes]]:
    """Write a model of random bytes; return its manifest and each rank's buffer, padding included."""
    manifest = blank(model, size=size, world_size=world_size)
    ranks = content(manifest, seed=seed)
    whole = write_model(root, manifest, [[memoryview(rank)] for rank in ranks], max_file_bytes=file_bytes)
    return whole, [rank.ljust(whole.buffer_bytes, b"\0") for rank in ranks]


def put_all(root: Path, models: Iterable[str]) -> Path:
    """Write models with several chunks a shard, several shards a rank, and two ranks; return their root."""
    for model in models:
        put(root, model, size=9 * UNIT, world_size=2, file_bytes=6 * UNIT)
    return root


async def read(store: WeightStore, shard: Shard) -> bytes:
    """Read a shard, checking that its chunks come in order and without gaps."""
    data = bytearray()
    async with store.open(shard) as chunks:
        async for chunk in chunks:
            assert chunk.offset_bytes == shard.buffer_offset_bytes + len(data)
            data += chunk.data
    return bytes(data)


async def read_rank(store: WeightStore, manifest: Manifest, rank: int = 0) -> bytes:
    """Read all shards of a rank."""
    return b"".join([await read(store, shard) for shard in manifest.shards_of(rank)])


async def collect(store: WeightStore, shard: Shard, got: bytearray) -> None:
    """Read a shard into `got`, which after an error holds what came before it."""
    async with store.open(shard) as chunks:
        async for chunk in chunks:
            got += chunk.data


async def exhaust(chunks: AsyncIterator[HostChunk]) -> None:
    """Ask for chunks until there are no more."""
    async for _ in chunks:
        pass


async def first_chunk(store: WeightStore, shard: Shard) -> HostChunk:
    """Take one chunk of a shard and leave."""
    async with store.open(shard) as chunks:
        return await anext(chunks)
