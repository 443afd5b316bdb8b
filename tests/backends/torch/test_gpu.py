"""The torch engine with weights, KV blocks and steps on a CUDA device."""

from __future__ import annotations

from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any, get_args

import pytest
import torch
import transformers

from hotswap import DeviceBudget, InstanceState, Model, ModelId, Request, RequestId, Sampling
from hotswap.abc import ModelCard
from hotswap.backends.stores import NvmeStore, PinnedStore, SharedStore, TieredStore
from hotswap.backends.stores.convert import convert
from hotswap.backends.torch import TorchEngine
from hotswap.backends.torch.adapters.manager import pool_kind
from hotswap.backends.torch.adapters.paged import PagedPool
from hotswap.backends.torch.buffers import in_place
from hotswap.backends.torch.gathered import Gathering
from hotswap.backends.torch.step_options import GpuSteps
from tests.backends.torch import test_conformance, test_recurrent
from tests.backends.torch.adapters.test_exact import MIXES, serve_mixed
from tests.backends.torch.clients import make_client_plans, run_clients
from tests.backends.torch.dict_store import DictStore
from tests.backends.torch.hybrids import HYBRIDS
from tests.backends.torch.zoo import CONFIGS, VOCABULARY, generate, make_model
from tests.kernels.interpreted.check_fp8_engine import kept_and_dequantized

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]

CUDA = torch.device("cuda")
PROMPT = (11, 22, 33, 44)


def ask(model: str, name: str = "r", *, max_tokens: int = 6) -> Request:
    sampling = Sampling(max_tokens=max_tokens, ignore_eos=True)
    return Request(id=RequestId(name), model=ModelId(model), prompt=PROMPT, sampling=sampling)


async def tokens_of(engine: TorchEngine, request: Request) -> list[int]:
    async with engine.stream(request) as stream:
        return [token.id async for token in stream]


def make_wide(seed: int = 0) -> Any:
    """Return a model of 160 MiB, more than may stay allocated after an unload."""
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=1024,
        intermediate_size=4096,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=4,
        eos_token_id=None,
    )
    return make_model(config, seed=seed, sharpness=2.0)


class TestTorchEngine(test_conformance.TestTorchEngine):
    """The conformance suite, including migration and adapters."""

    device = "cuda"


@pytest.mark.parametrize("gpu_steps", get_args(GpuSteps))
@pytest.mark.parametrize("architecture", CONFIGS)
async def test_tokens_equal_generate_and_memory_is_freed(
    architecture: str, gpu_steps: GpuSteps, monkeypatch: pytest.MonkeyPatch
) -> None:
    random = Random(1)
    model = make_model(architecture)
    prompts = [[random.randrange(2, VOCABULARY) for _ in range(length)] for length in (2, 17, 33, 60, 130)]
    store = DictStore()
    card = store.add("m", model)
    model.to("cuda")
    expected = [generate(model, prompt, 24) for prompt in prompts]
    plans = make_client_plans(random, "m", prompts, [Sampling(max_tokens=24)] * len(prompts))
    gathered: list[int] = []
    attend = Gathering.attend

    def gather(gathering: Gathering, layer: int, *given: Any) -> Any:
        gathered.append(layer)
        return attend(gathering, layer, *given)

    async with TorchEngine(
        "e0",
        device="cuda",
        kv_tokens=256,
        kv_block_tokens=16,
        token_budget=48,
        max_requests=8,
        gpu_steps=gpu_steps,
    ) as engine:
        for _ in range(2):
            await engine.load(card, store)
            monkeypatch.setattr(Gathering, "attend", gather)  # a trial, in a load, gathers too
            assert await run_clients(engine, plans) == expected
            monkeypatch.setattr(Gathering, "attend", attend)
            await engine.unload()  # raises if the memory is not freed
            assert engine.status().state is InstanceState.EMPTY
    assert bool(gathered) == (gpu_steps == "gathered"), "another path was taken"


