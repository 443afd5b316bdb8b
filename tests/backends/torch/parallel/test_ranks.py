"""Ranks give the tokens of one process: real processes, sharded weights, every token compared."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import anyio
import pytest
import pytest_asyncio
import torch

from hotswap import InstanceState, ModelId, Sampling
from hotswap.abc import Manifest, WeightStore, WrapperStore
from hotswap.backends.stores import NvmeStore
from hotswap.backends.torch import TorchEngine
from hotswap.backends.torch.kv import state_bytes
from hotswap.backends.torch.parallel.loader import RankedModel
from hotswap.backends.torch.parallel.processes import RemoteTraceback
from hotswap.errors import InstanceError, InstanceLost, OutOfMemory, ShardCorrupt, UnsupportedModel
from tests.backends.torch.clients import make_client_plans, run_clients
from tests.backends.torch.hybrids import HYBRIDS, OTHERS, make_hybrid
from tests.backends.torch.logprobs import LOGPROBS, check_engine
from tests.backends.torch.parallel.support import (
    add,
    ask,
    card_of,
    loader_of,
    make_engine,
    make_prompts,
    tokens_of,
)
from tests.backends.torch.zoo import generate, make_model

pytestmark = pytest.mark.asyncio(loop_scope="module")

NUM_TOKENS = 20
HIDDEN_SIZE = 64
LENGTHS = (3, 17, 40, 90, 130, 8)
TENSOR = ("llama", "qwen3", "gemma2", "mixtral", "phi3")
PIPELINE = ("llama", "gemma2", "gemma3", "gpt2", "mixtral", "qwen2")
# With recurrent states: stages without attention, layers with two results, and the delta rule. Plans cut
# attention and MLPs, or experts alone.
HYBRID_PIPELINE = ("mamba2", "bamba", "qwen3_next")
HYBRID_TENSOR = ("qwen3_5", "qwen3_5_moe", "jamba")


def made(name: str) -> Any:
    return make_hybrid(name) if name in HYBRIDS | OTHERS else make_model(name)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cut_store(tmp_path_factory: pytest.TempPathFactory) -> AsyncGenerator[NvmeStore]:
    """Models sharded for two tensor-parallel ranks."""
    root = tmp_path_factory.mktemp("cut") / "store"
    for name in TENSOR + HYBRID_TENSOR:
        add(root, name, made(name), tp=2)
    async with NvmeStore(root) as store:
        yield store


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def whole_store(tmp_path_factory: pytest.TempPathFactory) -> AsyncGenerator[NvmeStore]:
    """Models that are not sharded."""
    root = tmp_path_factory.mktemp("whole") / "store"
    for name in PIPELINE + HYBRID_PIPELINE:
        add(root, name, made(name))
    async with NvmeStore(root) as store:
        yield store


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def tensor_engine() -> AsyncGenerator[TorchEngine]:
    async with make_engine(tp=2) as engine:
        yield engine


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pipeline_engine() -> AsyncGenerator[TorchEngine]:
    async with make_engine(pp=2) as engine:
        yield engine


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def grid_engine() -> AsyncGenerator[TorchEngine]:
    async with make_engine(tp=2, pp=2) as engine:
        yield engine


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@asynccontextmanager
async def serving(engine: TorchEngine, store: WeightStore, name: str) -> AsyncIterator[None]:
    await engine.load(await card_of(store, name), store)
    yield
    view = engine.status()
    assert (view.state, view.num_free_kv_blocks) == (InstanceState.SERVING, view.num_kv_blocks)
    await engine.unload()
    assert engine.status().weight_bytes == 0


async def check_tokens(engine: TorchEngine, name: str, *, sampled: bool = False) -> None:
    """Check that random clients receive the tokens of `generate` for each request alone."""
    model, prompts = made(name), make_prompts(1, *LENGTHS)
    plans = make_client_plans(Random(2), name, prompts, [Sampling(max_tokens=NUM_TOKENS)] * len(prompts))
    expected = [generate(model, prompt, NUM_TOKENS) for prompt in prompts]
    assert await run_clients(engine, plans) == expected


@pytest.mark.parametrize("name", TENSOR + HYBRID_TENSOR)
async def test_two_tensor_parallel_ranks(tensor_engine: TorchEngine, cut_store: NvmeStore, name: str) -> None:
    async with serving(tensor_engine, cut_store, name):
        await check_tokens(tensor_engine, name)


@pytest.mark.parametrize("name", PIPELINE + HYBRID_PIPELINE)
async def test_two_stages(pipeline_engine: TorchEngine, whole_store: NvmeStore, name: str) -> None:
    async with serving(pipeline_engine, whole_store, name):
        await check_tokens(pipeline_engine, name)


@pytest.mark.parametrize("name", ["llama", "mixtral", "qwen3_5"])
async def test_two_stages_of_two_ranks(grid_engine: TorchEngine, cut_store: NvmeStore, name: str) -> None:
    async with serving(grid_engine, cut_store, name):
        await check_tokens(grid_engine, name)


async def test_each_stage_continues_a_prefix_from_its_part_of_a_snapshot(
    pipeline_engine: TorchEngine, whole_store: NvmeStore
) -> None:
    """Few tokens follow the snapshot: after more, the decay of a random model hides wrong states."""
    model, (prompt, other) = made("qwen3_next"), make_prompts(7, 70, 20)
    async with serving(pipeline_engine, whole_store, "qwen3_next"):
        for asked in (prompt, other, [*prompt[:64], *other[:1]]):
            request = ask("qwen3_next", asked, NUM_TOKENS)
            assert await tokens_of(pipeline_engine, request) == generate(model, asked, NUM_TOKENS)
        assert pipeline_engine.num_reused_tokens == 64, "four blocks, with the states after them"


async def test_states_are_held_once_by_stages_and_whole_by_ranks_of_a_stage(
    tensor_engine: TorchEngine,
    grid_engine: TorchEngine,
    cut_store: NvmeStore,
) -> None:
    """Plans do not cut recurrent layers. Of three layers the first two have states."""
    sizes = list[list[int]]()
    for engine in (tensor_engine, grid_engine):
        async with serving(engine, cut_store, "qwen3_5"):
            model = engine._models.serving
            assert isinstance(model, RankedModel)
            sizes.append([state_bytes(layers) for layers in model.layers])
    one = 4 * 16 * 16 * 4 + 3 * 128 * 4
    assert sizes == [[2 * one] * 2, [one] * 4]


@pytest.mark.parametrize("kind", ["tensor_engine", "pipeline_engine"])
async def test_ranks_tell_the_log_probabilities_of_one_process(
    kind: str, cut_store: NvmeStore, whole_store: NvmeStore, request: pytest.FixtureRequest
) -> None:
    engine: TorchEngine = request.getfixturevalue(kind)
    model, asked = make_model("llama"), replace(LOGPROBS, max_tokens=NUM_TOKENS)
    store = cut_store if kind == "tensor_engine" else whole_store
    async with serving(engine, store, "llama"), anyio.create_task_group() as tasks:
        for prompt in make_prompts(4, *LENGTHS):
            tasks.start_soon(check_engine, engine, model, "llama", prompt, asked)


async def test_each_rank_sends_a_slice_of_the_hidden_state(
    grid_engine: TorchEngine, pipeline_engine: TorchEngine, cut_store: NvmeStore, whole_store: NvmeStore
) -> None:
    """Hidden size × tokens × item size / tp from each rank of the first stage, and nothing from the last."""
    prompt = make_prompts(3, 75)[0]
    num_computed = len(prompt) + NUM_TOKENS - 1  # the last token is sampled and never computed
    for engine, store, tp in ((grid_engine, cut_store, 2), (pipeline_engine, whole_store, 1)):
        async with serving(engine, store, "llama"):
            before = await loader_of(engine).sent_bytes()
            await tokens_of(engine, ask("llama", prompt, NUM_TOKENS))
            after = await loader_of(engine).sent_bytes()
            sent = [now - then for then, now in zip(before, after, strict=True)]
            assert sent == [HIDDEN_SIZE * num_computed * 4 // tp] * tp + [0] * tp


async def test_each_rank_has_only_its_part(
    grid_engine: TorchEngine, cut_store: NvmeStore, whole_store: NvmeStore
) -> None:
    whole = (await whole_store.manifest(ModelId("llama"))).weight_bytes
    async with serving(grid_engine, cut_store, "llama"):
        assert grid_engine.status().weight_bytes < 1.05 * whole


async def test_bits_do_not_depend_on_the_batch(tensor_engine: TorchEngine, cut_store: NvmeStore) -> None:
    """Sampled tokens equal those of a lone run: a changed bit would change one of hundreds of samples."""
    prompts = make_prompts(5, *LENGTHS)
    samplings = [Sampling(max_tokens=40, temperature=1.5, seed=at) for at in range(len(prompts))]
    async with serving(tensor_engine, cut_store, "llama"):
        plans = make_client_plans(Random(0), "llama", prompts, samplings)
        lone = [await run_clients(tensor_engine, [replace(plan, after=None, leaves=())]) for plan in plans]
        assert await run_clients(tensor_engine, plans) == [tokens for (tokens,) in lone]


async def test_a_model_sharded_for_another_number_of_ranks_is_refused(
    tensor_engine: TorchEngine, whole_store: NvmeStore
) -> None:
    card = await card_of(whole_store, "llama")
    with pytest.raises(UnsupportedModel, match="--world-size 2"):
        await tensor_engine.load(card, whole_store)
    assert tensor_engine.status().state is InstanceState.EMPTY


async def test_a_model_without_a_plan_is_refused(tensor_engine: TorchEngine, whole_store: NvmeStore) -> None:
    class Cut(WrapperStore):
        async def manifest(self, model: ModelId) -> Manifest:
            return replace(await super().manifest(model), world_size=2)

    store = Cut(whole_store)
    with pytest.raises(UnsupportedModel, match="no tensor-parallel plan"):
        await tensor_engine.load(await card_of(store, "gpt2"), store)
    assert tensor_engine.status().state is InstanceState.EMPTY


@pytest.mark.parametrize("name", ["lfm2", "mamba2"])
async def test_a_model_whose_plan_has_its_output_head_alone_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match="no tensor-parallel plan for its layers"):
        add(tmp_path / "store", name, make_hybrid(name), tp=2)


async def test_all_ranks_load_or_none(tensor_engine: TorchEngine, cut_store: NvmeStore) -> None:
    class OneRankCorrupt(WrapperStore):
        async def manifest(self, model: ModelId) -> Manifest:
            manifest = await super().manifest(model)
            tensors = tuple(
                replace(t, shape=t.shape[::-1], stride=())
                if t.rank == 1 and t.name.endswith("layers.1.self_attn.k_proj.weight")
                else t
                for t in manifest.tensors
            )
            return replace(manifest, tensors=tensors)

    card = await card_of(cut_store, "llama")
    with pytest.raises(ShardCorrupt, match=r"rank 1 \(stage 0 of 1, part 1 of 2\)") as caught:
        await tensor_engine.load(card, OneRankCorrupt(cut_store))
    assert isinstance(caught.value.__cause__, RemoteTraceback)
    assert "skeleton" in str(caught.value.__cause__), "the rank's own traceback"
    assert tensor_engine.status().state is InstanceState.EMPTY
    assert tensor_engine.status().weight_bytes == 0
    async with serving(tensor_engine, cut_store, "llama"):
        await check_tokens(tensor_engine, "llama")


async def test_a_cancelled_load_frees_the_memory_of_all_ranks(
    tensor_engine: TorchEngine, cut_store: NvmeStore
) -> None:
    card = await card_of(cut_store, "llama")
    for turns in (1, 3, 6, 12, 20):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(tensor_engine.load, card, cut_store)
            for _ in range(turns):
                await anyio.sleep(0.001)
            tasks.cancel_scope.cancel()
        if tensor_engine.status().state is InstanceState.SERVING:
            await tensor_engine.unload()
        assert tensor_engine.status().state is InstanceState.EMPTY
        assert tensor_engine.status().weight_bytes == 0
    async with serving(tensor_engine, cut_store, "llama"):
        await check_tokens(tensor_engine, "llama")


async def test_a_model_too_large_for_a_rank_is_refused(cut_store: NvmeStore) -> None:
    engine = make_engine(tp=2, memory_bytes="500 KiB")
    loader = loader_of(engine)
    with pytest.raises(OutOfMemory, match="of one rank"):
        await loader.load(await card_of(cut_store, "llama"), cut_store, others_bytes=0)
    assert loader.weight_bytes == 0


@pytest.mark.parametrize("way", ["dtype", "fp8"])
async def test_the_limit_counts_the_size_after_conversion(way: str, tmp_path: Path) -> None:
    """The engine's process converts and dequantizes weights, so it checks the limit before any read."""
    quantize = "fp8-e4m3" if way == "fp8" else None
    model = make_model("llama", dtype=torch.bfloat16)
    manifest = add(tmp_path / "store", "m", model, tp=2, quantize=quantize)
    engine = make_engine(
        tp=2,
        memory_bytes=int(2 * 1.2 * manifest.buffer_bytes),  # as stored, they would fit
        dtype=torch.float32 if way == "dtype" else None,
    )
    loader = loader_of(engine)
    async with NvmeStore(tmp_path / "store") as store:
        with pytest.raises(OutOfMemory, match="of one rank"):
            await loader.load(await card_of(store, "m"), store, others_bytes=0)


