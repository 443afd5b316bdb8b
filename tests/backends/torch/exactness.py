"""Whether the tokens of an engine under random clients equal transformers' own `generate`."""

from __future__ import annotations

from random import Random
from typing import Any

from hotswap import Sampling
from hotswap.backends.torch import TorchEngine
from tests.backends.torch.clients import make_client_plans, run_until_preempted
from tests.backends.torch.dict_store import DictStore
from tests.backends.torch.zoo import VOCABULARY, generate

__all__ = ["assert_equals_generate"]

NUM_REQUESTS = 12


async def assert_equals_generate(name: str, model: Any, *, reuses: bool = True) -> None:
    """Serve a model to clients that come, leave and come back, in few blocks; `reuses` prefixes or not."""
    random = Random(1)
    lengths = [random.choice([1, 2, 5, 17, 33, 40, 60, 130]) for _ in range(NUM_REQUESTS)]
    prompts = [[random.randrange(2, VOCABULARY) for _ in range(length)] for length in lengths]
    counts = [random.choice([1, 40, 60, 60]) for _ in range(NUM_REQUESTS)]
    expected = [generate(model, prompt, count) for prompt, count in zip(prompts, counts, strict=True)]
    distinct = sum(len(set(tokens)) for tokens in expected) / sum(counts)
    assert distinct > 0.25, "repetitive text could hide a mistake"

    store = DictStore()
    card = store.add(name, model)
    samplings = [Sampling(max_tokens=count) for count in counts]
    # Few blocks, so that requests are preempted; a small budget, so that prompts are cut.
    async with TorchEngine(
        "e0", kv_tokens=208, kv_block_tokens=16, token_budget=48, max_requests=8, threads=1
    ) as engine:
        await engine.load(card, store)
        await run_until_preempted(engine, make_client_plans(random, name, prompts, samplings), expected)
        assert (engine.num_reused_tokens > 0) is reuses
