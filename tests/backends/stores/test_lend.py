"""A lent buffer is the store's own memory, whole, and kept while it is lent."""

from __future__ import annotations

from pathlib import Path

import anyio
import pytest

from hotswap import ModelId
from hotswap.abc import HostBuffer, SupportsLend
from hotswap.backends.stores import NvmeStore, PinnedStore, TieredStore
from hotswap.backends.torch.buffers import in_place
from hotswap.errors import TierFull
from hotswap.testing.cancel import cancel_everywhere
from tests.backends.stores.models import UNIT, put, read_rank

M = ModelId("m")


def tiered(root: Path, units: int = 64) -> TieredStore:
    return TieredStore(PinnedStore(units * UNIT, chunk_bytes=UNIT), NvmeStore(root, chunk_bytes=UNIT))


def used(store: TieredStore) -> int:
    return store.view().tiers[0].used_bytes


def address(buffer: HostBuffer | None) -> int:
    assert buffer is not None
    return in_place(buffer.data).data_ptr()


async def test_a_resident_model_is_lent_in_place(tmp_path: Path) -> None:
    manifest, ranks = put(tmp_path, world_size=2)
    async with tiered(tmp_path) as store:
        assert isinstance(store, SupportsLend)
        await store.prefetch(M)
        for rank in (0, 1):
            async with store.lend(manifest, rank) as buffer, store.lend(manifest, rank) as again:
                assert buffer is not None
                assert bytes(buffer.data) == ranks[rank]
                assert (buffer.tier, buffer.data.readonly) == ("pinned", True)
                assert address(buffer) == address(again)
        assert used(store) == 2 * manifest.buffer_bytes


async def test_a_model_that_is_not_resident_is_loaded_first(tmp_path: Path) -> None:
    manifest, ranks = put(tmp_path)
    async with tiered(tmp_path) as store:
        async with store.lend(manifest) as buffer:
            assert buffer is not None
            assert (buffer.tier, bytes(buffer.data)) == ("nvme", ranks[0])
        assert store.view().tier_of(M) == "pinned"


async def test_a_loan_and_many_readers_share_one_buffer(tmp_path: Path) -> None:
    manifest, ranks = put(tmp_path, size=16 * UNIT)
    places: set[int] = set()
    async with tiered(tmp_path, units=16) as store:

        async def borrow() -> None:
            async with store.lend(manifest) as buffer:
                places.add(address(buffer))

        async with anyio.create_task_group() as tasks:
            for _ in range(3):
                tasks.start_soon(borrow)
                tasks.start_soon(read_rank, store, manifest)
        assert len(places) == 1
        assert await read_rank(store, manifest) == ranks[0]


async def test_a_lent_model_is_neither_evicted_nor_dropped(tmp_path: Path) -> None:
    manifest, ranks = put(tmp_path, size=4 * UNIT)
    other, other_ranks = put(tmp_path, "other", size=8 * UNIT)
    async with tiered(tmp_path, units=8) as store, anyio.create_task_group() as tasks:
        async with store.lend(manifest) as buffer:
            assert buffer is not None
            tasks.start_soon(store.drop, M)
            with pytest.raises(TierFull):
                await store.prefetch(ModelId("other"))
            async with store.lend(other) as nothing:
                assert nothing is None
            assert await read_rank(store, other) == other_ranks[0]
            assert bytes(buffer.data) == ranks[0]
        await store.prefetch(ModelId("other"))
        assert store.view().tier_of(M) == "nvme"


async def test_a_model_of_another_conversion_is_not_lent(tmp_path: Path) -> None:
    old, _ = put(tmp_path)
    async with tiered(tmp_path) as store:
        await store.prefetch(M)
        (tmp_path / M).rename(tmp_path / "old")
        new, ranks = put(tmp_path, seed=1)
        async with store.lend(old) as of_old, store.lend(new) as none:
            assert of_old is not None
            assert none is None  # the old weights are still lent
        async with store.lend(new) as of_new:
            assert of_new is not None
            assert bytes(of_new.data) == ranks[0]


async def test_a_store_without_a_host_tier_lends_nothing(tmp_path: Path) -> None:
    manifest, _ = put(tmp_path)
    async with TieredStore(NvmeStore(tmp_path)) as store, store.lend(manifest) as buffer:
        assert buffer is None


async def test_a_loan_cancelled_anywhere_leaves_no_trace(tmp_path: Path) -> None:
    manifest, _ = put(tmp_path)
    async with tiered(tmp_path) as store:

        async def borrow() -> None:
            async with store.lend(manifest) as buffer:
                assert buffer is not None
                await anyio.lowlevel.checkpoint()

        async def look() -> None:
            assert store.num_lent == 0
            assert used(store) == sum(
                entry.size_bytes for entry in store.view().residency if entry.tier == "pinned"
            )
            await store.drop(M)

        await cancel_everywhere(borrow, look)


async def test_lent_memory_outlives_a_store_that_drops_it(tmp_path: Path) -> None:
    manifest, ranks = put(tmp_path)
    async with tiered(tmp_path) as store:
        async with store.lend(manifest) as buffer:
            assert buffer is not None
            kept = in_place(buffer.data)
            del buffer
        await store.drop(M)
        assert used(store) == 0
    assert bytes(kept.tolist()) == ranks[0]
