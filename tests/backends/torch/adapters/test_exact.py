"""In fp32 a request with an adapter gets the tokens of `generate` on the merged model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import anyio
import pytest
import torch

from hotswap import Adapter, AdapterId, Sampling
from hotswap.backends.torch import TorchEngine
from hotswap.backends.torch.adapters import manager, ranges
from hotswap.backends.torch.adapters.paged import PagedPool
from hotswap.backends.torch.adapters.ranges import RangePool
from tests.backends.torch.adapters.files import ALL, ATTENTION, merged, write
from tests.backends.torch.clients import make_client_plans, run_clients
from tests.backends.torch.dict_store import DictStore
from tests.backends.torch.logprobs import LOGPROBS, check_engine
from tests.backends.torch.zoo import VOCABULARY, generate, make_model

KINDS: dict[str, dict[str, Any]] = {
    "attention": {"names": ATTENTION, "r": 4, "lora_alpha": 8},
    "all": {"names": ALL, "r": 16, "lora_alpha": 16},
    "rslora": {"names": ("q_proj", "v_proj"), "r": 8, "lora_alpha": 4, "use_rslora": True},
    "head": {"names": ("lm_head", "down_proj"), "r": 5, "lora_alpha": 3},
    "patterns": {
        "names": ALL,
        "r": 8,
        "rank_pattern": {"q_proj": 24, "layers.1.mlp.up_proj": 3},
        "alpha_pattern": {r"layers\.2\..*": 5},
        "dtype": torch.bfloat16,
    },
    "gpt2": {"names": ("c_attn", "c_fc", "c_proj"), "r": 8},
    "phi3": {"names": ("qkv_proj", "o_proj", "gate_up_proj"), "r": 8},
    "mixtral": {"names": ATTENTION, "r": 8},
    "deepseek": {"names": ("q_a_proj", "q_b_proj", "kv_b_proj", "o_proj"), "r": 8},
}
MIXES = {
    "llama": ("attention", "all", "rslora", "head", "patterns"),
    "qwen2": ("attention", "all", "head"),
    "gemma3": ("attention", "all", "patterns"),
    "gpt2": ("gpt2",),
    "phi3": ("phi3",),
    "mixtral": ("mixtral",),
    "deepseek_v3": ("deepseek",),
}


@pytest.mark.parametrize("way", ["rows", "tiles", "pages"])
@pytest.mark.parametrize("architecture", MIXES)
async def test_tokens_equal_those_of_the_merged_model(
    architecture: str, way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Tiles and pages are for other devices, and must be right on all.
    monkeypatch.setattr(manager, "pool_kind", lambda device: PagedPool if way == "pages" else RangePool)
    if way == "tiles":
        monkeypatch.setattr(ranges, "goes_by_rows", lambda dtype, device: False)
    await serve_mixed(architecture, tmp_path)


async def serve_mixed(architecture: str, tmp_path: Path, device: str = "cpu") -> None:
    """Compare requests with all of an architecture's adapters, and without, with the merged models."""
    random = Random(2)
    model = make_model(architecture)
    adapters = [
        Adapter(kind, "m", write(tmp_path / kind, model, seed=seed, size=4.0, **KINDS[kind]))
        for seed, kind in enumerate(MIXES[architecture])
    ]
    models = {None: model} | {a.id: merged(model, Path(str(a.source))) for a in adapters}
    named = [random.choice(list(models)) for _ in range(max(8, 2 * len(models)))]
    prompts = [[random.randrange(2, VOCABULARY) for _ in range(random.choice([1, 5, 40, 70]))] for _ in named]
    counts = [random.choice([1, 12, 24]) for _ in named]
    store = DictStore()
    card = store.add("m", model)
    for each in models.values():
        each.to(device)
    expected = [generate(models[a], p, n) for a, p, n in zip(named, prompts, counts, strict=True)]
    assert all(
        adapter is None or tokens != generate(model, prompt, len(tokens))
        for adapter, prompt, tokens in zip(named, prompts, expected, strict=True)
        if len(tokens) == 12
    ), "every adapter must change tokens, or the test proves nothing"

    plans = make_client_plans(random, "m", prompts, [Sampling(max_tokens=count) for count in counts])
    plans = [
        replace(plan, request=replace(plan.request, adapter=None if a is None else AdapterId(a)))
        for plan, a in zip(plans, named, strict=True)
    ]
    # Few blocks and a small budget, so that requests are preempted and prompts are cut.
    async with TorchEngine(
        "e0", device=device, kv_tokens=96, kv_block_tokens=16, token_budget=48, max_requests=8, threads=1
    ) as engine:
        await engine.load(card, store)
        for adapter in adapters:
            await engine.load_adapter(adapter)
        assert await run_clients(engine, plans) == expected


@pytest.mark.parametrize("way", ["rows", "pages"])
async def test_log_probabilities_are_those_of_the_merged_model(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of prompts, whose rows pass the head of each adapter, too."""
    monkeypatch.setattr(manager, "pool_kind", lambda device: PagedPool if way == "pages" else RangePool)
    random, model, store = Random(4), make_model("llama"), DictStore()
    card = store.add("m", model)
    adapters = [
        Adapter(kind, "m", write(tmp_path / kind, model, seed=seed, size=4.0, **KINDS[kind]))
        for seed, kind in enumerate(("head", "all"))
    ]
    models = {None: model} | {a.id: merged(model, Path(str(a.source))) for a in adapters}
    async with TorchEngine("e0", kv_tokens=1024, token_budget=48, max_requests=8, threads=1) as engine:
        await engine.load(card, store)
        for adapter in adapters:
            await engine.load_adapter(adapter)
        async with anyio.create_task_group() as tasks:
            for length in (5, 40, 90):
                for name, each in models.items():
                    prompt = [random.randrange(2, VOCABULARY) for _ in range(length)]
                    asked = replace(LOGPROBS, max_tokens=8)
                    tasks.start_soon(check_engine, engine, each, "m", prompt, asked, name)
