"""Engines whose stages are on several nodes of a Ray cluster: exact tokens, and nodes that are lost."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest
import ray
from anyio import to_thread

from hotswap import InstanceId, InstanceState, ModelId, Sampling
from hotswap.abc import HostChunk, Shard, WrapperStore
from hotswap.backends.nodes import LinkedStore, PeerStore
from hotswap.backends.ray import RayEngine, RayStage, own_address
from hotswap.backends.stores import NvmeStore, PinnedStore, TieredStore
from hotswap.backends.torch import TorchEngine
from hotswap.errors import InstanceLost, ShardMissing, StoreError
from tests.backends.ray.local_cluster import NODES, LocalCluster
from tests.backends.ray.support import sim_engine, until
from tests.backends.torch.parallel.support import (
    Clients,
    add,
    ask,
    card_of,
    make_engine,
    make_prompts,
    tokens_of,
)
from tests.backends.torch.zoo import generate, make_model
from tests.patience import PATIENCE_S

NUM_TOKENS = 120
HEAD = NODES[0]


def ranked_engine(id: str, root: Path) -> TorchEngine:
    """An engine whose first stage Ray places on another node; called in an actor."""
    return make_engine(id, tp=2, pp=2, stage_nodes=[RayStage(partial(NvmeStore, root), start_s=PATIENCE_S)])


def whole_engine(id: str) -> TorchEngine:
    return make_engine(id, tp=2)


async def stages() -> list[str]:
    """The nodes of the actors of stages that live."""
    found: dict[str, Any] = await to_thread.run_sync(ray._private.state.actors)
    return [
        str(actor["Address"]["IPAddress"])
        for actor in found.values()
        if actor["State"] == "ALIVE" and str(actor["Name"]).startswith("hotswap/stage/")
    ]


@pytest.mark.parametrize("part", ["a stage", "the engine"])
async def test_streams_of_an_engine_over_two_nodes_go_on_when_one_is_lost_and_it_restarts(
    part: str, cluster: LocalCluster, tmp_path: Path
) -> None:
    """The stage gets another node; the engine itself, which has to be at its own, comes back with that."""
    root, model = tmp_path / "store", make_model("llama")
    add(root, "m", model, tp=2)
    prompts = make_prompts(6, 3, 17, 40, 90)
    wanted = [generate(model, prompt, NUM_TOKENS) for prompt in prompts]
    home = HEAD if part == "a stage" else NODES[1]
    makers = {"ranked": partial(ranked_engine, "ranked", root), "whole": partial(whole_engine, "whole")}
    places = {"ranked": home, "whole": HEAD}
    engines = [
        RayEngine(
            id,
            make,
            partial(NvmeStore, root),
            options={"label_selector": {"at": places[id]}},
            start_s=PATIENCE_S,
        )
        for id, make in makers.items()
    ]
    clients = Clients(engines, NvmeStore(root), prompts)
    async with clients.fleet as fleet:
        await fleet.ready()
        (stage,) = await stages()
        assert stage != home
        lost = stage if part == "a stage" else home
        async with anyio.create_task_group() as tasks:
            for at in range(len(prompts)):
                tasks.start_soon(clients.read, at, NUM_TOKENS)
            await until(lambda: clients.num_received > 20)
            assert fleet.view().instance(InstanceId("ranked")).num_running > 0
            tasks.start_soon(cluster.lose, lost)
        assert clients.received == wanted
        assert max(clients.hops) == 2, "some were on the instance that was lost"
        if part == "the engine":
            while await stages():  # noqa: ASYNC110 - Ray tells no event
                await anyio.sleep(0.1)
            await cluster.add(home)
        await until(lambda: engines[0].status().state is InstanceState.SERVING)
        (place,) = await stages()
        assert place not in {home, lost}
        async with fleet.stream("m", tuple(prompts[0]), Sampling(max_tokens=NUM_TOKENS)) as tokens:
            assert [token.id async for token in tokens] == wanted[0]
    assert await stages() == []


class _NoShards(WrapperStore):
    """A storage that has what is small alone."""

    def open(self, shard: Shard) -> AbstractAsyncContextManager[AsyncIterator[HostChunk]]:
        raise ShardMissing(f"{shard.file} cannot be read from here.")


def node_store(root: Path, *, has_shards: bool) -> TieredStore:
    """The store of a node: its memory, then other nodes, then a storage."""
    storage = NvmeStore(root) if has_shards else _NoShards(NvmeStore(root))
    return TieredStore(PinnedStore("64 MiB"), PeerStore(storage, {}, node=own_address()))


async def test_the_ranks_of_a_stage_read_their_weights_from_the_nodes_of_other_actors(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    root, model = tmp_path / "store", make_model("llama")
    add(root, "m", model)
    prompt = make_prompts(1, 30)[0]
    other, own = ({"label_selector": {"at": node}} for node in NODES[1:])
    has = RayEngine(
        "has", partial(sim_engine, "has"), partial(node_store, root, has_shards=True), options=other
    )
    stage = RayStage(partial(node_store, root, has_shards=False), options=own, start_s=PATIENCE_S)
    async with (
        has,
        LinkedStore("has", has.open_store_channel) as near,
        NvmeStore(root) as store,
        make_engine(pp=2, stage_nodes=[stage]) as engine,
    ):
        await near.prefetch(ModelId("m"))
        with anyio.fail_after(PATIENCE_S):
            while engine.status().state is not InstanceState.SERVING:
                with suppress(StoreError):  # until the actors have found each other
                    await engine.load(await card_of(store, "m"), store)
        assert await tokens_of(engine, ask("m", prompt, 20)) == generate(model, prompt, 20)


async def test_an_engine_whose_stage_finds_no_place_is_lost_with_the_reason(
    cluster: LocalCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, model = tmp_path / "store", make_model("llama")
    add(root, "m", model)
    prompt = make_prompts(1, 30)[0]
    node = NODES[2]
    stage = RayStage(partial(NvmeStore, root), options={"label_selector": {"at": node}})
    async with NvmeStore(root) as store, make_engine(pp=2, stage_nodes=[stage]) as engine:
        await engine.load(await card_of(store, "m"), store)
        assert await tokens_of(engine, ask("m", prompt, 20)) == generate(model, prompt, 20)
        await cluster.lose(node)
        await until(lambda: engine.status().state is InstanceState.LOST)
        with monkeypatch.context() as patch:
            patch.setattr(stage, "_start_s", 5.0)  # there is none: a busy machine may take longer to have one
            with pytest.raises(InstanceLost, match=r"no process within 5 s"):
                await engine.unload()
        assert engine.status().state is InstanceState.LOST
        await cluster.add(node)
        await engine.unload()
        assert engine.status().state is InstanceState.EMPTY
        assert await stages() == [node]
    assert await stages() == []
