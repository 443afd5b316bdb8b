"""Adapters saved by PEFT are read, and the tokens equal those of PEFT itself."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from hotswap import Adapter, AdapterId, ModelId, Request, RequestId, Sampling
from hotswap.backends.torch import TorchEngine
from tests.backends.torch.dict_store import DictStore
from tests.backends.torch.zoo import generate, make_model

KINDS: dict[str, dict[str, Any]] = {
    "plain": {"r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"]},
    "all": {"r": 4, "lora_alpha": 3, "target_modules": "all-linear"},
    "rslora": {"r": 16, "lora_alpha": 8, "use_rslora": True, "target_modules": ["o_proj", "down_proj"]},
    "patterns": {
        "r": 8,
        "target_modules": ["q_proj", "k_proj", "up_proj"],
        "rank_pattern": {"k_proj": 2, "layers.1.mlp.up_proj": 24},
        "alpha_pattern": {r"layers\.\d+\.self_attn.q_proj": 20},
    },
}


@pytest.mark.filterwarnings("ignore::FutureWarning")  # raised by transformers for calls of PEFT
@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
async def test_tokens_equal_those_of_peft(architecture: str, tmp_path: Path) -> None:
    peft: Any = import_module("peft")  # untyped
    prompt, expected = [5, 6, 7, 8, 9], {}
    for kind, config in KINDS.items():
        adapted = peft.get_peft_model(
            make_model(architecture), peft.LoraConfig(task_type="CAUSAL_LM", **config)
        )
        generator = torch.Generator().manual_seed(len(kind))
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.data = torch.randn(parameter.shape, generator=generator) * 0.3
        adapted.save_pretrained(tmp_path / kind)
        expected[kind] = generate(adapted.eval(), prompt, 24)
    assert len({tuple(tokens) for tokens in expected.values()}) == len(KINDS)

    store = DictStore()
    card = store.add("m", make_model(architecture))
    async with TorchEngine("e0", kv_tokens=512, threads=1) as engine:
        await engine.load(card, store)
        for kind, tokens in expected.items():
            await engine.load_adapter(Adapter(kind, "m", tmp_path / kind))
            request = Request(
                id=RequestId(kind),
                model=ModelId("m"),
                prompt=tuple(prompt),
                sampling=Sampling(max_tokens=24),
                adapter=AdapterId(kind),
            )
            async with engine.stream(request) as stream:
                assert [token.id for token in await stream.collect()] == tokens
