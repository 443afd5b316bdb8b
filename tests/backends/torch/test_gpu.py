"""The same on a CUDA device, where weights, blocks and steps lie."""

from __future__ import annotations

from random import Random

import pytest
import torch

from hotswap import InstanceState, Sampling
from hotswap.backends.torch import TorchEngine
from tests.backends.torch.clients import fulfil, make_wishes
from tests.backends.torch.dict_store import DictStore
from tests.backends.torch.zoo import CONFIGS, VOCABULARY, generate, make_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]


@pytest.mark.parametrize("architecture", CONFIGS)
async def test_tokens_equal_generate_and_memory_comes_back(architecture: str) -> None:
    random = Random(1)
    model = make_model(architecture)
    prompts = [[random.randrange(2, VOCABULARY) for _ in range(length)] for length in (2, 17, 33, 60, 130)]
    store = DictStore()
    card = store.add("m", model)
    model.to("cuda")
    expected = [generate(model, prompt, 24) for prompt in prompts]
    wishes = make_wishes(random, "m", prompts, [Sampling(max_tokens=24)] * len(prompts))
    async with TorchEngine(
        "e0", device="cuda", kv_tokens=256, kv_block_tokens=16, token_budget=48, max_requests=8
    ) as engine:
        for _ in range(2):
            await engine.load(card, store)
            assert await fulfil(engine, wishes) == expected
            await engine.unload()  # raises when the device does not give the memory back
            assert engine.status().state is InstanceState.EMPTY
