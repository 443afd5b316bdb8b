"""Loads of quantized models: exact values, within one buffer, from every store, with untrusted manifests."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import anyio
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from hotswap import Model, ModelId, Request, RequestId, Sampling
from hotswap.abc import Manifest, ModelCard, TensorSpec, WeightStore
from hotswap.backends.stores import NvmeStore, PinnedStore, TieredStore
from hotswap.backends.stores.convert import convert
from hotswap.backends.torch import TorchEngine, fp8
from hotswap.backends.torch.dequantize import Dequantizer
from hotswap.backends.torch.fp8 import SCHEMES, Scheme, dequantize, quantize
from hotswap.backends.torch.quantize import Quantizer, quantizable
from hotswap.backends.torch.weights import named_tensors, place, tensor_at
from hotswap.errors import OutOfMemory, ShardCorrupt, StoreError, UnsupportedModel
from tests.backends.torch.clients import make_client_plans, run_clients
from tests.backends.torch.dict_store import DictStore
from tests.backends.torch.zoo import VOCABULARY, generate, make_model

M = ModelId("m")

schemes = st.sampled_from(list(SCHEMES))


def rounded(weights: Tensor, scheme: Scheme) -> Tensor:
    """Return weights rounded to their quantized values, in their own dtype."""
    quantized, scales = quantize(weights, scheme)
    k = weights.shape[-1]
    values = dequantize(quantized.view(-1, k), scales.view(-1, scales.shape[-1]), scheme)
    return values.view(weights.shape).to(weights.dtype)


def fake_quantize(model: Any, scheme: str) -> Any:
    """Round the weights of a model to their quantized values; it stays an ordinary model."""
    state = dict(named_tensors(model))
    with torch.no_grad():
        for name in quantizable(model):
            state[name].copy_(rounded(state[name], SCHEMES[scheme]))
    return model


def stored(module: Any, scheme: str, *, order: Sequence[int] | None = None) -> tuple[Manifest, Tensor]:
    """Return the manifest and the buffer of a quantized model; `order` shuffles the order of its tensors."""
    quantizer = Quantizer(scheme, module)
    parts = [
        (name, part, (id(tensor), index))
        for own, tensor in named_tensors(module)
        for index, (name, part) in enumerate(quantizer(own, tensor.detach()))
    ]
    if order is not None:
        Random(repr(order)).shuffle(parts)
    specs, size_bytes = place((name, p.dtype, tuple(p.shape), identity) for name, p, identity in parts)
    flat = torch.zeros(size_bytes, dtype=torch.uint8)
    for spec, (_, part, _) in zip(specs, parts, strict=True):
        tensor_at(flat, spec).copy_(part)
    dtype = str(quantizer.dtype).removeprefix("torch.")
    manifest = Manifest(
        model=M,
        shards=(),
        buffer_bytes=size_bytes,
        tensors=specs,
        quantization=scheme,
        unquantized_dtype=dtype,
    )
    return manifest, flat


# --------------------------------------------------------------------------------------------- one buffer


class Odd(nn.Module):
    """Layers that grow or shrink when dequantized: with K of 1 the stored parts exceed the weights."""

    def __init__(self, shapes: Sequence[tuple[int, int]], dtype: torch.dtype) -> None:
        super().__init__()
        self.embedding = nn.Embedding(3, 5, dtype=dtype)
        self.layers = nn.ModuleList(nn.Linear(k, n, dtype=dtype) for n, k in shapes)
        self.register_buffer("count", torch.tensor(7))


shapes = st.lists(
    st.tuples(st.integers(1, 40), st.sampled_from([1, 2, 3, 127, 128, 200, 256])), min_size=1, max_size=6
)
dtypes = st.sampled_from([torch.bfloat16, torch.float16, torch.float32])


blocks = st.sampled_from([1, 300, 1 << 18])


@given(
    shapes,
    schemes,
    dtypes,
    st.none() | dtypes,
    st.none() | st.lists(st.integers(0, 9)),
    st.booleans(),
    blocks,
)
def test_weights_are_dequantized_within_one_buffer(
    sizes: list[tuple[int, int]],
    scheme: str,
    dtype: torch.dtype,
    wanted: torch.dtype | None,
    order: list[int] | None,
    in_one: bool,
    block_weights: int,
) -> None:
    module = Odd(sizes, dtype)
    manifest, data = stored(module, scheme, order=order)
    dequantizer = Dequantizer(manifest, dtype=wanted)
    if in_one:
        flat = torch.full((dequantizer.buffer_bytes,), 255, dtype=torch.uint8)
        source = dequantizer.stored_part(flat).copy_(data)
    else:
        flat, source = torch.full((dequantizer.size_bytes,), 255, dtype=torch.uint8), data.clone()
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(fp8._BLOCK_WEIGHTS, "cpu", block_weights)  # so that small tensors have many blocks
        dequantizer.run(source, flat)
    if not in_one:
        assert torch.equal(source, data), "lent memory is not written"
    found = {spec.name: tensor_at(flat, spec) for spec in dequantizer.specs}
    chosen, state = quantizable(module), module.state_dict()
    assert found.keys() == state.keys()
    for name, tensor in state.items():
        before = rounded(tensor, SCHEMES[scheme]) if name in chosen and tensor.numel() else tensor
        target = wanted if wanted and tensor.dtype is dtype else tensor.dtype
        assert found[name].dtype is target
        assert torch.equal(found[name], before.to(target))


def test_the_buffer_is_hardly_larger_than_the_weights() -> None:
    module = Odd([(4096, 512)] * 6, torch.bfloat16)
    dequantizer = Dequantizer(stored(module, "fp8-e4m3")[0])
    assert dequantizer.buffer_bytes <= 1.02 * dequantizer.size_bytes


# ------------------------------------------------------------------------------------------------- served


@asynccontextmanager
async def store_of(kind: str, root: Path) -> AsyncGenerator[WeightStore]:
    """Open a store that lends its memory, or one that reads into the engine's."""
    disk = NvmeStore(root)
    chosen = TieredStore(PinnedStore("64 MiB"), disk) if kind == "lends" else disk
    async with chosen as store:
        yield store


