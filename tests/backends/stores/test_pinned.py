"""The host tier by itself: filling, lending and pinning."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path
from types import SimpleNamespace

import anyio
import pytest

from hotswap import ModelId
from hotswap.abc import Manifest
from hotswap.backends.stores import NvmeStore, PinnedStore, TieredStore, pinned
from hotswap.errors import ShardMissing, TierFull
from hotswap.testing.cancel import cancel_everywhere
from tests.backends.stores.models import UNIT, exhaust, put, read, read_rank

M = ModelId("m")


async def admit(store: PinnedStore, manifest: Manifest, data: bytes) -> None:
    """Fill rank 0 by hand, as a tiered store does."""
    async with store.reserve(manifest, 0) as reservation:
        for shard in manifest.shards_of(0):
            start = shard.buffer_offset_bytes
            reservation.place(shard)[:] = data[start : start + shard.size_bytes]
            reservation.commit(shard)
        reservation.keep()


def used(store: PinnedStore) -> int:
    return store.view().tiers[0].used_bytes


async def test_what_was_committed_is_lent(tmp_path: Path) -> None:
    manifest, ranks = put(tmp_path)
    async with PinnedStore("1 MiB", chunk_bytes=UNIT) as store:
        await admit(store, manifest, ranks[0])
        assert await store.manifest(M) == manifest
        assert await read_rank(store, manifest) == ranks[0]
        assert store.num_lent == 0
    assert used(store) == 0


async def test_chunks_are_views_not_copies(tmp_path: Path) -> None:
    manifest, ranks = put(tmp_path)
    async with PinnedStore("1 MiB") as store:
        await admit(store, manifest, ranks[0])
        places = [await _address(store, manifest) for _ in range(2)]
    assert places[0] == places[1]


async def _address(store: PinnedStore, manifest: Manifest) -> int:
    async with store.open(manifest.shards[0]) as chunks:
        return ctypes.addressof(ctypes.c_char.from_buffer((await anext(chunks)).data))


async def test_what_was_not_committed_is_not_lent(tmp_path: Path) -> None:
    manifest, ranks = put(tmp_path)
    first, second, *_ = manifest.shards
    async with PinnedStore("1 MiB") as store, store.reserve(manifest, 0) as reservation:
        reservation.place(first)[:] = ranks[0][: first.size_bytes]
        reservation.commit(first)
        assert await read(store, first) == ranks[0][: first.size_bytes]
        with pytest.raises(ShardMissing, match=second.file):
            await read(store, second)
        with pytest.raises(ShardMissing, match="'m'"):
            await store.manifest(M)
        assert store.view().residency == ()


async def test_a_hold_that_kept_nothing_takes_no_memory(tmp_path: Path) -> None:
    manifest, _ = put(tmp_path)
    async with PinnedStore("1 MiB") as store:
        async with store.reserve(manifest, 0), store.reserve(manifest, 0):
            assert used(store) == manifest.buffer_bytes
        assert used(store) == 0


async def test_a_hold_that_does_not_fit_changes_nothing(tmp_path: Path) -> None:
    small, ranks = put(tmp_path, "small", size=2 * UNIT)
    large, _ = put(tmp_path, "large", size=8 * UNIT)
    async with PinnedStore(7 * UNIT) as store:
        await admit(store, small, ranks[0])
        with pytest.raises(TierFull, match="pinned"):
            await admit(store, large, bytes(large.buffer_bytes))
        assert await read_rank(store, small) == ranks[0]


async def test_a_model_is_loaded_without_memory_that_the_system_does_not_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest, ranks = put(tmp_path)

    def none(size_bytes: int) -> memoryview:
        raise MemoryError(f"There is no room for {size_bytes} bytes.")

    async with TieredStore(PinnedStore("1 MiB"), NvmeStore(tmp_path)) as store:
        monkeypatch.setattr(pinned, "aligned_buffer", none)
        with pytest.raises(TierFull, match="smaller budget"):
            await store.prefetch(M)
        async with store.lend(manifest) as nothing:
            assert nothing is None
        assert await read_rank(store, manifest) == ranks[0]
        monkeypatch.undo()
        await store.prefetch(M)


async def test_admission_cancelled_anywhere_gives_the_bytes_back(tmp_path: Path) -> None:
    old, old_ranks = put(tmp_path, "old", size=4 * UNIT)
    new, ranks = put(tmp_path, "new", size=4 * UNIT)
    async with PinnedStore(4 * UNIT) as store:

        async def evict() -> None:
            await admit(store, new, ranks[0])
            await admit(store, old, old_ranks[0])

        async def look() -> None:
            assert store.num_lent == 0
            assert used(store) == sum(entry.size_bytes for entry in store.view().residency) <= 4 * UNIT

        await cancel_everywhere(evict, look)


async def test_a_prefetch_cancels_a_drop(tmp_path: Path) -> None:
    manifest, _ = put(tmp_path)
    async with TieredStore(PinnedStore("1 MiB"), NvmeStore(tmp_path)) as store:
        await store.prefetch(M)
        async with anyio.create_task_group() as tasks, store.open(manifest.shards[0]) as chunks:
            tasks.start_soon(store.drop, M)
            await anyio.wait_all_tasks_blocked()
            await store.prefetch(M)
            await exhaust(chunks)
        assert store.view().tier_of(M) == "pinned"


async def test_a_pinned_model_is_not_evicted(tmp_path: Path) -> None:
    for model in "abc":
        put(tmp_path, model, size=4 * UNIT)
    a, b, c = map(ModelId, "abc")
    async with TieredStore(PinnedStore(8 * UNIT), NvmeStore(tmp_path)) as store:
        store.pin(a)
        for model in (a, b, c):
            await store.prefetch(model)
        assert [store.view().tier_of(model) for model in (a, b, c)] == ["pinned", "nvme", "pinned"]
        store.pin(c)
        with pytest.raises(TierFull, match="unpin"):
            await store.prefetch(b)
        store.unpin(a)
        await store.prefetch(b)
        assert [store.view().tier_of(model) for model in (a, b, c)] == ["nvme", "pinned", "pinned"]
        await store.drop(c)
        assert store.view().tier_of(c) == "nvme"


class FakeCuda:
    """Counts what is pinned, as CUDA's runtime would be asked to."""

    def __init__(self, status: int = 0) -> None:
        self.pinned: dict[int, int] = {}
        self.status = status

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        if not self.status:
            self.pinned[address] = size
        return self.status

    def cudaHostUnregister(self, address: int) -> int:
        del self.pinned[address]
        return 0


