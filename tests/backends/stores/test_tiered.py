"""The tiered store reads the fastest tier, keeps one copy in host memory, and reads once for all readers."""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import NoReturn

import anyio
import pytest

from hotswap import Model, ModelId
from hotswap.abc import HostChunk, Shard, WeightStore, WrapperStore
from hotswap.backends.stores import NvmeStore, PinnedStore, TieredStore
from hotswap.errors import ConfigError, ShardCorrupt, ShardMissing, StoreError, TierFull
from tests.backends.stores.models import UNIT, exhaust, first_chunk, put, read, read_rank

M = ModelId("m")


class Counting(WrapperStore):
    """Counts the reads of shards, and fails the first `failures` of them after `good` chunks."""

    def __init__(self, store: WeightStore, *, failures: int = 0, good: int = 0) -> None:
        super().__init__(store)
        self.opened: list[Shard] = []
        self.failures = failures
        self.good = good

    @asynccontextmanager
    async def open(self, shard: Shard) -> AsyncGenerator[AsyncIterator[HostChunk]]:
        self.opened.append(shard)
        async with self.wrapped.open(shard) as chunks:
            if len(self.opened) <= self.failures:
                yield self._failing(chunks)
            else:
                yield chunks

    async def _failing(self, chunks: AsyncIterator[HostChunk]) -> AsyncIterator[HostChunk]:
        for _ in range(self.good):
            yield await anext(chunks)
        raise StoreError("The planted failure.")


@pytest.fixture
def disk(tmp_path: Path) -> Counting:
    return Counting(NvmeStore(tmp_path, chunk_bytes=UNIT))


def host(units: int = 64) -> PinnedStore:
    return PinnedStore(units * UNIT, chunk_bytes=UNIT)


def used(store: WeightStore) -> int:
    return store.view().tiers[0].used_bytes


async def test_a_second_read_comes_from_host_memory(tmp_path: Path, disk: Counting) -> None:
    manifest, ranks = put(tmp_path, world_size=2)
    async with TieredStore(host(), disk) as store:
        for rank in (0, 1):
            assert await read_rank(store, manifest, rank) == ranks[rank]
        assert store.view().tier_of(M) == "pinned"
        assert len(disk.opened) == len(manifest.shards)
        for rank in (0, 1):
            assert await read_rank(store, manifest, rank) == ranks[rank]
        assert len(disk.opened) == len(manifest.shards)
        assert (await first_chunk(store, manifest.shards[0])).tier == "pinned"
        assert store.view().load_s(M) < float("inf")


async def test_the_first_read_says_that_it_came_from_disk(tmp_path: Path, disk: Counting) -> None:
    manifest, _ = put(tmp_path)
    async with TieredStore(host(), disk) as store, store.open(manifest.shards[0]) as chunks:
        assert [chunk.tier async for chunk in chunks] == ["nvme", "nvme"]


async def test_many_readers_make_one_read(tmp_path: Path, disk: Counting) -> None:
    manifest, ranks = put(tmp_path, size=16 * UNIT, file_bytes=16 * UNIT)
    read_back: list[bytes] = []
    async with TieredStore(host(), disk) as store:

        async def reader() -> None:
            read_back.append(await read(store, manifest.shards[0]))

        async with anyio.create_task_group() as tasks:
            for _ in range(5):
                tasks.start_soon(reader)
    assert read_back == [ranks[0]] * 5
    assert len(disk.opened) == 1


async def test_one_task_may_open_a_shard_twice(tmp_path: Path, disk: Counting) -> None:
    manifest, ranks = put(tmp_path)
    shard = manifest.shards[0]
    async with TieredStore(host(), disk) as store, store.open(shard) as outer:
        await anext(outer)
        assert await read(store, shard) == ranks[0][: shard.size_bytes]
        await exhaust(outer)


