"""Torch engines in actors keep KV blocks on their nodes, and send them to each other."""

from __future__ import annotations

import anyio

from hotswap.backends.kv_stores import NodeKVStore
from hotswap.backends.ray import RayEngines
from tests.backends.ray.local_cluster import LocalCluster
from tests.runtime.offloaded import PROMPTS, Client, make_engine, make_fleet, make_store, undisturbed


async def test_requests_go_on_with_their_blocks_on_their_node_and_on_another(cluster: LocalCluster) -> None:
    store = make_store()
    clients = [Client(number) for number in range(len(PROMPTS))]
    engines = RayEngines.per_node(make_engine, make_store)
    async with engines, make_fleet(store, NodeKVStore("16 MiB"), engines.engines) as fleet:
        here, there, *_ = (view.id for view in fleet.view().instances)
        await fleet.swap(here, to="a")
        async with anyio.create_task_group() as tasks:
            for client in clients:
                tasks.start_soon(client.run, fleet)
            for client in clients:
                await client.has(5)
            await fleet.swap(here, to="b")
            await fleet.swap(here, to="a")
            for client in clients:
                await client.has(25)
            await fleet.unload(here)
            await fleet.swap(there, to="a")
        view = fleet.view().kv_store
        assert view is not None
        assert view.num_leases == 0
        assert view.used_bytes == sum(model.size_bytes for model in view.models)
    assert [client.tokens for client in clients] == await undisturbed(store)
    assert all(client.num_restored > 0 for client in clients)
