"""`PeerStore`: nodes that load together read the storage once, and no byte is lost, doubled or damaged."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from random import Random

import anyio
import anyio.lowlevel
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hotswap import ModelId
from hotswap.abc import HostChunk, Manifest, Shard, WeightStore, WrapperStore
from hotswap.backends.nodes import PeerStore, StoreHost
from hotswap.backends.nodes.readings import rank_of
from hotswap.backends.stores import NvmeStore, PinnedStore, RemoteStore, TieredStore
from hotswap.errors import ShardCorrupt, StoreError
from hotswap.testing import WeightStoreConformance
from tests.backends.nodes.hosts import Entered, Node, cluster, doors, over_tcp
from tests.backends.stores.models import UNIT, put, put_all, read, read_rank

A, B = ModelId("a"), ModelId("b")


class TestConformanceBelowTheHostTier(WeightStoreConformance):
    models = (A, B)
    has_disk = False

    @pytest.fixture(autouse=True)
    def _root(self, tmp_path: Path) -> None:
        self.root = put_all(tmp_path, self.models)

    @asynccontextmanager
    async def make_store(self) -> AsyncGenerator[WeightStore]:
        """A node without a disk, beside one that has the models on its own."""
        async with doors("n0") as each, NvmeStore(self.root, chunk_bytes=UNIT) as far:
            each["n0"].host = StoreHost("n0", far, part_bytes=UNIT)
            storage = RemoteStore(self.root.as_uri(), part_bytes=UNIT)
            peers = PeerStore(storage, {"n0": each["n0"].connect}, node="n1")
            async with TieredStore(PinnedStore("1 MiB", chunk_bytes=UNIT), peers) as store:
                for model in self.models:
                    await store.manifest(model)
                yield store


class Storage(WrapperStore):
    """A storage that counts its bytes by place, and gives a chunk only when it may."""

    def __init__(self, store: WeightStore) -> None:
        super().__init__(store)
        self.read: Counter[tuple[str, int]] = Counter()  # by file and place, in units
        self.gate = anyio.Event()
        self.num_free_chunks = 1 << 30

    @asynccontextmanager
    async def open(self, shard: Shard) -> AsyncGenerator[AsyncIterator[HostChunk]]:
        async with self.wrapped.open(shard) as chunks:
            yield self._counted(shard, chunks)

    async def _counted(self, shard: Shard, chunks: AsyncIterator[HostChunk]) -> AsyncIterator[HostChunk]:
        async for chunk in chunks:
            if self.num_free_chunks <= 0:
                await self.gate.wait()
            self.num_free_chunks -= 1
            for at in range(0, len(chunk.data), UNIT):
                self.read[shard.file, chunk.offset_bytes + at] += 1
            yield chunk


def storage_of(root: Path) -> Storage:
    return Storage(NvmeStore(root, name="storage", chunk_bytes=UNIT))


async def load(node: Node, model: ModelId = A) -> list[bytes]:
    """Read a model as an engine on the node does."""
    manifest = await node.store.manifest(model)
    return [await read_rank(node.store, manifest, rank) for rank in range(manifest.world_size)]


async def arrived(node: Node, shard: Shard, num_bytes: int) -> None:
    """Wait until so many bytes of a shard are on a node."""
    with anyio.fail_after(60):
        while (node.store.held.arrived_bytes(shard) or 0) < num_bytes:  # noqa: ASYNC110 - nothing to be told by
            await anyio.sleep(0.001)


async def load_all(nodes: dict[str, Node], *, order: Random | None = None) -> dict[str, list[bytes]]:
    """Read a model on all nodes at once, each beginning at another moment."""
    loaded: dict[str, list[bytes]] = {}

    async def one(node: Node, pauses: int) -> None:
        for _ in range(pauses):
            await anyio.lowlevel.checkpoint()
        loaded[node.name] = await load(node)

    async with anyio.create_task_group() as tasks:
        for node in nodes.values():
            tasks.start_soon(one, node, order.randrange(300) if order else 0)
    return loaded


NAMES = [f"n{number}" for number in range(5)]


@settings(max_examples=12, deadline=None)
@given(st.integers(0, 2**32), st.integers(2, 5), st.integers(1, 3))
def test_nodes_that_load_together_read_every_byte_of_the_storage_once(
    tmp_path_factory: pytest.TempPathFactory, seed: int, num_nodes: int, children: int
) -> None:
    path = tmp_path_factory.mktemp("spread")
    _, ranks = put(path / "storage", "a", size=40 * UNIT, file_bytes=16 * UNIT)

    async def spread() -> None:
        storage = storage_of(path / "storage")
        async with storage, cluster(storage, path, NAMES[:num_nodes], children=children) as nodes:
            loaded = await load_all(nodes, order=Random(seed))
            assert all(found == ranks for found in loaded.values())
            assert set(storage.read.values()) == {1}
            assert sum(node.peers.num_bytes_from.total() for node in nodes.values()) == num_nodes * 40 * UNIT

    anyio.run(spread)


async def test_a_node_hands_on_a_shard_that_is_still_arriving(tmp_path: Path) -> None:
    manifest, ranks = put(tmp_path / "storage", "a", size=16 * UNIT, file_bytes=16 * UNIT)
    storage = storage_of(tmp_path / "storage")
    storage.num_free_chunks = 3
    async with storage, cluster(storage, tmp_path, NAMES[:3], children=1) as nodes:
        first, *others = nodes.values()
        (shard,) = manifest.shards
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(load, first)
            await arrived(first, shard, 3 * UNIT)
            for node in others:
                tasks.start_soon(load, node)
                await arrived(node, shard, 3 * UNIT)
            storage.num_free_chunks = 100
            storage.gate.set()
        assert set(storage.read.values()) == {1}
        assert [node.peers.num_bytes_from.keys() for node in nodes.values()] == [{""}, {"n0"}, {"n1"}]
        assert [await load(node) for node in others] == [ranks, ranks]


async def test_a_model_that_a_node_has_on_its_disk_is_read_from_there(tmp_path: Path) -> None:
    _, ranks = put(tmp_path / "storage", "a", size=16 * UNIT)
    storage = storage_of(tmp_path / "storage")
    put(tmp_path / "n0", "a", size=16 * UNIT)
    async with storage, cluster(storage, tmp_path, NAMES[:2]) as nodes:
        assert await load(nodes["n1"]) == ranks
        assert nodes["n1"].peers.num_bytes_from.keys() == {"n0"}
        assert storage.read.total() == 0
        await nodes["n1"].store.prefetch(A)
        assert nodes["n1"].store.view().tier_of(A) == "pinned"


@settings(max_examples=12, deadline=None)
@given(st.integers(0, 2**32))
def test_peers_that_are_lost_in_the_middle_cost_no_byte(
    tmp_path_factory: pytest.TempPathFactory, seed: int
) -> None:
    random, path = Random(seed), tmp_path_factory.mktemp("lost")
    _, ranks = put(path / "storage", "a", size=40 * UNIT, file_bytes=20 * UNIT)

    async def lose(nodes: dict[str, Node]) -> None:
        for name in random.sample(NAMES, 3):
            for _ in range(random.randrange(200)):
                await anyio.lowlevel.checkpoint()
            await nodes[name].door.cut()

    async def spread() -> None:
        storage = storage_of(path / "storage")
        async with storage, cluster(storage, path, NAMES) as nodes, anyio.create_task_group() as tasks:
            tasks.start_soon(lose, nodes)
            loaded = await load_all(nodes, order=random)
            assert all(found == ranks for found in loaded.values())
            assert all(node.peers.num_bytes_from.total() == 40 * UNIT for node in nodes.values())

    anyio.run(spread)


async def test_a_peer_that_stalls_is_left_for_the_storage_at_the_byte_that_is_due(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    manifest, ranks = put(tmp_path / "storage", "a", size=16 * UNIT, file_bytes=16 * UNIT)
    stuck, storage = storage_of(tmp_path / "storage"), storage_of(tmp_path / "storage")
    stuck.num_free_chunks = 5
    async with stuck, storage, cluster(stuck, tmp_path, ["n0"]) as nodes, anyio.create_task_group() as tasks:
        tasks.start_soon(load, nodes["n0"])
        (shard,) = manifest.shards
        await arrived(nodes["n0"], shard, 5 * UNIT)
        peers = PeerStore(storage, {"n0": nodes["n0"].door.connect}, node="n1", stall_s=0.2)
        assert await read(peers, shard) == ranks[0]
        assert peers.num_bytes_from == {"n0": 5 * UNIT, "": 11 * UNIT}
        assert storage.read.total() == 11
        assert "'n0' is not asked" in caplog.text
        stuck.num_free_chunks = 100
        stuck.gate.set()


async def test_a_shard_goes_on_from_a_peer_that_has_more_of_it_and_not_all(tmp_path: Path) -> None:
    manifest, ranks = put(tmp_path / "storage", "a", size=16 * UNIT, file_bytes=16 * UNIT)
    (shard,) = manifest.shards
    whole, arriving = storage_of(tmp_path / "storage"), storage_of(tmp_path / "storage")
    whole.num_free_chunks, arriving.num_free_chunks = 5, 8
    async with (
        whole,
        arriving,
        doors("n1") as each,
        cluster(arriving, tmp_path, ["n0"]) as nodes,
        anyio.create_task_group() as tasks,
    ):
        each["n1"].host = StoreHost("n1", whole, part_bytes=UNIT)
        tasks.start_soon(load, nodes["n0"])
        await arrived(nodes["n0"], shard, 8 * UNIT)
        links = {"n0": nodes["n0"].door.connect, "n1": each["n1"].connect}
        peers = PeerStore(Entered(whole), links, node="n2")
        data = bytearray()
        async with peers.open(shard) as chunks:
            async for chunk in chunks:
                data += chunk.data
                if len(data) == 5 * UNIT:
                    await each["n1"].cut()
                if len(data) == 8 * UNIT:
                    arriving.num_free_chunks = 100
                    arriving.gate.set()
        assert data == ranks[0]
        assert peers.num_bytes_from == {"n1": 5 * UNIT, "n0": 11 * UNIT}


class Damaging(WrapperStore):
    """Gives a wrong byte in one chunk of every shard."""

    def __init__(self, store: WeightStore, chunk: int) -> None:
        super().__init__(store)
        self.chunk = chunk

    @asynccontextmanager
    async def open(self, shard: Shard) -> AsyncGenerator[AsyncIterator[HostChunk]]:
        async with self.wrapped.open(shard) as chunks:
            yield self._damaged(chunks)

    async def _damaged(self, chunks: AsyncIterator[HostChunk]) -> AsyncIterator[HostChunk]:
        number = 0
        async for chunk in chunks:
            data = bytearray(chunk.data)
            data[7] ^= number == self.chunk
            number += 1
            yield replace(chunk, data=memoryview(data))


@pytest.mark.parametrize("chunk", [0, 1])
async def test_a_peer_that_gives_damaged_bytes_is_named_and_asked_no_more(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, chunk: int
) -> None:
    manifest, ranks = put(tmp_path, "a", size=2 * UNIT, file_bytes=2 * UNIT)
    (shard,) = manifest.shards
    storage, far = storage_of(tmp_path), Damaging(NvmeStore(tmp_path, chunk_bytes=UNIT), chunk)
    async with storage, far, doors("n0") as each:
        each["n0"].host = StoreHost("n0", far)
        peers = PeerStore(storage, {"n0": each["n0"].connect}, node="n1")
        with pytest.raises(ShardCorrupt, match="'n0'"):
            await read(peers, shard)
        assert "came damaged from 'n0'" in caplog.text
        for _ in range(2):
            assert await read(peers, shard) == ranks[0]
        assert storage.read.total() == 4
        assert peers.num_lent == 0


async def test_damage_that_is_found_before_a_byte_was_lent_costs_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    manifest, ranks = put(tmp_path, "a", size=UNIT)
    storage, far = storage_of(tmp_path), Damaging(NvmeStore(tmp_path, chunk_bytes=UNIT), 0)
    async with storage, far, doors("n0") as each:
        each["n0"].host = StoreHost("n0", far)
        peers = PeerStore(storage, {"n0": each["n0"].connect}, node="n1")
        assert await read(peers, manifest.shards[0]) == ranks[0]
    assert "came damaged from 'n0'" in caplog.text


async def test_damage_at_the_head_of_a_chain_reaches_no_engine(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _, ranks = put(tmp_path / "storage", "a", size=16 * UNIT, file_bytes=16 * UNIT)
    storage, far = (
        storage_of(tmp_path / "storage"),
        Damaging(NvmeStore(tmp_path / "storage", chunk_bytes=UNIT), 3),
    )
    async with storage, far, doors("n9") as each:
        each["n9"].host = StoreHost("n9", far, children=9)
        async with cluster(storage, tmp_path, NAMES[:3], children=1) as nodes:
            for node in nodes.values():
                node.peers.add_peer("n9", each["n9"].connect)
            found = list[list[bytes]]()

            async def attempt(node: Node) -> None:
                with suppress(StoreError):
                    found.append(await load(node))

            for _ in range(len(nodes) + 1):  # each node finds the damage itself at most once
                found.clear()
                async with anyio.create_task_group() as tasks:
                    for node in nodes.values():
                        tasks.start_soon(attempt, node)
                assert all(weights == ranks for weights in found)
            assert len(found) == len(nodes)
            assert "came damaged from 'n9'" in caplog.text


async def test_the_rest_of_a_shard_is_one_request_to_a_remote_store(tmp_path: Path) -> None:
    manifest, ranks = put(tmp_path / "storage", "a", size=16 * UNIT, file_bytes=16 * UNIT)
    (shard,) = manifest.shards
    stuck = storage_of(tmp_path / "storage")
    stuck.num_free_chunks = 6
    remote = Storage(RemoteStore((tmp_path / "storage").as_uri(), part_bytes=UNIT))
    async with stuck, remote, cluster(stuck, tmp_path, ["n0"]) as nodes, anyio.create_task_group() as tasks:
        tasks.start_soon(load, nodes["n0"])
        await arrived(nodes["n0"], shard, 6 * UNIT)
        peers = PeerStore(remote, {"n0": nodes["n0"].door.connect}, node="n1", stall_s=0.2)
        assert await read(peers, shard) == ranks[0]
        assert remote.read.total() == 10
        stuck.num_free_chunks = 100
        stuck.gate.set()


async def test_a_reader_that_leaves_early_leaves_nothing_behind(tmp_path: Path) -> None:
    manifest, _ = put(tmp_path / "storage", "a", size=16 * UNIT, file_bytes=16 * UNIT)
    storage = storage_of(tmp_path / "storage")
    put(tmp_path / "n0", "a", size=16 * UNIT, file_bytes=16 * UNIT)
    async with storage, cluster(storage, tmp_path, NAMES[:2]) as nodes:
        async with nodes["n1"].peers.open(manifest.shards[0]) as chunks:
            await anext(chunks)
        host = nodes["n0"].door.host
        assert host is not None
        with anyio.fail_after(60):
            while host.num_children:  # noqa: ASYNC110 - nothing to be told by
                await anyio.sleep(0.001)
        assert nodes["n1"].peers.num_lent == nodes["n0"].store.num_lent == 0


@given(st.lists(st.text(min_size=1, max_size=3), min_size=1, max_size=5, unique=True), st.integers(0, 9))
def test_every_shard_has_one_node_that_is_ranked_highest(names: list[str], number: int) -> None:
    shard = shard_of_size(number)
    assert len({rank_of(name, shard) for name in names}) == len(names)


def shard_of_size(number: int) -> Shard:
    return Shard(
        model=A,
        rank=0,
        file=f"{number}.bin",
        file_offset_bytes=0,
        buffer_offset_bytes=0,
        size_bytes=UNIT,
        checksum="crc32:00000000",
    )


def test_the_work_of_reading_the_storage_is_shared() -> None:
    first = Counter(
        max(NAMES, key=lambda name: rank_of(name, shard_of_size(number))) for number in range(500)
    )
    assert len(first) == 5
    assert max(first.values()) < 200


async def test_weights_come_over_tcp(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    manifest, ranks = put(tmp_path / "storage", "a", size=600 * UNIT, file_bytes=300 * UNIT)
    storage = storage_of(tmp_path / "storage")
    caplog.set_level(logging.WARNING)
    async with NvmeStore(tmp_path / "storage") as far, over_tcp(StoreHost("n0", far)) as open_link, storage:
        peers = PeerStore(storage, {"n0": open_link}, node="n1")
        assert await loaded_rank(peers, manifest) == ranks[0]
        assert peers.num_bytes_from == {"n0": 600 * UNIT}
    assert caplog.text == ""


async def test_a_shard_is_received_into_the_memory_of_its_reader(tmp_path: Path) -> None:
    manifest, ranks = put(tmp_path, "a", size=600 * UNIT, file_bytes=600 * UNIT)
    (shard,) = manifest.shards
    storage = storage_of(tmp_path)
    async with NvmeStore(tmp_path) as far, over_tcp(StoreHost("n0", far)) as open_link, storage:
        for opener in ({"n0": open_link}, {}):  # the second from the storage
            target = bytearray(shard.size_bytes)
            peers = PeerStore(storage, opener, node="n1")
            async with peers.open_into(shard, memoryview(target)) as chunks:
                async for chunk in chunks:
                    end = chunk.offset_bytes + len(chunk.data)
                    assert bytes(target[chunk.offset_bytes : end]) == bytes(chunk.data)
            assert target == ranks[0]


async def loaded_rank(store: WeightStore, manifest: Manifest) -> bytes:
    return await read_rank(store, manifest)