async def test_ranks_cannot_preload(pipeline_engine: TorchEngine, whole_store: NvmeStore) -> None:
    card = await card_of(whole_store, "qwen2")
    async with serving(pipeline_engine, whole_store, "llama"):
        assert not pipeline_engine.can_preload(card)
        with pytest.raises(InstanceError, match="one model"):
            await pipeline_engine.preload(card, whole_store)


async def test_a_killed_rank_loses_the_instance(grid_engine: TorchEngine, cut_store: NvmeStore) -> None:
    """While it serves; `unload` restarts it with new processes."""
    prompt = make_prompts(4, 30)[0]
    expected = generate(make_model("llama"), prompt, 300)
    await grid_engine.load(await card_of(cut_store, "llama"), cut_store)
    before = loader_of(grid_engine).pids
    received: list[int] = []

    async def read() -> None:
        async with grid_engine.stream(ask("llama", prompt, 300)) as tokens:
            async for token in tokens:
                received.append(token.id)
                if len(received) == 5:
                    os.kill(before[2], signal.SIGKILL)

    with pytest.raises(InstanceLost):
        await read()
    assert received == expected[: len(received)]
    assert grid_engine.status().state is InstanceState.LOST
    await grid_engine.unload()
    assert grid_engine.status().state is InstanceState.EMPTY
    assert not set(before) & set(loader_of(grid_engine).pids)
    assert not any(is_alive(pid) for pid in before)
    async with serving(grid_engine, cut_store, "llama"):
        assert await tokens_of(grid_engine, ask("llama", prompt, 20)) == expected[:20]
