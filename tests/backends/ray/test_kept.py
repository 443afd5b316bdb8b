"""KV blocks of actors stay with them, and go from one to the other when a request goes on there."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from hotswap import Fleet, Model, Sampling
from hotswap.backends.kv_stores import NodeKVStore
from hotswap.backends.ray import RayEngine
from hotswap.backends.stores import NvmeStore
from hotswap.policies import LeastLoadedRouter
from tests.backends.ray.local_cluster import NODES, LocalCluster
from tests.backends.torch.parallel.support import add, make_engine, make_prompts
from tests.backends.torch.zoo import generate, make_model
from tests.patience import PATIENCE_S
from tests.runtime.support import Idle

NUM_TOKENS = 80


@pytest.mark.parametrize("comes_back", [True, False], ids=["to its actor", "to another actor"])
async def test_a_request_finds_its_blocks_at_actors(
    cluster: LocalCluster, tmp_path: Path, comes_back: bool
) -> None:
    root, model, (prompt,) = tmp_path / "store", make_model("llama"), make_prompts(3, 200)
    add(root, "m", model)
    engines = [
        RayEngine(
            name,
            partial(make_engine, name),
            partial(NvmeStore, root),
            options={"label_selector": {"at": node}},
            start_s=PATIENCE_S,
        )
        for name, node in zip(("e0", "e1"), NODES, strict=False)
    ]
    async with Fleet(
        engines=engines,
        store=NvmeStore(root),
        models=[Model("m")],
        router=LeastLoadedRouter(),
        scheduler=Idle(),
        kv_store=NodeKVStore("16 MiB"),
    ) as fleet:
        await fleet.swap("e0", to="m")
        async with fleet.stream("m", tuple(prompt), Sampling(max_tokens=NUM_TOKENS)) as stream:
            read = [(await anext(stream)).id for _ in range(5)]
            record = await fleet.unload("e0")
            (waiting,) = fleet.view().waiting
            assert waiting.stored_node == engines[0].status().node != ""
            await fleet.swap("e0" if comes_back else "e1", to="m")
            read += [token.id async for token in stream]
            assert stream.hops[1].instance == ("e0" if comes_back else "e1")
            assert stream.hops[1].restored_tokens >= len(prompt)
        assert record.num_saved == 1
        view = fleet.view().kv_store
        assert view is not None
        assert view.num_leases == 0
    assert read == generate(model, prompt, NUM_TOKENS)
