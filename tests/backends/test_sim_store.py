"""The simulated store beside its contract: its bytes, its times, and the cache in front of its home tier."""

from __future__ import annotations

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotswap import ModelId, StoreView, TierView
from hotswap.abc import Shard
from hotswap.backends.sim import SimNodes, SimStore, sim_bytes, sim_manifest
from hotswap.errors import ConfigError, ShardMissing, TierFull
from hotswap.offline.virtual_time import run, virtual_time

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
def test_bytes_are_a_function_of_their_offset(offset_bytes: int, one: int, two: int) -> None:
    whole = sim_bytes(A, offset_bytes, one + two)
    assert len(whole) == one + two
    assert sim_bytes(A, offset_bytes, one) + sim_bytes(A, offset_bytes + one, two) == whole


@given(size=st.integers(1, 20_000), num_shards=st.integers(1, 4), chunk_bytes=st.integers(100, 30_000))
def test_lent_bytes_do_not_depend_on_chunks_and_shards(size: int, num_shards: int, chunk_bytes: int) -> None:
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
async def test_the_least_recently_used_model_is_dropped() -> None:
    store = cached(250)
    for model in (A, B, A, C):
        await seconds_to_read(store, model)
    assert in_cache(store) == {"a", "c"}, "b was not used for longest"
    assert store.view().tiers[0].used_bytes == 250


@virtual_time
async def test_a_model_that_is_being_read_is_not_dropped() -> None:
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


# ---------------------------------------------------------------------- bandwidth that is shared


def shared(*, capacity_bytes: int | None = 0, node: str = "") -> SimStore:
    """A disk of 10 bytes a second and a host tier of 100, in chunks of 5."""
    host = TierView(name="host", bytes_per_s=100.0, capacity_bytes=capacity_bytes, node=node)
    disk = TierView(name="disk", bytes_per_s=10.0, node=node)
    return SimStore({"a": 100, "b": 100, "c": 150}, home=disk, cache=host, chunk_bytes=5, shared=True)


async def read_together(reads: list[tuple[SimStore, ModelId, float]]) -> list[float]:
    """Begin reads at given times; return when each was over."""
    ended = [0.0] * len(reads)

    async def read(number: int, store: SimStore, model: ModelId, at_s: float) -> None:
        await anyio.sleep_until(at_s)
        await seconds_to_read(store, model)
        ended[number] = anyio.current_time()

    async with anyio.create_task_group() as readers:
        for number, (store, model, at_s) in enumerate(reads):
            readers.start_soon(read, number, store, model, at_s)
    return ended


@given(st.lists(st.tuples(st.sampled_from([A, B, C]), st.floats(0, 30)), min_size=1, max_size=5))
def test_a_disk_keeps_to_its_bandwidth_and_is_never_idle_while_bytes_are_queued(
    asked: list[tuple[ModelId, float]],
) -> None:
    """The last byte arrives when a queue of all bytes would be empty, whatever the order of the reads."""
    sizes = {A: 100, B: 100, C: 150}
    free_s = 0.0
    for model, at_s in sorted(asked, key=lambda read: read[1]):
        free_s = max(free_s, at_s) + sizes[model] / 10

    async def play() -> list[float]:
        store = shared()
        return await read_together([(store, model, at_s) for model, at_s in asked])

    ended = run(play)
    assert max(ended) == pytest.approx(free_s)
    for (model, at_s), end_s in zip(asked, ended, strict=True):
        assert end_s - at_s >= sizes[model] / 10 - 1e-9


@virtual_time
async def test_concurrent_reads_take_turns_by_chunks() -> None:
    store = shared()
    ends = await read_together([(store, A, 0.0), (store, B, 0.0)])
    assert ends == pytest.approx([19.5, 20.0])
    alone = cached(0)
    ends = await read_together([(alone, A, 20.0), (alone, B, 20.0)])
    assert ends == pytest.approx([30.0, 30.0]), "by default each read has the whole bandwidth"


@virtual_time
async def test_bytes_yet_to_be_read_are_queued() -> None:
    store = shared()
    assert store.view().load_s(B) == 10.0
    async with store.open(await shard_of(store, A)) as chunks:
        await anext(chunks)
        assert store.view().tiers[-1].queued_bytes == 95
        assert store.view().load_s(B) == pytest.approx(19.5)
    assert store.view().tiers[-1].queued_bytes == 0, "a read that was left early has nothing queued"


@given(st.lists(st.tuples(st.sampled_from([A, B, C]), st.floats(0, 30)), min_size=1, max_size=6))
def test_a_disk_reads_each_model_once_where_the_host_tier_has_room(
    asked: list[tuple[ModelId, float]],
) -> None:
    """The disk reads each model's bytes once, and no read ends before its own bytes could have come."""
    sizes = {A: 100, B: 100, C: 150}
    first_s: dict[ModelId, float] = {}
    for model, at_s in sorted(asked, key=lambda read: read[1]):
        first_s.setdefault(model, at_s)
    free_s = 0.0
    for model, at_s in first_s.items():
        free_s = max(free_s, at_s) + sizes[model] / 10

    async def play() -> list[float]:
        store = shared(capacity_bytes=350)
        ended = await read_together([(store, model, at_s) for model, at_s in asked])
        assert in_cache(store) == set(first_s)
        assert [tier.queued_bytes for tier in store.view().tiers] == [0, 0]
        assert store.view().loading == ()
        return ended

    ended = run(play)
    from_memory_s = sum(sizes[model] / 100 for model, _ in asked)
    for (model, at_s), end_s in zip(asked, ended, strict=True):
        assert end_s >= first_s[model] + sizes[model] / 10 - 1e-9
        assert end_s >= at_s + sizes[model] / 100 - 1e-9
        assert end_s <= max(free_s, at_s) + from_memory_s + 1e-9


