"""Write-through: a model read from a slow tier is on the disk afterwards, whole or not at all."""

from __future__ import annotations

import logging
import os
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest

from hotswap import ModelId
from hotswap.abc import HostChunk, Manifest, Shard, WeightStore, WrapperStore
from hotswap.backends.stores import NvmeStore, PinnedStore, TieredStore
from hotswap.backends.stores.disk_directory import ShardFile
from hotswap.backends.stores.write_through import WriteThroughStore
from hotswap.errors import ShardCorrupt, StoreError, TierFull
from hotswap.testing.cancel import cancel_everywhere
from tests.backends.stores.models import UNIT, put, read, read_rank

M = ModelId("m")


class Slow(WrapperStore):
    """A slow tier that counts its reads, and fails in those of `broken`."""

    def __init__(self, root: Path) -> None:
        super().__init__(NvmeStore(root, name="slow", chunk_bytes=UNIT))
        self.opened: list[str] = []
        self.broken: set[str] = set()

    @asynccontextmanager
    async def open(self, shard: Shard) -> AsyncGenerator[AsyncIterator[HostChunk]]:
        self.opened.append(shard.file)
        async with self.wrapped.open(shard) as chunks:
            yield self._breaking(chunks) if shard.file in self.broken else chunks

    async def _breaking(self, chunks: AsyncIterator[HostChunk]) -> AsyncIterator[HostChunk]:
        yield await anext(chunks)
        raise StoreError("The planted failure.")

    async def side_files(self, model: ModelId) -> dict[str, bytes]:
        return {"tokenizer.json": b"words of " + model.encode()}


@pytest.fixture
def model(tmp_path: Path) -> tuple[Manifest, list[bytes]]:
    return put(tmp_path / "far", size=6 * UNIT, world_size=2, file_bytes=4 * UNIT)


@pytest.fixture
def slow(tmp_path: Path) -> Slow:
    return Slow(tmp_path / "far")


@pytest.fixture
def near(tmp_path: Path) -> Path:
    return tmp_path / "near"


@asynccontextmanager
async def opened(
    slow: Slow, near: Path, **options: float
) -> AsyncGenerator[tuple[WriteThroughStore, NvmeStore]]:
    async with slow, NvmeStore(near) as disk, WriteThroughStore(slow, disk, **options) as tier:
        yield tier, disk


def names(near: Path) -> list[str]:
    """All entries of the directory, hidden ones included."""
    return os.listdir(near) if near.exists() else []


@pytest.mark.parametrize("host", [True, False])
async def test_the_second_load_comes_from_the_disk(
    model: tuple[Manifest, list[bytes]], slow: Slow, near: Path, host: bool
) -> None:
    manifest, ranks = model
    for turn in (1, 2):
        tiers: list[WeightStore] = [NvmeStore(near, chunk_bytes=UNIT), slow]
        async with TieredStore(*([PinnedStore("1 MiB")] if host else []), *tiers) as store:
            assert await store.manifest(M) == manifest
            for rank in (0, 1):
                assert await read_rank(store, manifest, rank) == ranks[rank]
        assert len(slow.opened) == len(manifest.shards), f"in turn {turn}"
        assert names(near) == ["m"]
    assert (near / "m" / "tokenizer.json").read_bytes() == b"words of m"


async def test_many_loads_at_once_make_one_copy(
    model: tuple[Manifest, list[bytes]], slow: Slow, near: Path
) -> None:
    manifest, ranks = model
    async with TieredStore(NvmeStore(near), slow) as store:

        async def load(rank: int) -> None:
            assert await read_rank(store, manifest, rank) == ranks[rank]

        async with anyio.create_task_group() as tasks:
            for rank in (0, 1, 0, 1):
                tasks.start_soon(load, rank)
    assert names(near) == ["m"]
    async with NvmeStore(near) as disk:
        assert await read_rank(disk, manifest, 1) == ranks[1]


async def test_shards_that_a_load_leaves_out_are_read_after_it(
    model: tuple[Manifest, list[bytes]], slow: Slow, near: Path
) -> None:
    manifest, ranks = model
    async with opened(slow, near, idle_s=0.0) as (tier, disk):
        assert await read_rank(tier, manifest, 1) == ranks[1]
        await tier.settled()
        assert disk.view().tiers[0].used_bytes == manifest.weight_bytes
        assert await read_rank(disk, manifest, 0) == ranks[0]
    assert sorted(slow.opened) == sorted(shard.file for shard in manifest.shards)


async def test_a_prefetch_without_a_host_tier_ends_on_the_disk(
    model: tuple[Manifest, list[bytes]], slow: Slow, near: Path
) -> None:
    manifest, ranks = model
    async with TieredStore(NvmeStore(near), slow) as store:
        for _ in range(2):
            await store.prefetch(M)
            assert store.view().tier_of(M) == "nvme"
        assert len(slow.opened) == len(manifest.shards)
        assert await read_rank(store, manifest) == ranks[0]
        assert len(slow.opened) == len(manifest.shards)


