"""Packed weights change the speed of a linear layer and no bits, and stay within their memory limit."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from typing import Any

import anyio
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from hotswap.backends.torch import TorchEngine, linear
from hotswap.backends.torch.linear import linear_layers
from hotswap.backends.torch.packed_cache import PackedCache, PackedWeights
from hotswap.kernels import packed_linear
from tests.backends.torch.dict_store import DictStore
from tests.backends.torch.test_engine import ask, collect
from tests.backends.torch.zoo import generate, make_model

CHECKED = "crc32c:0"  # any checksum: it identifies the weights, and is not compared here


def made(outputs: int, inputs: int, dtype: torch.dtype, *, bias: bool = True) -> nn.Sequential:
    torch.manual_seed(outputs * inputs)
    module = nn.Sequential(nn.Linear(inputs, outputs, bias=bias), nn.Linear(outputs, inputs, bias=bias))
    return module.to(dtype).requires_grad_(False)


def pack_all(cache: PackedCache, module: nn.Module, key: str | None = None) -> PackedWeights:
    packed = cache.acquire(key, linear_layers(module))
    while cache.pack_next(packed):
        pass
    return packed


@pytest.fixture(params=[False, True], ids=["as stored", "widened"])
def widened(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Treats this CPU as one with bf16 instructions, and as one without."""
    monkeypatch.setattr(linear, "_widens", lambda: request.param)