def with_cuda(monkeypatch: pytest.MonkeyPatch, cuda: FakeCuda, *, is_used: bool = True) -> None:
    """Have the process see a device, which it computes on already or not."""
    of_torch = SimpleNamespace(is_available=lambda: True, is_initialized=lambda: is_used, cudart=lambda: cuda)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=of_torch))


async def test_memory_is_pinned_while_it_is_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest, ranks = put(tmp_path)
    cuda = FakeCuda()
    with_cuda(monkeypatch, cuda)
    async with PinnedStore("1 MiB") as store:
        await admit(store, manifest, ranks[0])
        assert list(cuda.pinned.values()) == [manifest.buffer_bytes]
        async with store.open(manifest.shards[0]) as chunks:
            chunk = await anext(chunks)
            assert chunk.pinned
            assert min(cuda.pinned) == ctypes.addressof(ctypes.c_char.from_buffer(chunk.data))
        await store.drop(M)
        assert cuda.pinned == {}


async def test_memory_is_pinned_by_no_process_that_does_not_use_the_device_and_by_others_at_its_next_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pinning makes a context of CUDA, and with one a process must not fork: a core of vLLM, for instance."""
    manifest, ranks = put(tmp_path)
    cuda = FakeCuda()
    with_cuda(monkeypatch, cuda, is_used=False)
    async with PinnedStore("1 MiB") as store:
        await admit(store, manifest, ranks[0])
        async with store.lend(manifest) as buffer:
            assert buffer is not None
            assert not buffer.pinned
        assert cuda.pinned == {}
        with_cuda(monkeypatch, cuda)
        for _ in range(2):
            async with store.lend(manifest) as buffer:
                assert buffer is not None
                assert buffer.pinned
        assert list(cuda.pinned.values()) == [manifest.buffer_bytes]
    assert cuda.pinned == {}


async def test_memory_that_cannot_be_pinned_is_used_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest, ranks = put(tmp_path)
    with_cuda(monkeypatch, FakeCuda(status=2))
    async with PinnedStore("1 MiB") as store:
        await admit(store, manifest, ranks[0])
        assert await read_rank(store, manifest) == ranks[0]
        async with store.open(manifest.shards[0]) as chunks:
            assert not (await anext(chunks)).pinned
