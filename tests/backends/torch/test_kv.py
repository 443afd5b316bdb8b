"""What a block held before it was handed out reaches nobody."""

from __future__ import annotations

from typing import Any

import torch

from hotswap import Sampling
from hotswap.backends.torch import attention
from hotswap.backends.torch.batcher import Batcher, Sequence
from hotswap.backends.torch.blocks import BlockPool
from hotswap.backends.torch.forward import LocalForward
from hotswap.backends.torch.kv import KVCache, LayerShape, bytes_per_token
from hotswap.backends.torch.runner import Runner
from hotswap.backends.torch.sampling import Sampler
from tests.backends.torch.zoo import generate, make_model

CPU = torch.device("cpu")
LAYERS = (LayerShape(kv_heads=2, key_dim=16, value_dim=16, dtype=torch.float32),) * 3
PROMPTS = ([5, 6, 7], [9] * 20, list(range(40, 75)))


def run(model: Any, cache: KVCache) -> list[list[int]]:
    batcher = Batcher(BlockPool(cache.num_blocks), block_tokens=16, token_budget=32, max_requests=8)
    sequences = [
        Sequence(ticket, list(prompt), len(prompt), len(prompt) + 30, Sampler(Sampling(), (), ()))
        for ticket, prompt in enumerate(PROMPTS)
    ]
    for sequence in sequences:
        batcher.add(sequence)
    runner = Runner(LocalForward(model, cache, min_rows=4), batcher)
    with torch.inference_mode():
        while not runner.idle:
            runner.step()
    return [sequence.tokens[sequence.num_prompt :] for sequence in sequences]


def test_blocks_full_of_nan_change_nothing() -> None:
    model = make_model("llama")
    expected = [generate(model, prompt, 30) for prompt in PROMPTS]
    attention.register()
    model.set_attn_implementation(attention.IMPLEMENTATION)
    cache = KVCache(16, 16, CPU, LAYERS, runs_bytes=1 << 20)
    for pool in (*cache._keys.values(), *cache._values.values()):
        pool[1:] = float("nan")
    assert run(model, cache) == expected


def test_a_cache_is_as_large_as_its_layers_say() -> None:
    cache = KVCache(10, 32, CPU, LAYERS)
    assert cache.size_bytes == 11 * 32 * bytes_per_token(LAYERS)
    assert tuple(cache.layers.values()) == LAYERS