@pytest.fixture(params=["by our kernel", "by oneDNN", "by oneDNN in fp32"])
def computed(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Treats this CPU as it is, as one without AVX-512, and as one without a bf16 kernel too."""
    if request.param != "by our kernel":
        monkeypatch.setattr(packed_linear, "supported", lambda _: False)
    if request.param == "by oneDNN in fp32":
        monkeypatch.setattr(linear, "_has_kernel", lambda dtype: dtype is torch.float32)


@pytest.mark.usefixtures("widened", "computed")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_bits_depend_neither_on_packing_nor_on_the_number_of_rows(dtype: torch.dtype) -> None:
    @given(
        outputs=st.integers(1, 600), inputs=st.integers(1, 700), rows=st.integers(2, 80), bias=st.booleans()
    )
    def check(outputs: int, inputs: int, rows: int, bias: bool) -> None:
        module = made(outputs, inputs, dtype, bias=bias)
        hidden = torch.randn(80, inputs).to(dtype)
        cache = PackedCache(1 << 30)
        packed = cache.acquire(None, linear_layers(module))
        unpacked = module(hidden)
        assert cache.pack_next(packed)
        half = module(hidden[:rows])
        assert cache.pack_next(packed)
        assert not cache.pack_next(packed)
        assert torch.equal(half, unpacked[:rows])
        assert torch.equal(module(hidden[:rows]), unpacked[:rows])

    check()


def test_a_widened_layer_is_as_precise_as_one_in_its_own_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    module, hidden = made(96, 500, torch.bfloat16), torch.randn(8, 500).bfloat16()
    exact = copy.deepcopy(module[0]).double()(hidden.double())
    errors: list[float] = []
    for widens in (False, True):
        monkeypatch.setattr(linear, "_widens", lambda widens=widens: widens)
        pack_all(PackedCache(1 << 30), module)
        errors.append(float((module[0](hidden).double() - exact).abs().max()))
    assert errors[1] <= 1.01 * errors[0]


@pytest.mark.usefixtures("computed")
def test_a_layers_hooks_run_and_subclasses_are_not_replaced() -> None:
    class Router(nn.Linear):
        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            return super().forward(hidden) * 2

    module, router = made(32, 16, torch.float32), Router(16, 4).requires_grad_(False)
    seen: list[int] = []
    module[0].register_forward_hook(lambda *_: seen.append(0))
    hidden = torch.randn(3, 16)
    expected, routed = module(hidden), router(hidden)
    pack_all(PackedCache(1 << 30), nn.Sequential(module, router))
    assert torch.allclose(module(hidden), expected, atol=1e-5)
    assert torch.equal(router(hidden), routed)
    assert seen == [0, 0]


def test_without_the_kernels_layers_stay_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "supported_dtypes", frozenset)
    monkeypatch.setattr(linear, "_widens", lambda: False)
    module, hidden = made(32, 16, torch.float32), torch.randn(3, 16)
    expected = module(hidden)
    cache = PackedCache(1 << 30)
    pack_all(cache, module)
    assert cache.used_bytes == 0
    assert torch.equal(module(hidden), expected)


@pytest.mark.usefixtures("computed")
def test_the_cache_stays_within_its_limit_and_drops_unloaded_models_first() -> None:
    modules = {name: made(64, 64, torch.float32) for name in "abc"}
    one = 2 * 64 * 64 * 4
    cache = PackedCache(2 * one)
    first = pack_all(cache, modules["a"], "a")
    second = pack_all(cache, modules["b"], "b")
    assert cache.used_bytes == 2 * one
    cache.release(first)
    third = pack_all(cache, modules["c"], "c")
    assert cache.used_bytes == second.size_bytes + third.size_bytes == 2 * one
    assert cache.acquire("b", linear_layers(modules["b"])) is not second, "they are in use"
    cache.fit(one)
    assert cache.used_bytes <= one
    cache.fit(0)
    assert cache.used_bytes == 0
    assert torch.isfinite(modules["c"](torch.randn(3, 64))).all()


def test_packed_weights_are_found_again_by_their_model_only() -> None:
    cache = PackedCache(1 << 20)
    module, other = made(64, 64, torch.float32), made(64, 64, torch.float32)
    packed = pack_all(cache, module, "a")
    cache.release(packed)
    assert cache.used_bytes == packed.size_bytes
    assert cache.acquire("b", linear_layers(other)).size_bytes == 0
    assert cache.acquire("a", linear_layers(module)) is packed
    unknown = pack_all(cache, made(64, 64, torch.float32))
    before = cache.used_bytes
    cache.release(unknown)
    assert before - cache.used_bytes == 2 * 64 * 64 * 4, "no key would find them again"


async def test_an_engine_packs_between_steps_and_keeps_packed_weights_across_swaps() -> None:
    store, names = DictStore(), ("llama", "qwen3")
    models = {name: make_model(name) for name in names}
    for name, model in models.items():
        store.add(name, model)
        manifest = store.manifests[name]
        shards = tuple(replace(shard, checksum=CHECKED) for shard in manifest.shards)
        store.manifests[name] = replace(manifest, shards=shards)
    options: dict[str, Any] = {"kv_tokens": 512, "memory_bytes": "64 MiB", "threads": 1}
    async with TorchEngine("e0", **options) as engine:

        async def tokens(name: str) -> list[int]:
            return [t.id for t in await collect(engine, ask([3, 1, 4], model=name, max_tokens=60))]

        expected = {name: generate(models[name], [3, 1, 4], 60) for name in names}
        await engine.load(store.card("llama"), store)
        assert await tokens("llama") == expected["llama"]
        one = engine.packed_bytes
        assert one > 0
        await engine.preload(store.card("qwen3"), store)
        both = engine.packed_bytes
        assert both > one, "what is preloaded is packed before it serves"
        for name in ("qwen3", "llama", "qwen3"):
            await engine.unload()
            await engine.load(store.card(name), store)
            assert await tokens(name) == expected[name]
            assert engine.packed_bytes == both
        await engine.unload()
        assert engine.status().weight_bytes == 0
    assert engine.packed_bytes == 0


async def test_packed_weights_are_not_those_of_the_model_under_another_config() -> None:
    """The stored bytes stay, and the config says that the model has fewer layers."""
    model, store = make_model("llama"), DictStore()
    manifest = store.manifests[store.add("m", model).id]
    shards = tuple(replace(shard, checksum=CHECKED) for shard in manifest.shards)
    whole = replace(manifest, shards=shards)
    shorter = replace(whole, config=json.dumps(json.loads(whole.config) | {"num_hidden_layers": 1}))
    async with TorchEngine("e0", kv_tokens=512, memory_bytes="64 MiB", threads=1) as engine:
        for store.manifests["m"] in (shorter, whole):
            await engine.load(store.card("m"), store)
            await packed(engine, 1)
            tokens = [token.id for token in await collect(engine, ask([3, 1, 4], max_tokens=20))]
            await engine.unload()
    assert tokens == generate(model, [3, 1, 4], 20)


async def test_the_serving_model_is_packed_again_after_a_preload_is_dropped() -> None:
    store = DictStore()
    card, other = store.add("llama", make_model("llama")), store.add("other", make_model("llama", seed=1))
    async with TorchEngine("e0", kv_tokens=512, memory_bytes="64 MiB", threads=1) as engine:
        await engine.load(card, store)
        await packed(engine, 1)
        whole, kv_bytes = engine.packed_bytes, engine._models.cache_bytes
    room = 2 * card.weight_bytes + kv_bytes + whole // 2
    async with TorchEngine("e0", kv_tokens=512, memory_bytes=room, packed_bytes=whole, threads=1) as engine:
        await engine.load(card, store)
        await packed(engine, whole)
        await engine.preload(other, store)
        assert engine.packed_bytes < whole, "the preload must have dropped packed weights"
        await engine.drop_preload()
        await packed(engine, whole)


async def packed(engine: TorchEngine, least_bytes: int) -> None:
    """Wait until the idle engine has packed at least this much and has no background work left."""
    while engine.packed_bytes < least_bytes or not (runner := engine._running_worker._runner):  # noqa: ASYNC110
        await anyio.sleep(0.01)
    while not runner.background_done:  # noqa: ASYNC110 - another thread packs
        await anyio.sleep(0.01)


@pytest.mark.parametrize("packed_bytes", [0, "100 KiB"])
async def test_packed_weights_stay_within_the_engines_limit(packed_bytes: int | str) -> None:
    model, store = make_model("llama"), DictStore()
    card = store.add("m", model)
    async with TorchEngine("e0", kv_tokens=512, packed_bytes=packed_bytes, threads=1) as engine:
        await engine.load(card, store)
        tokens = [t.id for t in await collect(engine, ask([3, 1, 4], max_tokens=40))]
        assert tokens == generate(model, [3, 1, 4], 40)
        assert engine.packed_bytes <= (100 << 10 if packed_bytes else 0)