async def test_engines_under_a_budget_lend_each_other_memory() -> None:
    """A group of blocks of these models is 4,096 blocks of 16 tokens, since a granule has 2 MiB."""
    model = make_model("llama")
    store, budget = DictStore(), DeviceBudget("1 GiB")
    cards = [store.add(name, model) for name in "ab"]
    model.to("cuda")
    prompts = [[number + 2, *PROMPT * 8] for number in range(8)]
    expected = [generate(model, prompt, 12) for prompt in prompts]
    options: dict[str, Any] = {"device": "cuda", "kv_tokens": 1 << 20, "max_requests": 8}
    async with (
        TorchEngine("e0", device_budget=budget, floor_bytes="200 MiB", **options) as e0,
        TorchEngine("e1", device_budget=budget, floor_bytes="200 MiB", **options) as e1,
    ):
        for engine, card in zip((e0, e1), cards, strict=True):
            await engine.load(card, store)
        for engine, card in zip((e0, e1, e0), (*cards, cards[0]), strict=True):
            most = engine.status().most_kv_blocks
            assert most is not None
            assert await engine.resize_kv(most) == engine.status().num_kv_blocks
            sampling = [Sampling(max_tokens=12)] * len(prompts)
            plans = make_client_plans(Random(1), card.id, prompts, sampling)
            assert await run_clients(engine, plans) == expected
            await engine.resize_kv(0)
            assert budget.held_bytes <= budget.size_bytes
        await e0.unload()
        await e1.unload()
    assert not budget.leases


@pytest.mark.parametrize("architecture", HYBRIDS)
async def test_tokens_of_models_with_recurrent_states_equal_generate(architecture: str) -> None:
    await test_recurrent.compare(architecture, device="cuda")


@pytest.mark.parametrize("architecture", MIXES)
async def test_tokens_equal_those_of_the_merged_model(architecture: str, tmp_path: Path) -> None:
    assert pool_kind(CUDA) is PagedPool, "the kernels of adapters do not run"
    await serve_mixed(architecture, tmp_path, device="cuda")


async def test_an_unload_frees_all_its_memory() -> None:
    store = DictStore()
    cards = [store.add(name, make_wide(seed)) for seed, name in enumerate("ab")]
    async with TorchEngine("e0", device="cuda", kv_tokens=65_536, memory_bytes="4 GiB") as engine:
        free: list[int] = []
        for card in cards * 4:
            await engine.load(card, store)
            await tokens_of(engine, ask(card.id))
            held, _ = torch.cuda.mem_get_info()
            await engine.unload()
            free.append(torch.cuda.mem_get_info()[0])
            assert free[-1] - held > card.weight_bytes
        assert free[-1] >= free[0] - (8 << 20), "swaps leak memory of the device"


async def test_an_unload_ignores_memory_that_others_allocate_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Other engines of the process allocate memory, and other tensors may keep segments of the allocator."""
    store, others = DictStore(), list[torch.Tensor]()
    card = store.add("a", make_wide())
    async with TorchEngine("e0", device="cuda", kv_tokens=4096, memory_bytes="1 GiB") as engine:
        await engine.load(card, store)
        release = engine._loader.reclaimed

        async def take_and_release() -> None:
            others.append(torch.empty(1 << 30, dtype=torch.uint8, device="cuda"))
            await release()

        monkeypatch.setattr(engine._loader, "reclaimed", take_and_release)
        await engine.unload()
        assert engine.status().state is InstanceState.EMPTY
    assert len(others) == 1


@pytest.mark.parametrize("kind", ["own", "shared"])
async def test_weights_come_from_pinned_memory(kind: str, tmp_path: Path) -> None:
    """Shared memory must be on a memory file system: files on a disk cannot be pinned."""
    model = make_model("llama")
    model.save_pretrained(tmp_path / "source")
    convert(tmp_path / "source", tmp_path, model_id="m")
    expected = generate(model.to("cuda"), PROMPT, 6)
    with TemporaryDirectory(dir="/dev/shm") as shared:
        host = PinnedStore("64 MiB") if kind == "own" else SharedStore(shared, "64 MiB")
        await _served_from(host, tmp_path, expected)


async def _served_from(host: PinnedStore | SharedStore, folder: Path, expected: list[int]) -> None:
    async with TieredStore(host, NvmeStore(folder)) as store:
        card = ModelCard.of(Model("m"), await store.manifest(ModelId("m")))
        await store.prefetch(ModelId("m"))
        async with store.open((await store.manifest(ModelId("m"))).shards[0]) as chunks:
            async for chunk in chunks:
                assert chunk.pinned
                assert in_place(chunk.data).is_pinned(), "CUDA does not take it for pinned"
        async with TorchEngine("e0", device="cuda", kv_tokens=256) as engine:
            await engine.load(card, store)
            assert await tokens_of(engine, ask("m")) == expected


@pytest.mark.parametrize("scheme", ["fp8-e4m3", "fp8-e4m3-channel"])
async def test_tokens_of_fp8_weights_equal_those_of_dequantized_ones(scheme: str, tmp_path: Path) -> None:
    kept, dequantized = await kept_and_dequantized(scheme, tmp_path, "cuda")
    assert kept == dequantized