async def card_of(store: WeightStore) -> ModelCard:
    return ModelCard.of(Model(M), await store.manifest(M))


@pytest.mark.parametrize("kind", ["lends", "reads"])
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("architecture", ["llama", "qwen3", "mistral", "mixtral"])
async def test_tokens_equal_those_of_the_rounded_weights(
    architecture: str, scheme: str, kind: str, tmp_path: Path
) -> None:
    random = Random(3)
    model = make_model(architecture)
    model.save_pretrained(tmp_path / "source")
    convert(tmp_path / "source", tmp_path, model_id=M, quantize=scheme)
    plain = [[random.randrange(2, VOCABULARY) for _ in range(length)] for length in (1, 7, 40)]
    before = [generate(model, prompt, 30) for prompt in plain]
    fake_quantize(model, scheme)
    expected = [generate(model, prompt, 30) for prompt in plain]
    assert expected != before, "quantization must change tokens, or the test proves nothing"
    async with store_of(kind, tmp_path) as store, TorchEngine("e0", kv_tokens=512, threads=1) as engine:
        await engine.load(await card_of(store), store)
        plans = make_client_plans(random, M, plain, [Sampling(max_tokens=30)] * 3)
        assert await run_clients(engine, plans) == expected


async def test_bfloat16_tokens_equal_those_of_an_ordinary_model(tmp_path: Path) -> None:
    model = make_model("llama", dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "source")
    manifest = convert(tmp_path / "source", tmp_path, model_id=M, quantize="fp8-e4m3")
    plain = DictStore()
    card = plain.add("plain", fake_quantize(model, "fp8-e4m3"))
    received: list[list[int]] = []
    async with NvmeStore(tmp_path) as store, TorchEngine("e0", kv_tokens=256, threads=1) as engine:
        await engine.load(await card_of(store), store)
        assert manifest.weight_bytes < engine.status().weight_bytes
        received.append(await tokens(engine, M))
        await engine.evict(deadline_s=0)
        await engine.unload()
        assert engine.status().weight_bytes == 0
        await engine.load(card, plain)
        received.append(await tokens(engine, "plain"))
    assert received[0] == received[1]


async def tokens(engine: TorchEngine, model: str) -> list[int]:
    request = Request(
        id=RequestId("r"), model=ModelId(model), prompt=(5, 6, 7), sampling=Sampling(max_tokens=20)
    )
    async with engine.stream(request) as stream:
        return [token.id async for token in stream]


async def test_the_budget_counts_the_dequantized_size(tmp_path: Path) -> None:
    make_model("llama", dtype=torch.bfloat16).save_pretrained(tmp_path / "source")
    manifest = convert(tmp_path / "source", tmp_path, model_id=M, quantize="fp8-e4m3")
    needed = Dequantizer(manifest).buffer_bytes
    async with NvmeStore(tmp_path) as store:
        card = await card_of(store)
        async with TorchEngine("e0", memory_bytes=needed - 1, threads=1) as engine:
            with pytest.raises(OutOfMemory, match=f"{needed:,} bytes"):
                await engine.load(card, store)
            assert engine.status().weight_bytes == 0


