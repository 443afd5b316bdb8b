"""Engines whose stages are on several nodes of a Ray cluster: exact tokens, and nodes that are lost."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest
import ray
from anyio import to_thread

from hotswap import Fleet, InstanceId, InstanceState, Model, Sampling
from hotswap.backends.ray import RayEngine, RayStage
from hotswap.backends.stores import NvmeStore
from hotswap.backends.torch import TorchEngine
from hotswap.errors import InstanceLost
from hotswap.policies import LeastLoadedRouter, RestoreMinReplicas
from tests.backends.ray.local_cluster import NODES, LocalCluster
from tests.backends.ray.support import until
from tests.backends.torch.parallel.support import add, ask, card_of, make_engine, make_prompts, tokens_of
from tests.backends.torch.zoo import generate, make_model

NUM_TOKENS = 120
HEAD = NODES[0]


def ranked_engine(id: str, root: Path) -> TorchEngine:
    """An engine whose first stage Ray places on another node; called in an actor."""
    return make_engine(id, tp=2, pp=2, stage_nodes=[RayStage(partial(NvmeStore, root), start_s=60.0)])


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


async def test_streams_of_an_engine_over_two_nodes_go_on_when_one_is_lost_and_it_restarts_over_others(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    root, model = tmp_path / "store", make_model("llama")
    add(root, "m", model, tp=2)
    prompts = make_prompts(6, 3, 17, 40, 90)
    wanted = [generate(model, prompt, NUM_TOKENS) for prompt in prompts]
    received: list[list[int]] = [[] for _ in prompts]
    hops = [0] * len(prompts)
    at_head = {"label_selector": {"at": HEAD}}
    makers = {"ranked": partial(ranked_engine, "ranked", root), "whole": partial(whole_engine, "whole")}
    engines = [RayEngine(id, make, partial(NvmeStore, root), options=at_head) for id, make in makers.items()]
    fleet = Fleet(
        engines=engines,
        store=NvmeStore(root),
        models=[Model("m", min_replicas=2)],
        router=LeastLoadedRouter(),
        scheduler=RestoreMinReplicas(),
        interval_s=0.05,
    )

    async def read(at: int) -> None:
        async with fleet.stream("m", tuple(prompts[at]), Sampling(max_tokens=NUM_TOKENS)) as tokens:
            async for token in tokens:
                received[at].append(token.id)
            hops[at] = tokens.num_hops

    async with fleet:
        await fleet.ready()
        (lost,) = await stages()
        assert lost != HEAD
        async with anyio.create_task_group() as clients:
            for at in range(len(prompts)):
                clients.start_soon(read, at)
            await until(lambda: sum(map(len, received)) > 20)
            assert fleet.view().instance(InstanceId("ranked")).num_running > 0
            clients.start_soon(cluster.lose, lost)
        assert received == wanted
        assert max(hops) == 2, "some were on the instance that was lost"
        await until(lambda: engines[0].status().state is InstanceState.SERVING)
        (place,) = await stages()
        assert place not in {HEAD, lost}
        async with fleet.stream("m", tuple(prompts[0]), Sampling(max_tokens=NUM_TOKENS)) as tokens:
            assert [token.id async for token in tokens] == wanted[0]
    assert await stages() == []


async def test_an_engine_whose_stage_finds_no_place_is_lost_with_the_reason(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    root, model = tmp_path / "store", make_model("llama")
    add(root, "m", model)
    prompt = make_prompts(1, 30)[0]
    node = NODES[2]
    stage = RayStage(partial(NvmeStore, root), options={"label_selector": {"at": node}}, start_s=20.0)
    async with NvmeStore(root) as store, make_engine(pp=2, stage_nodes=[stage]) as engine:
        await engine.load(await card_of(store, "m"), store)
        assert await tokens_of(engine, ask("m", prompt, 20)) == generate(model, prompt, 20)
        await cluster.lose(node)
        await until(lambda: engine.status().state is InstanceState.LOST)
        with pytest.raises(InstanceLost, match=r"no process within 20 s"):
            await engine.unload()
        assert engine.status().state is InstanceState.LOST
        await cluster.add(node)
        await engine.unload()
        assert engine.status().state is InstanceState.EMPTY
        assert await stages() == [node]
    assert await stages() == []
