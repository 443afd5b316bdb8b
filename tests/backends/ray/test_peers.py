"""Weights that a node reads from another node of the cluster, and not from the storage."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from random import Random

import anyio

from hotswap import Fleet, Model, ModelId
from hotswap.abc import Manifest, SupportsPrefetch, TensorSpec
from hotswap.backends.nodes import PeerStore
from hotswap.backends.ray import RayEngines, own_address
from hotswap.backends.sim import SimEngine
from hotswap.backends.stores import NvmeStore, PinnedStore, TieredStore
from hotswap.backends.stores.writer import write_model
from tests.backends.ray.local_cluster import LocalCluster
from tests.backends.ray.support import until
from tests.runtime.support import Idle

MODEL = ModelId("a")
SIZE_BYTES = 1 << 20


def node_store(root: str) -> TieredStore:
    """The store of a node: its memory, then other nodes, then a disk that all have."""
    storage = NvmeStore(Path(root), name="storage")
    return TieredStore(PinnedStore("16 MiB"), PeerStore(storage, {}, node=own_address()))


async def test_a_node_reads_weights_from_one_that_has_them_until_that_one_is_gone(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    tensor = TensorSpec(name="w", dtype="uint8", shape=(SIZE_BYTES,), offset_bytes=0, size_bytes=SIZE_BYTES)
    manifest = Manifest(
        model=MODEL,
        shards=(),
        buffer_bytes=SIZE_BYTES,
        tensors=(tensor,),
        architecture="None",
        config="{}",
    )
    write_model(tmp_path, manifest, [[memoryview(Random(5).randbytes(SIZE_BYTES))]])
    engines = RayEngines.per_node(SimEngine, partial(node_store, str(tmp_path)), silence_s=3.0)
    async with engines, anyio.create_task_group() as tasks:
        stores = engines.stores()
        async with Fleet(
            engines=engines.engines, store=stores, models=[Model(MODEL)], scheduler=Idle()
        ) as fleet:
            tasks.start_soon(engines.follow, fleet)

            async def tier_of_a_load(node: str) -> str:
                record = await fleet.swap(f"{node}-0", to=MODEL)
                await fleet.unload(f"{node}-0")
                store = stores.on(node)
                assert isinstance(store, SupportsPrefetch)
                await store.drop(MODEL)
                return record.tier

            await fleet.swap("127.0.0.3-0", to=MODEL)
            with anyio.fail_after(60):
                while await tier_of_a_load("127.0.0.4") != "peers":  # the actors have to find each other
                    pass
            await cluster.lose("127.0.0.3")
            await until(lambda: len(fleet.view().instances) == 2)
            assert await tier_of_a_load("127.0.0.4") == "storage"
            tasks.cancel_scope.cancel()