@pytest.mark.parametrize("fault", [StoreError("EIO"), None])
async def test_a_load_that_fails_or_is_cancelled_frees_its_memory(fault: StoreError | None) -> None:
    model = make_model("llama", dtype=torch.bfloat16)
    store = DictStore()
    card = store.add(M, model)
    manifest, data = stored(model, "fp8-e4m3")
    shard = replace(store.manifests[M].shards[0], size_bytes=len(data))
    store.manifests[M] = replace(
        store.manifests[M],
        shards=(shard,),
        buffer_bytes=len(data),
        tensors=manifest.tensors,
        quantization=manifest.quantization,
        unquantized_dtype=manifest.unquantized_dtype,
    )
    store.buffers[M] = data
    async with TorchEngine("e0", kv_tokens=256, threads=1) as engine:
        with anyio.CancelScope() as scope:

            def disturb(model: str, index: int) -> None:
                if fault is not None:
                    raise fault
                scope.cancel()

            store.on_chunk = disturb
            with pytest.raises(StoreError) if fault else anyio.CancelScope():
                await engine.load(card, store)
        assert (engine.status().weight_bytes, store.num_lent) == (0, 0)
        store.on_chunk = lambda model, index: None
        await engine.load(card, store)
        assert len(await tokens(engine, M)) == 20


# ------------------------------------------------------------------------------------- untrusted manifests


def spoiled(manifest: Manifest, which: str, **changes: Any) -> Manifest:
    tensors = [replace(spec, **changes) if spec.name == which else spec for spec in manifest.tensors]
    return replace(manifest, tensors=tuple(tensors))


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("layers.0.weight", {"dtype": "float8_e5m2"}),
        ("layers.0.weight", {"shape": (5, 4, 15)}),
        ("layers.0.weight.scale", {"name": "other"}),
        ("layers.0.weight.scale", {"dtype": "int32"}),
        ("layers.0.weight.scale", {"shape": (12, 1)}),
        ("embedding.weight", {"name": "layers.0.bias.scale"}),
    ],
)
def test_values_and_scales_that_do_not_match_are_refused(name: str, changes: Any) -> None:
    manifest, _ = stored(Odd([(20, 15), (6, 3)], torch.bfloat16), "fp8-e4m3")
    with pytest.raises(ShardCorrupt, match="convert the model again"):
        Dequantizer(spoiled(manifest, name, **changes))


@pytest.mark.parametrize("dtype", ["", "load", "int8", "float33"])
def test_an_invalid_original_dtype_is_refused(dtype: str) -> None:
    manifest, _ = stored(Odd([(2, 3)], torch.bfloat16), "fp8-e4m3")
    with pytest.raises(ShardCorrupt, match=f"{dtype!r}"):
        Dequantizer(replace(manifest, unquantized_dtype=dtype))


def test_a_scheme_of_a_later_release_is_refused() -> None:
    manifest, _ = stored(Odd([(2, 3)], torch.bfloat16), "fp8-e4m3")
    with pytest.raises(UnsupportedModel, match="'fp8-words'"):
        Dequantizer(replace(manifest, quantization="fp8-words"))


def test_a_tensor_outside_the_buffer_is_refused() -> None:
    manifest, data = stored(Odd([(20, 15)], torch.bfloat16), "fp8-e4m3")
    dequantizer = Dequantizer(spoiled(manifest, "layers.0.weight", offset_bytes=1 << 20))
    with pytest.raises(ShardCorrupt, match="claims bytes"):
        dequantizer.run(data, torch.empty(dequantizer.size_bytes, dtype=torch.uint8))


def _names(specs: Sequence[TensorSpec]) -> list[str]:
    return [spec.name for spec in specs]


def test_tied_weights_are_dequantized_once() -> None:
    module = Odd([(20, 256), (20, 256)], torch.bfloat16)
    module.layers[1].weight = module.layers[0].weight
    manifest, data = stored(module, "fp8-e4m3")
    dequantizer = Dequantizer(manifest)
    flat = torch.empty(dequantizer.buffer_bytes, dtype=torch.uint8)
    dequantizer.run(dequantizer.stored_part(flat).copy_(data), flat)
    place_of = {spec.name: spec.offset_bytes for spec in dequantizer.specs}
    assert sorted(_names(dequantizer.specs)) == sorted(module.state_dict())
    assert place_of["layers.0.weight"] == place_of["layers.1.weight"]