@pytest.mark.parametrize("chunks_read", [0, 1])
async def test_an_incomplete_read_leaves_the_host_tier_as_it_was(
    tmp_path: Path, disk: Counting, chunks_read: int
) -> None:
    manifest, _ = put(tmp_path, size=64 * UNIT, file_bytes=64 * UNIT)
    async with TieredStore(host(), disk) as store:
        async with store.open(manifest.shards[0]) as chunks:
            for _ in range(chunks_read):
                await anext(chunks)
        assert used(store) == 0
        assert store.view().tier_of(M) == "nvme"


async def test_a_reader_who_leaves_does_not_disturb_the_others(tmp_path: Path, disk: Counting) -> None:
    manifest, ranks = put(tmp_path, size=64 * UNIT, file_bytes=64 * UNIT)
    shard = manifest.shards[0]
    async with TieredStore(host(), disk) as store, AsyncExitStack() as others:
        leaver = await others.enter_async_context(store.open(shard))
        async with store.open(shard) as chunks:
            await anext(leaver)
            first = bytes((await anext(chunks)).data)
            await others.aclose()
            rest = b"".join([bytes(chunk.data) async for chunk in chunks])
        assert first + rest == ranks[0]
        assert store.view().tier_of(M) == "pinned"


async def test_a_corrupt_shard_is_not_kept(tmp_path: Path, disk: Counting) -> None:
    manifest, _ = put(tmp_path, size=8 * UNIT, file_bytes=8 * UNIT)
    file = tmp_path / M / manifest.shards[0].file
    file.write_bytes(bytes(file.stat().st_size))
    async with TieredStore(host(), disk) as store:
        for _ in range(2):
            with pytest.raises(ShardCorrupt, match=file.name):
                await read(store, manifest.shards[0])
        assert used(store) == 0
        with pytest.raises(ShardCorrupt, match=file.name):
            await store.prefetch(M)
        assert used(store) == 0


async def test_a_shard_is_lent_without_a_host_tier_that_is_too_small(tmp_path: Path, disk: Counting) -> None:
    manifest, ranks = put(tmp_path)
    async with TieredStore(host(4), disk) as store:
        assert await read_rank(store, manifest) == ranks[0]
        assert used(store) == 0
        with pytest.raises(TierFull, match="pinned"):
            await store.prefetch(M)


async def test_the_least_recently_used_model_makes_room(tmp_path: Path, disk: Counting) -> None:
    for model in "abc":
        put(tmp_path, model, size=4 * UNIT)
    async with TieredStore(host(8), disk) as store:
        await store.prefetch(ModelId("a"))
        await store.prefetch(ModelId("b"))
        await read_rank(store, await store.manifest(ModelId("a")))
        await store.prefetch(ModelId("c"))
        view = store.view()
        assert [view.tier_of(ModelId(model)) for model in "abc"] == ["pinned", "nvme", "pinned"]


async def test_a_lent_model_is_never_evicted(tmp_path: Path, disk: Counting) -> None:
    lent, ranks = put(tmp_path, "lent", size=4 * UNIT, file_bytes=4 * UNIT)
    other, other_ranks = put(tmp_path, "other", size=8 * UNIT)
    async with TieredStore(host(8), disk) as store:
        await store.prefetch(ModelId("lent"))
        async with store.open(lent.shards[0]) as chunks:
            chunk = await anext(chunks)
            with pytest.raises(TierFull):
                await store.prefetch(ModelId("other"))
            assert await read_rank(store, other) == other_ranks[0]
            assert bytes(chunk.data) == ranks[0][:UNIT]
        await store.prefetch(ModelId("other"))
        assert store.view().tier_of(ModelId("lent")) == "nvme"


async def test_drop_frees_once_nothing_is_lent(tmp_path: Path, disk: Counting) -> None:
    manifest, ranks = put(tmp_path, size=4 * UNIT, file_bytes=4 * UNIT)
    async with TieredStore(host(), disk) as store:
        await store.prefetch(M)
        async with anyio.create_task_group() as tasks, store.open(manifest.shards[0]) as chunks:
            chunk = await anext(chunks)
            tasks.start_soon(store.drop, M)
            await anyio.wait_all_tasks_blocked()
            assert used(store) == 4 * UNIT
            assert store.view().tier_of(M) == "pinned"
            assert bytes(chunk.data) == ranks[0][:UNIT]
        assert used(store) == 0
        await store.drop(M)


