"""Loads of adapters that overlap swaps, drops and allocation failures."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any, NoReturn

import anyio
import pytest
import torch
from anyio.lowlevel import checkpoint
from torch import nn

from hotswap import Adapter, AdapterId
from hotswap.backends.torch import SkeletonCache, TorchEngine
from hotswap.backends.torch.adapters.manager import pool_kind
from hotswap.backends.torch.adapters.paged import PagedPool
from hotswap.backends.torch.adapters.peft import AdapterWeights, LowRank, PeftCache, read
from hotswap.backends.torch.adapters.pool import AdapterPool
from hotswap.backends.torch.adapters.ranges import RangePool
from hotswap.backends.torch.adapters.targets import Target
from hotswap.errors import InstanceError, OutOfMemory, UnsupportedAdapter
from hotswap.kernels.segmented_lora import launch
from hotswap.kernels.targets import TARGETS, Device
from tests.backends.torch.adapters.files import write
from tests.backends.torch.dict_store import DictStore
from tests.backends.torch.zoo import make_model
from tests.patience import PATIENCE_S

MODEL = make_model("llama")
SKELETONS = SkeletonCache()


def make_engine(**options: Any) -> TorchEngine:
    return TorchEngine("e0", kv_tokens=256, threads=1, skeletons=SKELETONS, **options)


def test_pages_are_for_devices_on_which_kernels_run(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.device("cuda:0")
    for name, runs, kind in (
        ("sm_90", True, PagedPool),
        ("sm_90", False, RangePool),  # no Triton, or nothing that compiles for it
        ("sm_70", True, RangePool),  # Triton reaches no tensor cores
    ):
        card = Device("a card of a test", TARGETS[name], 132)
        monkeypatch.setattr(launch, "device_of", lambda device, card=card: card)
        monkeypatch.setattr(launch, "runs_triton", lambda device, runs=runs: runs)
        assert pool_kind(gpu) is kind
        assert pool_kind(torch.device("cpu")) is RangePool


class Gate:
    """A barrier at which a test's thread waits until the test opens it."""

    def __init__(self) -> None:
        self.reached, self.opened = threading.Event(), threading.Event()

    def pass_through(self) -> None:
        self.reached.set()
        assert self.opened.wait(PATIENCE_S)

    async def wait_until_reached(self) -> None:
        assert await anyio.to_thread.run_sync(self.reached.wait, PATIENCE_S)


async def test_an_adapter_read_before_a_reload_of_its_model_is_not_loaded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    store, gate, original = DictStore(), Gate(), PeftCache.get
    card, adapter = store.add("m", MODEL), Adapter("x", "m", write(tmp_path, MODEL))

    def get(self: PeftCache, directory: Path, dtype: torch.dtype) -> AdapterWeights:
        gate.pass_through()
        return original(self, directory, dtype)

    monkeypatch.setattr(PeftCache, "get", get)
    errors: list[str] = []

    async def load() -> None:
        try:
            await engine.load_adapter(adapter)
        except InstanceError as exc:
            errors.append(str(exc))

    async with make_engine() as engine:
        await engine.load(card, store)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(load)
            await gate.wait_until_reached()
            await engine.unload()
            await engine.load(card, store)
            gate.opened.set()
        assert errors
        assert "ask again" in errors[0]
        assert engine.status().adapters == ()
        await engine.load_adapter(adapter)
        assert engine.status().adapters == ("x",)


async def test_no_adapter_is_dropped_while_another_is_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    store, gate = DictStore(), Gate()
    put, give = AdapterPool.put, AdapterPool.free
    given: list[bool] = []
    card = store.add("m", MODEL)
    first, second = (Adapter(n, "m", write(tmp_path / n, MODEL, r=4 + len(n))) for n in ("x", "yy"))

    def put_later(self: AdapterPool[Any], *arguments: Any) -> None:
        gate.pass_through()
        put(self, *arguments)

    def note(self: AdapterPool[Any], *arguments: Any) -> None:
        given.append(gate.opened.is_set())
        give(self, *arguments)

    async with make_engine() as engine:
        await engine.load(card, store)
        await engine.load_adapter(first)
        monkeypatch.setattr(AdapterPool, "put", put_later)
        monkeypatch.setattr(AdapterPool, "free", note)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(engine.load_adapter, second)
            await gate.wait_until_reached()
            tasks.start_soon(engine.drop_adapter, AdapterId("x"))
            for _ in range(10):
                await checkpoint()
            gate.opened.set()
        assert given == [True]
        assert engine.status().adapters == ("yy",)


async def test_an_adapter_too_large_for_an_empty_engine_is_unsupported(tmp_path: Path) -> None:
    store = DictStore()
    card = store.add("m", MODEL)
    async with make_engine(adapter_bytes="150 KiB") as engine:
        await engine.load(card, store)
        await engine.load_adapter(Adapter("x", "m", write(tmp_path / "x", MODEL, r=8)))
        with pytest.raises(OutOfMemory, match="drop one"):
            await engine.load_adapter(Adapter("y", "m", write(tmp_path / "y", MODEL, r=8)))
        with pytest.raises(UnsupportedAdapter, match="rank 64"):
            await engine.load_adapter(Adapter("z", "m", write(tmp_path / "z", MODEL, r=64)))
        assert engine.status().adapters == ("x",)


@pytest.mark.parametrize("error", [MemoryError, torch.OutOfMemoryError])
async def test_allocation_failures_are_raised_as_out_of_memory(
    error: type[Exception], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fail(*_: Any) -> NoReturn:
        raise error

    store = DictStore()
    card, adapter = store.add("m", MODEL), Adapter("x", "m", write(tmp_path, MODEL))
    async with make_engine() as engine:
        await engine.load(card, store)
        with monkeypatch.context() as patch:
            patch.setattr(AdapterPool, "put", fail)
            with pytest.raises(OutOfMemory, match="adapter 'x'"):
                await engine.load_adapter(adapter)
        await engine.load_adapter(adapter)
        assert engine.status().adapters == ("x",)


def test_a_layer_of_another_dtype_than_the_others_cannot_have_adapters() -> None:
    layers = {"a": nn.Linear(8, 8), "b": nn.Linear(8, 8, dtype=torch.bfloat16)}
    targets = {name: Target(layer, 8, 8) for name, layer in layers.items()}
    pool = RangePool(targets, num_ranks=8, dtype=torch.float32, device=torch.device("cpu"))
    pair = LowRank(torch.ones(4, 8), torch.ones(4, 8))
    pool.check("x", AdapterWeights({"a": pair}))
    with pytest.raises(UnsupportedAdapter, match=r"'b', which is torch\.bfloat16"):
        pool.check("x", AdapterWeights({"a": pair, "b": pair}))


def test_weights_that_were_read_do_not_change_with_the_file(tmp_path: Path) -> None:
    file = write(tmp_path, MODEL) / "adapter_model.safetensors"
    weights = read(tmp_path, torch.float32)
    before = {name: (pair.down.clone(), pair.up.clone()) for name, pair in weights.layers.items()}
    size = file.stat().st_size
    with file.open("r+b") as opened:
        opened.seek(size // 4)
        opened.write(bytes(size - size // 4))
    for name, (down, up) in before.items():
        assert torch.equal(weights.layers[name].down, down)
        assert torch.equal(weights.layers[name].up, up)
