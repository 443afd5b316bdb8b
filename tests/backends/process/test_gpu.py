"""Shares of one GPU, by the daemon of MPS: engines in processes of their own serve side by side."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import anyio
import pytest
import torch

from hotswap import Model, ModelId, Request, RequestId, Sampling
from hotswap.abc import ModelCard
from hotswap.backends.process import Mps, ProcessEngine, Share, partition
from hotswap.backends.stores import NvmeStore
from hotswap.backends.stores.convert import convert
from hotswap.backends.torch import TorchEngine
from tests.backends.torch.zoo import generate, make_model

_CONTROL = "nvidia-cuda-mps-control"

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
    pytest.mark.skipif(shutil.which(_CONTROL) is None, reason=f"there is no {_CONTROL}"),
]

PROMPT = (11, 22, 33, 44)


@pytest.fixture
def mps() -> Iterator[Mps]:
    """A daemon of its own, which ends with the test; the path of its sockets must be short."""
    with TemporaryDirectory(dir="/tmp") as root:
        mps = Mps(pipe_directory=Path(root) / "pipe", log_directory=Path(root) / "log")
        yield mps
        control(mps, "quit")


def control(mps: Mps, command: str) -> str:
    """Give the daemon a command; return what it answers."""
    ran = subprocess.run(
        [_CONTROL],
        input=f"{command}\n",
        env={**os.environ, **mps.env},
        capture_output=True,
        text=True,
        check=False,
        timeout=30,
    )
    return ran.stdout


async def test_shares_of_one_gpu_serve_side_by_side_through_one_server(tmp_path: Path, mps: Mps) -> None:
    models = {name: make_model("llama", seed=seed) for seed, name in enumerate("ab")}
    for name, model in models.items():
        model.save_pretrained(tmp_path / name)
        convert(tmp_path / name, tmp_path / "store", model_id=name)
    expected = {name: generate(model, PROMPT, 40) for name, model in models.items()}
    engines = partition(
        "cuda:0",
        [Share(id=name, memory_bytes="1 GiB", threads_percent=50) for name in models],
        partial(TorchEngine, kv_tokens=256),
        partial(NvmeStore, tmp_path / "store"),
        memory_bytes=torch.cuda.get_device_properties(0).total_memory,
        mps=mps,
    )
    found: dict[str, list[int]] = {}

    async def serve(engine: ProcessEngine, store: NvmeStore) -> None:
        async with engine:
            card = ModelCard.of(Model(engine.id), await store.manifest(ModelId(engine.id)))
            await engine.load(card, store)
            assert engine.status().memory_bytes == 1 << 30
            async with engine.stream(ask(engine.id)) as tokens:
                found[engine.id] = [token.id async for token in tokens]
                assert control(mps, "get_server_list").strip(), "no process of MPS serves"
            await engine.unload()

    async with NvmeStore(tmp_path / "store") as store, anyio.create_task_group() as tasks:
        for engine in engines:
            tasks.start_soon(serve, engine, store)
    assert found == expected


def ask(model: str) -> Request:
    sampling = Sampling(max_tokens=40, ignore_eos=True)
    return Request(id=RequestId("r"), model=ModelId(model), prompt=PROMPT, sampling=sampling)
