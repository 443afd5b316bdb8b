"""`LinkedStore`: the store of another node behaves as a store, and its tiers go and come with its links."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import anyio.lowlevel
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotswap import ModelId, Residency, StoreView, TierView
from hotswap.abc import Channel, Shard
from hotswap.backends.nodes import LinkedStore, NodeStores, StoreHost
from hotswap.backends.nodes.messages import (
    failure_of,
    pack_failure,
    shard_fields,
    shard_of,
    view_fields,
    view_of,
)
from hotswap.backends.sim import SimStore
from hotswap.backends.stores import NvmeStore, PinnedStore, TieredStore
from hotswap.backends.transports import memory_channels, wire
from hotswap.backends.transports.link_errors import ProtocolError
from hotswap.errors import (
    MigrationAborted,
    ShardCorrupt,
    ShardMissing,
    StoreBusy,
    StoreError,
    TierFull,
    UnsafeFile,
)
from hotswap.offline.virtual_time import virtual_time
from hotswap.testing import WeightStoreConformance
from tests.backends.nodes.hosts import in_memory, over_tcp
from tests.backends.stores.models import UNIT, put_all

MODELS = (ModelId("a"), ModelId("b"))
A, B = MODELS


class OnDisk(WeightStoreConformance):
    models = MODELS

    @pytest.fixture(autouse=True)
    def _root(self, tmp_path: Path) -> None:
        self.root = put_all(tmp_path, MODELS)

    def far_store(self) -> TieredStore:
        return TieredStore(PinnedStore("1 MiB", chunk_bytes=UNIT), NvmeStore(self.root, chunk_bytes=UNIT))


class TestInMemory(OnDisk):
    @asynccontextmanager
    async def make_store(self) -> AsyncGenerator[LinkedStore]:
        async with in_memory(self.far_store()) as door, LinkedStore("n0", door.connect) as store:
            yield store


class TestOverTcp(OnDisk):
    @asynccontextmanager
    async def make_store(self) -> AsyncGenerator[LinkedStore]:
        async with (
            self.far_store() as far,
            over_tcp(StoreHost("n0", far)) as open_link,
            LinkedStore("n0", open_link) as store,
        ):
            yield store


def sim_store() -> SimStore:
    host = TierView(name="host", bytes_per_s=50e6, capacity_bytes=1000)
    return SimStore({"a": 100, "b": 200}, home=TierView(name="disk", bytes_per_s=5e6), cache=host)


@virtual_time
async def test_the_view_is_pushed(caplog: pytest.LogCaptureFixture) -> None:
    far = sim_store()
    async with in_memory(far) as door, LinkedStore("n0", door.connect) as store:
        assert store.view() == far.view()
        await far.prefetch(A)
        await anyio.sleep(0.2)
        assert store.view() == far.view()
        assert store.view().tier_of(A) == "host"
        await anyio.sleep(3600)
        assert not store.lost
    assert caplog.text == ""


@virtual_time
async def test_a_reader_that_waits_for_less_than_a_beat_is_heard_as_often(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with (
        in_memory(sim_store(), beat_s=60.0, view_s=60.0) as door,
        LinkedStore("n0", door.connect, silence_s=0.5) as store,
    ):
        await anyio.sleep(100)
        assert not store.lost
    assert caplog.text == ""


@virtual_time
async def test_a_node_that_is_lost_has_no_tiers_until_it_is_back(caplog: pytest.LogCaptureFixture) -> None:
    far = sim_store()
    async with in_memory(far) as door:
        store = LinkedStore("n0", door.connect)
        async with NodeStores({"n0": store, "n1": sim_store()}) as stores:
            await door.cut()
            await anyio.sleep(1)
            assert store.lost
            assert {tier.node for tier in stores.view().tiers} == {"n1"}
            with pytest.raises(StoreError, match="'n0'"):
                await store.prefetch(A)
            assert (await stores.manifest(A)).weight_bytes == 100
            await anyio.sleep(1800)
            door.is_open = True
            await anyio.sleep(31)
            assert {tier.node for tier in stores.view().tiers} == {"n0", "n1"}
    assert [" is lost, " in line for line in caplog.messages] == [True, False]
    assert "is back, with 2 tiers" in caplog.messages[1]


@virtual_time
async def test_a_node_that_falls_silent_is_lost_and_its_prefetches_end() -> None:
    far: list[Channel] = []

    async def open_silent() -> Channel:
        near, other = memory_channels()
        far.append(other)
        await anyio.lowlevel.checkpoint()
        return near

    async with LinkedStore("n0", open_silent, silence_s=5) as store:
        assert anyio.current_time() >= 5
        assert store.lost


@virtual_time
async def test_a_prefetch_under_way_ends_with_its_node() -> None:
    slow = SimStore({"a": 100}, home=TierView(name="disk", bytes_per_s=0.01))
    async with in_memory(slow) as door, LinkedStore("n0", door.connect) as store:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(door.cut)
            with pytest.raises(StoreError, match="'n0'"):
                await store.prefetch(A)
        await anyio.sleep(50_000)
        assert slow.view().tier_of(A) == "disk"


@virtual_time
async def test_a_cancelled_prefetch_ends_at_the_node_too() -> None:
    slow = SimStore({"a": 100}, home=TierView(name="disk", bytes_per_s=1.0), shared=True)
    async with in_memory(slow) as door, LinkedStore("n0", door.connect) as store:
        with anyio.move_on_after(1):
            await store.prefetch(A)
        await anyio.sleep(1)
        assert [tier.queued_bytes for tier in slow.view().tiers] == [0, 0]
        await anyio.sleep(3600)
        assert slow.view().tier_of(A) == "disk"


ERRORS = [ShardMissing, ShardCorrupt, UnsafeFile, TierFull, StoreBusy, StoreError]


@given(st.sampled_from(ERRORS), st.text())
def test_errors_keep_their_type_and_text(kind: type[StoreError], text: str) -> None:
    found = failure_of(wire.unpack(pack_failure(7, kind(text))))
    assert type(found) is kind
    assert str(found) == text


TIERS = st.builds(
    TierView,
    name=st.text(max_size=5),
    used_bytes=st.integers(0, 2**60),
    capacity_bytes=st.none() | st.integers(0, 2**60),
    bytes_per_s=st.floats(min_value=1e-3, allow_nan=False),
    queued_bytes=st.integers(0, 2**60),
)


@st.composite
def views(draw: st.DrawFn) -> StoreView:
    tiers = tuple(draw(st.lists(TIERS, max_size=3, unique_by=lambda tier: tier.name)))
    entries = st.builds(
        Residency,
        model=st.text(max_size=5).map(ModelId),
        tier=st.sampled_from([tier.name for tier in tiers] or [""]),
        size_bytes=st.integers(0, 2**60),
    )
    lists = st.lists(entries, max_size=3 if tiers else 0).map(tuple)
    return StoreView(tiers=tiers, residency=draw(lists), loading=draw(lists))


@given(views())
def test_a_view_crosses_a_link_unchanged(view: StoreView) -> None:
    assert view_of(wire.unpack(wire.pack("view", 0, **view_fields(view)))) == view


SHARD = Shard(
    model=A, rank=0, file="f", file_offset_bytes=0, buffer_offset_bytes=0, size_bytes=9, checksum="crc32:0"
)


@given(
    st.sampled_from(["shard", "tiers", "residency", "loading"]),
    st.recursive(
        st.none() | st.integers() | st.text(max_size=3),
        lambda inner: st.lists(inner, max_size=3),
        max_leaves=5,
    ),
)
def test_values_that_are_none_break_the_protocol_and_nothing_else(name: str, value: object) -> None:
    whole = {"shard": shard_fields(SHARD), **view_fields(sim_store().view())}
    message = wire.unpack(wire.pack("x", 0, **{**whole, name: value}))
    try:
        shard_of(message)
        view_of(message)
    except ProtocolError:
        return
    assert value == [] or json.dumps(value) == json.dumps(whole[name])


@virtual_time
async def test_calls_that_are_none_break_their_link_alone() -> None:
    async with in_memory(sim_store()) as door, LinkedStore("n0", door.connect) as store:
        near, far = memory_channels()
        async with near, anyio.create_task_group() as tasks:

            async def serve() -> None:
                assert door.host is not None
                with pytest.raises(MigrationAborted, match="no call to a store"):
                    await door.host.serve(far)

            tasks.start_soon(serve)
            await near.send(wire.pack("launch", 0))
        await store.prefetch(A)
        assert store.view().tier_of(A) == "host"