@virtual_time
async def test_a_later_read_takes_what_is_cached_and_shares_the_rest() -> None:
    """60 bytes are loaded by 6 s: 0.6 s from memory, and the rest with the bandwidth of the disk."""
    store = shared(capacity_bytes=350)
    ends = await read_together([(store, A, 0.0), (store, A, 6.0), (store, A, 12.0)])
    assert ends == pytest.approx([10.0, 10.0, 13.0])


@virtual_time
async def test_the_view_has_a_shared_load_once() -> None:
    store = shared(capacity_bytes=350)
    async with store.open(await shard_of(store, A)) as chunks, store.open(await shard_of(store, A)) as others:
        await anext(chunks)
        await anext(others)
        (loading,) = store.view().loading
        assert (loading.model, loading.tier, loading.size_bytes) == (A, "disk", 95)
        assert store.view().tiers[-1].queued_bytes == 95
        assert store.view().load_s(A) == pytest.approx(9.5), "no byte is counted twice"
        assert store.view().load_s(B) == pytest.approx(19.5)
    assert store.view().loading == ()
    assert store.view().tiers[-1].queued_bytes == 0, "no read is left"


@virtual_time
@pytest.mark.parametrize("leaves_s", [0.25, 3.0, 9.9])
async def test_a_shared_load_goes_on_when_the_read_that_began_it_is_cancelled(leaves_s: float) -> None:
    store = shared(capacity_bytes=350)
    ended: list[float] = []

    async def read() -> None:
        await seconds_to_read(store, A)
        ended.append(anyio.current_time())

    async with anyio.create_task_group() as readers:
        with anyio.move_on_after(leaves_s):
            readers.start_soon(read)
            await seconds_to_read(store, A)
    # The chunk that was being read is lost.
    assert 10.0 <= ended[0] <= 10.5 + 1e-9
    assert in_cache(store) == {"a"}


# ---------------------------------------------------------------------- nodes


def nodes() -> SimNodes:
    return SimNodes({name: shared(capacity_bytes=250, node=name) for name in ("n0", "n1")})


@virtual_time
async def test_weights_that_a_node_has_read_are_cached_on_that_node_alone() -> None:
    store = nodes()
    assert await seconds_to_read(store.on("n1"), A) == pytest.approx(10.0)
    view = store.view()
    assert view.seen_from("n1").tier_of(A) == "host"
    assert view.seen_from("n1").load_s(A) == pytest.approx(1.0)
    assert view.seen_from("n0").tier_of(A) == "disk"
    assert view.seen_from("n0").load_s(A) == pytest.approx(10.0)
    assert view.seen_from("").tier_of(A) is None, "without a node no tier is near"
    assert view.load_s(A) == pytest.approx(1.0), "without a node the best tier counts"
    assert [(tier.name, tier.node, tier.used_bytes) for tier in view.tiers] == [
        ("host", "n0", 0),
        ("host", "n1", 100),
        ("disk", "n0", 350),
        ("disk", "n1", 350),
    ]


@virtual_time
async def test_nodes_do_not_slow_each_other() -> None:
    store = nodes()
    ends = await read_together([(store.on("n0"), A, 0.0), (store.on("n1"), A, 0.0), (store.on("n1"), B, 0.0)])
    assert ends == pytest.approx([10.0, 19.5, 20.0])
    assert store.view().seen_from("n0").load_s(C) == pytest.approx(15.0)


@virtual_time
async def test_the_load_time_is_that_of_the_node_with_the_shortest_queue() -> None:
    store = nodes()
    async with store.on("n0").open(await shard_of(store.on("n0"), A)) as chunks:
        await anext(chunks)
        assert store.view().load_s(B, "disk") == pytest.approx(10.0)
        source = store.view().source(B)
        assert source is not None
        assert source.node == "n1"


@virtual_time
async def test_a_model_that_a_node_loads_is_shown_there_and_counts_once() -> None:
    store = nodes()
    async with store.on("n1").open(await shard_of(store.on("n1"), A)) as chunks:
        await anext(chunks)
        (loading,) = store.view().loading
        assert (loading.model, loading.tier, loading.node, loading.size_bytes) == (A, "disk", "n1", 95)
        assert store.view().seen_from("n1").load_s(A) == pytest.approx(9.5)
        assert store.view().seen_from("n1").load_s(B) == pytest.approx(19.5)
        assert store.view().seen_from("n0").loading == ()
        assert store.view().seen_from("n0").load_s(A) == pytest.approx(10.0)
    assert store.view().loading == ()


@virtual_time
async def test_a_node_that_is_not_there_is_named() -> None:
    with pytest.raises(ShardMissing, match="'n7'"):
        nodes().on("n7")
    with pytest.raises(ConfigError, match="no nodes"):
        SimNodes({})
    with pytest.raises(ConfigError, match="'n1'"):
        SimNodes({"n1": shared(node="n0")})


def test_a_view_without_nodes_is_the_same_from_everywhere() -> None:
    view = StoreView(tiers=(DISK,))
    assert view.seen_from("n3") is view
