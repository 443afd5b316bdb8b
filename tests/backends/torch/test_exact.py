"""In fp32 greedy tokens equal transformers' own `generate` for every architecture, under random clients."""

from __future__ import annotations

from random import Random

import pytest

from hotswap import Sampling
from hotswap.backends.torch import TorchEngine, attention
from hotswap.backends.torch.kv import KVCache
from tests.backends.torch.clients import make_client_plans, run_clients
from tests.backends.torch.dict_store import DictStore
from tests.backends.torch.zoo import CONFIGS, VOCABULARY, generate, make_model

NUM_REQUESTS = 12


@pytest.mark.parametrize("architecture", CONFIGS)
async def test_tokens_equal_generate(architecture: str) -> None:
    await _compare(architecture)


# With a window, a cap, sinks, and values of another width than keys.
@pytest.mark.parametrize("architecture", ["llama", "mistral", "gemma2", "gpt_oss", "deepseek_v3"])
async def test_tokens_equal_generate_on_devices_that_gather_blocks(
    architecture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """These devices have no kernel that reads blocks in place."""
    monkeypatch.setattr(KVCache, "in_place", False)
    monkeypatch.setattr(attention, "attend", None)
    await _compare(architecture)


async def _compare(architecture: str) -> None:
    random = Random(1)
    model = make_model(architecture)
    lengths = [random.choice([1, 2, 5, 17, 33, 40, 60, 130]) for _ in range(NUM_REQUESTS)]
    prompts = [[random.randrange(2, VOCABULARY) for _ in range(length)] for length in lengths]
    counts = [random.choice([1, 40, 60, 60]) for _ in range(NUM_REQUESTS)]
    expected = [generate(model, prompt, count) for prompt, count in zip(prompts, counts, strict=True)]
    distinct = sum(len(set(tokens)) for tokens in expected) / sum(counts)
    assert distinct > 0.25, "repetitive text could hide a mistake"

    store = DictStore()
    card = store.add(architecture, model)
    samplings = [Sampling(max_tokens=count) for count in counts]
    # Few blocks, so that requests are preempted; a small budget, so that prompts are cut.
    async with TorchEngine(
        "e0", kv_tokens=208, kv_block_tokens=16, token_budget=48, max_requests=8, threads=1
    ) as engine:
        await engine.load(card, store)
        received = await run_clients(engine, make_client_plans(random, architecture, prompts, samplings))
        assert received == expected
        assert engine.num_preempted > 0, "too many blocks: the test must preempt"
        assert engine.num_reused_tokens > 0
