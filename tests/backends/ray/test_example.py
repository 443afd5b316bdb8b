"""The example with Ray does what it says, over engines of PyTorch on three nodes; the guides' blocks run."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest

from examples import ray_cluster
from hotswap import Fleet, Model, Sampling
from hotswap.backends.ray import RayEngines
from hotswap.backends.stores import NvmeStore, SharedStore, TieredStore
from hotswap.backends.torch import TorchEngine
from tests.backends.ray.local_cluster import NODES, LocalCluster
from tests.docs.running import run, runnable


async def test_every_model_answers_one_question_in_one_way_on_the_nodes_of_a_cluster(
    cluster: LocalCluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = await ray_cluster.main(tmp_path)
    assert {model: len(seen) for model, seen in answers.items()} == {"ada": 1, "bea": 1, "cleo": 1}
    assert len(set.union(*answers.values())) == 3
    printed = capsys.readouterr().out
    assert all(f"{node}-0 on {node} serves" in printed for node in NODES)


async def test_the_fleets_of_the_guides_have_an_engine_for_each_gpu(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    """Ray is told of a GPU that there is not, and the engine computes on the CPU."""
    await ray_cluster.convert_models(tmp_path)
    await cluster.add("127.0.0.5", num_gpus=1)
    on_cpu = {'device="cuda:0"': 'device="cpu", threads=1, kv_tokens=1024'}
    asked = """tasks.start_soon(engines.follow, fleet)
    done = await fleet.generate("ada", (5, 6, 7), Sampling(max_tokens=4))
    tasks.cancel_scope.cancel()"""
    places = {
        "/dev/shm/hotswap": tmp_path / "shared",
        "200 GiB": "64 MiB",
        "/mnt/nvme/models": tmp_path / "store",
        ", RemoteStore(...)": "",
        'ray.init(address="auto")\n': "",  # the test has called it
        "tasks.start_soon(engines.follow, fleet)": asked,
    }
    names: dict[str, Any] = {
        "anyio": anyio,
        "Fleet": Fleet,
        "models": [Model("ada")],
        "NvmeStore": NvmeStore,
        "partial": partial,
        "RayEngines": RayEngines,
        "Sampling": Sampling,
        "SharedStore": SharedStore,
        "TieredStore": TieredStore,
        "TorchEngine": TorchEngine,
    }
    await run(runnable("remote.md", "ray.init", places | on_cpu), names)
    assert len(names["done"].tokens) == 4
    assert [hop.instance for hop in names["done"].hops] == ["127.0.0.5-0"]
    await run(runnable("migrate.md", "RayEngines", on_cpu), names)
    await run(runnable("remote.md", "RayStage("), names)  # made, and not entered: it takes sixteen GPUs
    assert names["engine"].id == "e0"