async def test_a_prefetch_cancelled_anywhere_leaves_all_or_nothing(
    model: tuple[Manifest, list[bytes]], slow: Slow, near: Path
) -> None:
    async with opened(slow, near) as (tier, disk):

        async def look() -> None:
            await tier.settled()
            assert names(near) in ([], ["m"])
            if names(near):
                await disk.remove(M)
            assert disk.view().tiers[0].used_bytes == 0

        assert await cancel_everywhere(lambda: tier.fetch(M), look) > 0


@pytest.mark.parametrize("good_shards", [0, 1])
async def test_a_load_that_breaks_off_leaves_the_disk_as_it_was(
    model: tuple[Manifest, list[bytes]], slow: Slow, near: Path, good_shards: int
) -> None:
    manifest, ranks = model
    async with TieredStore(NvmeStore(near), slow) as store:
        for shard in manifest.shards[:good_shards]:
            await read(store, shard)
        broken = manifest.shards[good_shards]
        slow.broken.add(broken.file)
        with pytest.raises(StoreError, match="planted"):
            await read(store, broken)
        slow.broken.clear()
        assert store.view().tier_of(M) in (None, "slow")
    assert names(near) == []
    async with TieredStore(NvmeStore(near), slow) as store:
        for rank in (0, 1):
            assert await read_rank(store, manifest, rank) == ranks[rank]
    assert names(near) == ["m"]


async def test_a_disk_that_fills_up_does_not_disturb_the_load(
    model: tuple[Manifest, list[bytes]],
    slow: Slow,
    near: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    manifest, ranks = model
    pieces = 0

    async def full(file: ShardFile, data: memoryview) -> None:
        nonlocal pieces
        pieces += 1
        if pieces == 3:
            raise TierFull("The disk is full.")
        await real(file, data)

    real = ShardFile.write
    monkeypatch.setattr(ShardFile, "write", full)
    async with TieredStore(NvmeStore(near), slow) as store:
        for rank in (0, 1):
            assert await read_rank(store, manifest, rank) == ranks[rank]
    assert names(near) == []
    told = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert told == ["No copy of model 'm' is kept on 'nvme': The disk is full."]


async def test_a_model_that_does_not_fit_is_loaded_without_a_copy(
    model: tuple[Manifest, list[bytes]], slow: Slow, near: Path, caplog: pytest.LogCaptureFixture
) -> None:
    manifest, ranks = model
    async with TieredStore(NvmeStore(near, budget=UNIT), slow) as store:
        for rank in (0, 1):
            assert await read_rank(store, manifest, rank) == ranks[rank]
        with pytest.raises(TierFull):
            await store.prefetch(M)
    assert names(near) == []
    assert "No copy of model 'm' is kept" in caplog.text


async def test_damage_found_late_sends_the_next_load_to_the_next_tier(
    model: tuple[Manifest, list[bytes]], slow: Slow, near: Path
) -> None:
    manifest, ranks = model
    put(near, size=6 * UNIT, world_size=2, file_bytes=4 * UNIT)
    shard = manifest.shards[0]
    file = near / "m" / shard.file
    whole = file.read_bytes()
    file.write_bytes(whole[:-1] + b"!")
    # One thread reads in order. Of several, the one with the first piece may end last, and then the damage is
    # found before a chunk was lent, and the next tier serves this load already.
    disk = NvmeStore(near, chunk_bytes=UNIT, threads=1)
    async with TieredStore(disk, slow) as store:
        with pytest.raises(ShardCorrupt, match=shard.file):
            await read(store, shard)
        assert slow.opened == []
        assert await read_rank(store, manifest) == ranks[0]
        assert slow.opened == [shard.file]
        file.write_bytes(whole)
        assert await read(disk, shard) == whole


async def test_a_damaged_copy_does_not_disturb_the_load_and_is_replaced(
    model: tuple[Manifest, list[bytes]], slow: Slow, near: Path
) -> None:
    manifest, ranks = model
    put(near, size=6 * UNIT, world_size=2, file_bytes=4 * UNIT)
    file = near / "m" / manifest.shards[0].file
    file.write_bytes(bytes(file.stat().st_size))
    async with TieredStore(NvmeStore(near), slow) as store:
        assert await read_rank(store, manifest) == ranks[0]
        assert slow.opened == [file.name]
    assert names(near) == ["m"]
    async with opened(slow, near, idle_s=0.0) as (tier, disk):
        with pytest.raises(StoreError, match=file.name):
            await read_rank(disk, manifest)
        assert await read_rank(tier, manifest) == ranks[0]
        await tier.settled()
        for rank in (0, 1):
            assert await read_rank(disk, manifest, rank) == ranks[rank]
    assert names(near) == ["m"]
