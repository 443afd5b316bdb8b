"""What is the simulated store's own: its bytes, its times, and the cache in front of its home tier."""

from __future__ import annotations

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotswap import ModelId, Shard, TierFull, TierView
from hotswap.backends.sim import SimStore, sim_bytes, sim_manifest
from hotswap.testing.virtual_time import run, virtual_time

A, B, C = map(ModelId, "abc")
DISK = TierView(name="disk", bytes_per_s=10.0)


def cached(capacity_bytes: int | None) -> SimStore:
    host = TierView(name="host", bytes_per_s=100.0, capacity_bytes=capacity_bytes)
    return SimStore({"a": 100, "b": 100, "c": 150}, home=DISK, cache=host, chunk_bytes=40)


async def shard_of(store: SimStore, model: ModelId) -> Shard:
    return (await store.manifest(model)).shards[0]


async def seconds_to_read(store: SimStore, model: ModelId) -> float:
    began_s = anyio.current_time()
    async with store.open(await shard_of(store, model)) as chunks:
        async for _ in chunks:
            pass
    return anyio.current_time() - began_s


def in_cache(store: SimStore) -> set[str]:
    return {entry.model for entry in store.view().residency if entry.tier == "host"}


@given(st.integers(0, 10**12), st.integers(0, 9000), st.integers(0, 9000))
def test_bytes_are_a_function_of_their_place(offset_bytes: int, one: int, two: int) -> None:
    whole = sim_bytes(A, offset_bytes, one + two)
    assert len(whole) == one + two
    assert sim_bytes(A, offset_bytes, one) + sim_bytes(A, offset_bytes + one, two) == whole


@given(size=st.integers(1, 20_000), num_shards=st.integers(1, 4), chunk_bytes=st.integers(100, 30_000))
def test_what_is_lent_does_not_depend_on_chunks_and_shards(
    size: int, num_shards: int, chunk_bytes: int
) -> None:
    async def read() -> bytes:
        store = SimStore([sim_manifest("a", size, num_shards=num_shards)], chunk_bytes=chunk_bytes)
        data = bytearray()
        for shard in (await store.manifest(A)).shards:
            async with store.open(shard) as chunks:
                async for chunk in chunks:
                    assert len(chunk.data) <= chunk_bytes
                    data += chunk.data
        return bytes(data)

    assert run(read) == sim_bytes(A, 0, size)


@virtual_time
async def test_a_large_model_takes_no_memory() -> None:
    store = SimStore({"a": "140 GB"}, chunk_bytes="1 MiB")
    assert (await store.manifest(A)).weight_bytes == 140 * 10**9
    async with store.open(await shard_of(store, A)) as chunks:
        async for chunk in chunks:
            assert len(chunk.data) == 1 << 20
            break
    assert store.num_lent == 0


@virtual_time
async def test_a_chunk_cannot_be_read_late() -> None:
    store = cached(None)
    async with store.open(await shard_of(store, A)) as chunks:
        first = await anext(chunks)
        await anext(chunks)
        with pytest.raises(ValueError, match="released"):
            first.data[0]


@virtual_time
async def test_reading_fills_the_cache_which_is_faster() -> None:
    store = cached(None)
    assert await seconds_to_read(store, A) == pytest.approx(10.0)
    assert await seconds_to_read(store, A) == pytest.approx(1.0)
    assert store.view().tier_of(A) == "host"
    assert store.view().load_s(A) == pytest.approx(1.0)
    assert store.view().load_s(B) == pytest.approx(10.0)


@virtual_time
async def test_the_least_recently_used_model_makes_room() -> None:
    store = cached(250)
    for model in (A, B, A, C):
        await seconds_to_read(store, model)
    assert in_cache(store) == {"a", "c"}, "b was not used for longest"
    assert store.view().tiers[0].used_bytes == 250


@virtual_time
async def test_a_model_that_is_read_makes_no_room() -> None:
    store = cached(250)
    await store.prefetch(A)
    await store.prefetch(B)
    async with store.open(await shard_of(store, A)) as one, store.open(await shard_of(store, B)) as two:
        await anext(one)
        await anext(two)
        with pytest.raises(TierFull, match="'c' exceeds what tier 'host' can free by 100 bytes"):
            await store.prefetch(C)
        assert await seconds_to_read(store, C) == pytest.approx(15.0), "it can be read past the cache"
    assert in_cache(store) == {"a", "b"}
    await store.prefetch(C)
    assert in_cache(store) == {"b", "c"}


@virtual_time
async def test_a_model_larger_than_the_cache_is_refused_there_but_read() -> None:
    store = cached(120)
    await store.prefetch(A)
    with pytest.raises(TierFull):
        await store.prefetch(C)
    assert in_cache(store) == {"a"}
    assert await seconds_to_read(store, C) == pytest.approx(15.0)


@virtual_time
async def test_a_store_without_a_cache_has_nothing_to_prefetch() -> None:
    store = SimStore({"a": 100}, home=DISK, cache=None)
    await store.prefetch(A)
    await store.drop(A)
    assert [tier.name for tier in store.view().tiers] == ["disk"]
    assert store.view().tier_of(A) == "disk"
    assert anyio.current_time() == 0
