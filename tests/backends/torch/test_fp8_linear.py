"""Linear layers whose FP8 weights stay quantized: half the memory, and the tokens of dequantized weights."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from hotswap import Adapter, Fleet, FleetView, Model, ModelId, Request, RequestId, Sampling
from hotswap.abc import ModelCard, Scheduler
from hotswap.backends.stores import NvmeStore, PinnedStore, TieredStore
from hotswap.backends.stores.convert import convert
from hotswap.backends.torch import SkeletonCache, TorchEngine, linear, loader
from hotswap.backends.torch.adapters import manager
from hotswap.backends.torch.adapters.paged import PagedPool
from hotswap.backends.torch.adapters.pool import AdapterPool
from hotswap.backends.torch.adapters.ranges import RangePool
from hotswap.backends.torch.dequantize import Dequantizer
from hotswap.backends.torch.fp8 import SCHEMES
from hotswap.backends.torch.fp8_linear import (
    QuantizedWeights,
    attach,
    detach,
    keeps_fp8_by_default,
    linear_weights,
)
from hotswap.backends.torch.linear import MIN_ROWS, invariant_linear, supported_dtypes
from hotswap.backends.torch.modeling import Skeleton
from hotswap.backends.torch.weights import Views, tensor_at
from hotswap.errors import ConfigError, ShardCorrupt
from hotswap.kernels.fp8_gemm import Fp8Weight, dequantize_rows, pack
from hotswap.kernels.targets import TARGETS, Device
from hotswap.policies import LeastLoadedRouter
from tests.backends.torch.adapters.files import write
from tests.backends.torch.clients import make_client_plans, run_clients
from tests.backends.torch.test_dequantize import Odd, fake_quantize, stored
from tests.backends.torch.zoo import VOCABULARY, generate, make_model

A, B = ModelId("a"), ModelId("b")
PROMPT = (5, 6, 7, 8)
_MODULE = "hotswap.backends.torch.fp8_linear"


@asynccontextmanager
async def store_of(root: Path, *, lends: bool) -> AsyncGenerator[Any]:
    disk = NvmeStore(root)
    async with TieredStore(PinnedStore("64 MiB"), disk) if lends else disk as store:
        yield store


def put(root: Path, name: ModelId, model: Any, scheme: str | None = "fp8-e4m3") -> Any:
    model.save_pretrained(root / f"source-{name}")
    return convert(root / f"source-{name}", root, model_id=name, quantize=scheme)


async def card_of(store: Any, name: ModelId) -> ModelCard:
    return ModelCard.of(Model(name), await store.manifest(name))


def make_engine(name: str = "e0", **options: Any) -> TorchEngine:
    return TorchEngine(name, **{"kv_tokens": 512, "threads": 1, "keep_fp8": True, **options})


def ask(model: ModelId = A, **more: Any) -> Request:
    sampling = Sampling(max_tokens=24, ignore_eos=True)
    return Request(id=RequestId("r"), model=model, prompt=PROMPT, sampling=sampling, **more)


async def tokens(engine: TorchEngine, request: Request) -> list[int]:
    async with engine.stream(request) as stream:
        return [token.id async for token in stream]


# ------------------------------------------------------------------------------------------------- a layer


def make_fp8_layer(layer: nn.Linear, scheme: str, dtype: torch.dtype) -> tuple[nn.Sequential, torch.Tensor]:
    """Return a layer computed from FP8 values, and its dequantized weight."""
    module = nn.Sequential(layer)
    manifest, flat = stored(module, scheme)
    quantized = QuantizedWeights(frozenset({"0.weight"}), SCHEMES[scheme], layer.weight.dtype, dtype)
    specs = {spec.name: spec for spec in manifest.tensors}
    (made,) = attach(module, quantized, specs, Views(flat))
    return module, dequantize_rows(made.weight, slice(None), dtype)


@pytest.mark.parametrize("wide", [False, True], ids=["as stored", "widened"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_layer_has_the_bits_of_its_dequantized_weight_for_any_number_of_rows(
    dtype: torch.dtype, wide: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear, "_widens", lambda: wide)
    if dtype not in supported_dtypes():
        pytest.skip(f"there is no kernel for {dtype} here")

    @given(
        outputs=st.integers(1, 300),
        inputs=st.sampled_from([1, 64, 100, 128, 300, 512]),
        rows=st.integers(MIN_ROWS, 40),
        bias=st.booleans(),
        scheme=st.sampled_from(list(SCHEMES)),
    )
    def check(outputs: int, inputs: int, rows: int, bias: bool, scheme: str) -> None:
        torch.manual_seed(outputs * inputs)
        layer = nn.Linear(inputs, outputs, bias=bias).to(dtype).requires_grad_(False)
        hidden = torch.randn(40, inputs).to(dtype)
        module, whole = make_fp8_layer(layer, scheme, dtype)
        found = module(hidden)
        assert torch.equal(module(hidden[:rows]), found[:rows])
        if wide and dtype is torch.bfloat16:
            its_bias = layer.bias.float() if bias else None
            assert torch.equal(found, invariant_linear(hidden.float(), whole.float(), its_bias).to(dtype))
        else:
            assert torch.equal(found, invariant_linear(hidden, whole, layer.bias))

    check()


def test_detaching_restores_a_layer_and_its_hooks_run() -> None:
    layer = nn.Linear(64, 32).requires_grad_(False)
    hidden, seen = torch.randn(4, 64), list[int]()
    layer.register_forward_hook(lambda *_: seen.append(0))
    before = layer(hidden)
    module = nn.Sequential(layer)
    manifest, flat = stored(module, "fp8-e4m3")
    quantized = QuantizedWeights(linear_weights(module), SCHEMES["fp8-e4m3"], torch.float32, torch.float32)
    made = attach(module, quantized, {spec.name: spec for spec in manifest.tensors}, Views(flat))
    assert not torch.equal(layer(hidden), before)
    detach(made)
    assert torch.equal(layer(hidden), before)
    assert seen == [0, 0, 0]


@pytest.mark.skipif(torch.float32 not in supported_dtypes(), reason="oneDNN has no kernel here")
def test_a_model_with_fp8_layers_is_batch_invariant_without_the_mode() -> None:
    model = make_model("llama")
    skeleton = Skeleton(json.dumps(model.config.to_dict()), torch.device("cpu"))
    manifest, flat = stored(model, "fp8-e4m3")
    dequantizer = Dequantizer(manifest, keep=linear_weights(skeleton.module))
    quantized = QuantizedWeights(dequantizer.kept, dequantizer.scheme, torch.float32, torch.float32)
    skeleton.bind(flat, manifest.tensors, quantized)
    made = skeleton.fp8_linears
    assert len(made) == len(dequantizer.kept) > 0
    assert skeleton.linear_only
    skeleton.unbind()
    assert skeleton.fp8_linears == ()
    assert not any(vars(linear.layer).get("forward") is linear for linear in made)


def test_fp8_weights_that_do_not_fit_a_layer_are_refused() -> None:
    manifest, flat = stored(nn.Sequential(nn.Linear(64, 32)), "fp8-e4m3")
    specs = {spec.name: spec for spec in manifest.tensors}
    for other in (nn.Linear(32, 64), nn.Linear(64, 31), nn.Linear(300, 32)):
        module = nn.Sequential(other)
        quantized = QuantizedWeights(
            linear_weights(module), SCHEMES["fp8-e4m3"], torch.float32, torch.float32
        )
        with pytest.raises(ShardCorrupt, match=r"'0\.weight'.*convert the model again"):
            attach(module, quantized, specs, Views(flat))
        assert "forward" not in vars(other)


# ------------------------------------------------------------------------------------------------ at a load


@given(
    sizes=st.lists(
        st.tuples(st.integers(1, 40), st.sampled_from([1, 3, 63, 64, 128, 200, 256])), min_size=1, max_size=5
    ),
    scheme=st.sampled_from(list(SCHEMES)),
    kept=st.integers(0, 31),
    order=st.none() | st.lists(st.integers(0, 9)),
    in_one=st.booleans(),
    packs=st.booleans(),
)
def test_some_weights_stay_quantized_and_the_others_are_dequantized_within_one_buffer(
    sizes: list[tuple[int, int]],
    scheme: str,
    kept: int,
    order: list[int] | None,
    in_one: bool,
    packs: bool,
) -> None:
    module = Odd(sizes, torch.bfloat16)
    manifest, data = stored(module, scheme, order=order)
    keep = {f"layers.{index}.weight" for index in range(len(sizes)) if kept >> index & 1}
    dequantizer = Dequantizer(manifest, keep=keep, packs=packs)
    whole = Dequantizer(manifest)
    expected = torch.empty(whole.size_bytes, dtype=torch.uint8)
    whole.run(data, expected)
    if in_one:
        flat = torch.full((dequantizer.buffer_bytes,), 255, dtype=torch.uint8)
        source = dequantizer.stored_part(flat).copy_(data)
    else:
        flat, source = torch.full((dequantizer.size_bytes,), 255, dtype=torch.uint8), data
    dequantizer.run(source, flat)
    assert dequantizer.kept == keep
    found = {spec.name: tensor_at(flat, spec) for spec in dequantizer.specs}
    for spec in whole.specs:
        right = tensor_at(expected, spec)
        if spec.name not in keep:
            assert torch.equal(found[spec.name], right)
            continue
        width, group = spec.shape[1], SCHEMES[scheme].group
        weight = Fp8Weight(found[spec.name], found[f"{spec.name}.scale"], width, group, torch.bfloat16)
        assert weight.is_packed is packs
        assert torch.equal(dequantize_rows(weight, slice(None), torch.bfloat16), right)
        assert torch.equal(pack(weight).qweight, weight.qweight) or not packs


def test_a_weight_tied_to_another_kind_of_layer_is_dequantized() -> None:
    module = Odd([(20, 256), (20, 256)], torch.bfloat16)
    module.layers[1].weight = module.layers[0].weight
    manifest, _ = stored(module, "fp8-e4m3")
    both = {"layers.0.weight", "layers.1.weight"}
    assert Dequantizer(manifest, keep=both).kept == both
    assert Dequantizer(manifest, keep={"layers.0.weight"}).kept == frozenset()


def test_a_buffer_without_changes_can_be_used_in_place() -> None:
    manifest, _ = stored(Odd([(20, 256), (8, 100)], torch.bfloat16), "fp8-e4m3")
    everything = {spec.name for spec in manifest.tensors}
    assert Dequantizer(manifest, keep=everything).as_stored
    assert not Dequantizer(manifest, keep=everything, packs=True).as_stored
    assert not Dequantizer(manifest, keep=everything, dtype=torch.float32).as_stored
    assert not Dequantizer(manifest).as_stored


# --------------------------------------------------------------------------------------------------- served


@pytest.mark.parametrize("lends", [True, False])
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("architecture", ["llama", "qwen3", "mistral", "phi", "mixtral", "deepseek_v3"])
async def test_tokens_equal_those_of_the_dequantized_model(
    architecture: str, scheme: str, lends: bool, tmp_path: Path
) -> None:
    random = Random(3)
    model = make_model(architecture)
    put(tmp_path, A, model, scheme)
    plain = [[random.randrange(2, VOCABULARY) for _ in range(length)] for length in (1, 7, 40)]
    fake_quantize(model, scheme)
    expected = [generate(model, prompt, 30) for prompt in plain]
    async with store_of(tmp_path, lends=lends) as store, make_engine() as engine:
        await engine.load(await card_of(store, A), store)
        plans = make_client_plans(random, A, plain, [Sampling(max_tokens=30)] * 3)
        assert await run_clients(engine, plans) == expected


@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float32])
async def test_tokens_equal_those_of_dequantized_weights_in_any_dtype(
    dtype: torch.dtype | None, tmp_path: Path
) -> None:
    put(tmp_path, A, make_model("llama", dtype=torch.bfloat16))
    received: list[list[int]] = []
    async with store_of(tmp_path, lends=True) as store:
        for keep in (True, False):
            async with make_engine(dtype=dtype, keep_fp8=keep) as engine:
                await engine.load(await card_of(store, A), store)
                received.append(await tokens(engine, ask()))
    assert received[0] == received[1]


async def test_lent_fp8_weights_take_no_memory_and_read_ones_their_own_size(
    tmp_path: Path,
) -> None:
    manifest = put(tmp_path, A, make_model("llama", dtype=torch.bfloat16))
    taken: dict[tuple[bool, bool], int] = {}
    for lends in (True, False):
        for keep in (True, False):
            async with store_of(tmp_path, lends=lends) as store, make_engine(keep_fp8=keep) as engine:
                await engine.load(await card_of(store, A), store)
                taken[lends, keep] = engine.status().weight_bytes
    assert taken[True, True] == 0
    assert manifest.weight_bytes <= taken[False, True] <= manifest.buffer_bytes < taken[False, False]


async def test_a_model_that_fits_only_quantized_is_preloaded_beside_another(tmp_path: Path) -> None:
    for name, seed in ((A, 1), (B, 2)):
        put(tmp_path, name, make_model("llama", dtype=torch.bfloat16, seed=seed))
    async with store_of(tmp_path, lends=False) as store:
        cards = [await card_of(store, name) for name in (A, B)]
        manifest = await store.manifest(A)
        memory_bytes = 2 * manifest.buffer_bytes + (128 << 10)
        assert memory_bytes < 2 * Dequantizer(manifest).buffer_bytes, "dequantized they would not fit"
        async with make_engine(memory_bytes=memory_bytes, kv_tokens=256) as engine:
            await engine.load(cards[0], store)
            assert engine.can_preload(cards[1])
            await engine.preload(cards[1], store)
            assert engine.status().preloaded == B
            await engine.evict(deadline_s=0)
            await engine.unload()
            await engine.load(cards[1], store)
            assert len(await tokens(engine, ask(B))) == 24


async def test_an_evicted_request_continues_after_the_skeleton_served_other_models(tmp_path: Path) -> None:
    """With models of one architecture, in this engine and in another one that dequantizes weights."""
    model = make_model("llama")
    put(tmp_path, A, model)
    put(tmp_path, B, make_model("llama", seed=7), None)
    plain = generate(make_model("llama", seed=7), PROMPT, 24)
    expected = generate(fake_quantize(model, "fp8-e4m3"), PROMPT, 24)
    skeletons = SkeletonCache()
    async with (
        store_of(tmp_path, lends=True) as store,
        make_engine("e0", skeletons=skeletons) as engine,
        make_engine("e1", skeletons=skeletons, keep_fp8=False) as other,
    ):
        await engine.load(await card_of(store, A), store)
        received: list[int] = []
        async with engine.stream(ask()) as stream:
            async for token in stream:
                received.append(token.id)
                if len(received) == 9:
                    break
        await engine.evict(deadline_s=0)
        await engine.unload()
        await engine.load(await card_of(store, B), store)
        assert await tokens(engine, ask(B)) == plain
        await engine.unload()
        await other.load(await card_of(store, A), store)
        assert await tokens(other, ask()) == expected
        await engine.load(await card_of(store, A), store)
        assert received + await tokens(engine, ask().continued(received)) == expected


class Idle(Scheduler):
    """Plans nothing."""

    def plan(self, fleet: FleetView) -> tuple[()]:
        return ()


async def test_a_fleet_swaps_to_an_fp8_model_and_migrates_its_requests(
    tmp_path: Path,
) -> None:
    model, other = make_model("llama"), make_model("qwen3")
    put(tmp_path, A, model)
    put(tmp_path, B, other, None)
    expected = generate(fake_quantize(model, "fp8-e4m3"), PROMPT, 24)
    engines = [make_engine(name) for name in ("e0", "e1")]
    async with Fleet(
        engines=engines,
        store=TieredStore(PinnedStore("64 MiB"), NvmeStore(tmp_path)),
        models=[Model(A), Model(B)],
        router=LeastLoadedRouter(),
        scheduler=Idle(),
    ) as fleet:
        await fleet.swap(engines[0].id, to=B)
        for engine in engines:
            await fleet.swap(engine.id, to=A)
        read: list[int] = []
        async with fleet.stream(A, PROMPT, Sampling(max_tokens=24, ignore_eos=True)) as stream:
            async for token in stream:
                read.append(token.id)
                if len(read) in (5, 12):
                    there = stream.hops[-1].instance
                    (to,) = (engine.id for engine in engines if engine.id != there)
                    record = await fleet.migrate(stream.request.id, to=to, method="kv")
                    assert (record.outcome, record.method) == ("done", "kv")
        assert read == expected
        await fleet.swap(engines[0].id, to=B)
        async with fleet.stream(B, PROMPT, Sampling(max_tokens=24, ignore_eos=True)) as stream:
            read = [token.id async for token in stream]
        assert read == generate(other, PROMPT, 24)


@pytest.mark.parametrize("kind", [RangePool, PagedPool])
async def test_adapters_change_layers_with_fp8_weights(
    kind: type[AdapterPool[Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manager, "pool_kind", lambda device: kind)
    model = make_model("llama", dtype=torch.bfloat16)
    put(tmp_path, A, model)
    adapter = Adapter("tuned", A, write(tmp_path / "adapter", model, seed=3, size=4.0))
    received: list[list[list[int]]] = []
    async with store_of(tmp_path, lends=True) as store:
        for keep in (True, False):
            async with make_engine(keep_fp8=keep) as engine:
                await engine.load(await card_of(store, A), store)
                await engine.load_adapter(adapter)
                both = [await tokens(engine, ask(adapter=which)) for which in (None, adapter.version)]
                assert both[0] != both[1]
                received.append(both)
                await engine.unload()
    assert received[0] == received[1]


def test_fp8_weights_are_kept_by_default_on_devices_with_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    here, known = torch.device("cuda:0"), dict[str, bool]()
    for name in ("sm_70", "sm_90"):
        card = Device("a card of a test", TARGETS[name], 132)
        monkeypatch.setattr(f"{_MODULE}.device_of", lambda device, card=card: card)
        for runs in (True, False):
            monkeypatch.setattr(f"{_MODULE}.runs_triton", lambda device, runs=runs: runs)
            for dtype in (torch.bfloat16, torch.float16, torch.float32):
                known[f"{name} {runs} {dtype}"] = keeps_fp8_by_default(here, dtype)
    assert {name for name, keeps in known.items() if keeps} == {
        "sm_90 True torch.bfloat16",
        "sm_90 True torch.float16",
    }
    assert not keeps_fp8_by_default(torch.device("cpu"), torch.bfloat16)


@pytest.mark.parametrize("dtype", [None, torch.float32])
async def test_the_default_depends_on_the_compute_dtype(
    dtype: torch.dtype | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[torch.dtype] = []

    def note(device: torch.device, dtype: torch.dtype) -> bool:
        asked.append(dtype)
        return dtype is torch.bfloat16

    monkeypatch.setattr(loader, "keeps_fp8_by_default", note)
    put(tmp_path, A, make_model("llama", dtype=torch.bfloat16))
    async with store_of(tmp_path, lends=True) as store, make_engine(dtype=dtype, keep_fp8=None) as engine:
        await engine.load(await card_of(store, A), store)
        assert (engine.status().weight_bytes == 0) == (dtype is None), "lent weights take no memory"
        await engine.unload()
    assert asked == [dtype or torch.bfloat16]


def test_ranks_refuse_to_keep_fp8_weights() -> None:
    with pytest.raises(ConfigError, match="keep_fp8"):
        TorchEngine("e0", tp=2, keep_fp8=True)