async def test_a_tier_that_fails_before_its_first_chunk_is_skipped(tmp_path: Path, disk: Counting) -> None:
    manifest, ranks = put(tmp_path)
    bad = Counting(NvmeStore(tmp_path, name="bad"), failures=99)
    async with TieredStore(bad, disk) as store:
        assert await read_rank(store, manifest) == ranks[0]
    async with TieredStore(host(), bad, disk) as store:
        assert await read_rank(store, manifest) == ranks[0]


async def test_a_prefetch_survives_a_tier_that_fails_halfway(tmp_path: Path, disk: Counting) -> None:
    manifest, ranks = put(tmp_path)
    bad = Counting(NvmeStore(tmp_path, name="bad", chunk_bytes=UNIT), failures=99, good=1)
    async with TieredStore(host(), bad, disk) as store:
        await store.prefetch(M)
        assert await read_rank(store, manifest) == ranks[0]


async def test_bytes_already_lent_are_not_taken_back(tmp_path: Path, disk: Counting) -> None:
    manifest, _ = put(tmp_path)
    bad = Counting(NvmeStore(tmp_path, name="bad", chunk_bytes=UNIT), failures=99, good=1)
    async with TieredStore(bad, disk) as store:
        with pytest.raises(StoreError, match="planted"):
            await read(store, manifest.shards[0])


async def test_a_store_of_another_class_is_a_tier(tmp_path: Path) -> None:
    class Elsewhere(WrapperStore):
        """Raises what no store should."""

        def open(self, shard: Shard) -> NoReturn:
            raise OSError("unplugged")

    manifest, _ = put(tmp_path)
    async with TieredStore(host(), Elsewhere(NvmeStore(tmp_path))) as store:
        with pytest.raises(OSError, match="unplugged"):
            await read(store, manifest.shards[0])
        assert used(store) == 0
        assert store.view().tier_of(M) == "nvme"


async def test_a_model_is_not_served_from_the_copy_of_an_earlier_conversion(tmp_path: Path) -> None:
    old, _ = put(tmp_path)
    disk = NvmeStore(tmp_path)
    async with TieredStore(host(), disk) as store:
        await store.prefetch(M)
        os.rename(tmp_path / M, tmp_path / "old")
        _, ranks = put(tmp_path, seed=1)
        new = await disk.manifest(M)
        assert await read_rank(store, new) == ranks[0]
        assert await store.manifest(M) == new
        with pytest.raises(StoreError):
            await read(store, old.shards[0])


async def test_models_that_are_nowhere_are_told_by_name(disk: Counting) -> None:
    async with TieredStore(host(), disk) as store:
        for verb in (store.manifest, store.prefetch):
            with pytest.raises(ShardMissing, match="nowhere"):
                await verb(ModelId("nowhere"))


async def test_a_store_that_was_not_entered_says_so(tmp_path: Path, disk: Counting) -> None:
    manifest, _ = put(tmp_path)
    with pytest.raises(StoreError, match="async with"):
        await read(TieredStore(host(), disk), manifest.shards[0])


def test_tiers_have_an_order_and_names_of_their_own(tmp_path: Path) -> None:
    for tiers in ((), (NvmeStore(tmp_path), NvmeStore(tmp_path)), (NvmeStore(tmp_path), host())):
        with pytest.raises(ConfigError):
            TieredStore(*tiers)


async def test_import_goes_to_the_tier_that_can(tmp_path: Path, checkpoint: Path) -> None:
    async with TieredStore(host(256), NvmeStore(tmp_path)) as store:
        await store.import_model(Model("tiny", checkpoint))
        assert store.view().tier_of(ModelId("tiny")) == "nvme"
        assert await store.tokenizer(ModelId("tiny")) is not None
    async with TieredStore(host()) as store:
        with pytest.raises(ConfigError, match="tiny"):
            await store.import_model(Model("tiny", checkpoint))
        assert await store.tokenizer(ModelId("tiny")) is None
