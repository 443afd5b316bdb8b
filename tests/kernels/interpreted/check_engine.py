"""The GPU parts of an engine with interpreted kernels: paged adapters, and copies of KV blocks."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from hotswap.backends.torch import attention
from hotswap.backends.torch.adapters.paged import PagedPool
from hotswap.backends.torch.adapters.peft import read
from hotswap.backends.torch.adapters.slots import RankPages
from hotswap.backends.torch.adapters.targets import targets
from hotswap.backends.torch.forward import LocalForward, Piece, Work
from hotswap.backends.torch.kv import KVCache, LayerShape
from hotswap.kernels.segmented_lora import launch
from hotswap.kernels.targets import runs_triton
from tests.backends.torch.adapters.files import ALL, write
from tests.backends.torch.zoo import VOCABULARY, make_model

CPU = torch.device("cpu")
BLOCKS = 2


def test_adapters_give_the_logits_that_torch_gives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two adapters of many layers, and a request without one; prompts and single tokens."""
    random, model = Random(1), make_model("llama")
    attention.register()
    model.set_attn_implementation(attention.IMPLEMENTATION)
    pool = PagedPool(targets(model, frozenset()), num_ranks=64, dtype=torch.float32, device=CPU)
    places: list[RankPages | None] = [None]
    for seed, (rank, names) in enumerate([(20, ALL), (5, ("q_proj", "v_proj", "lm_head"))]):
        weights = read(write(tmp_path / str(seed), model, seed=seed, r=rank, names=names), torch.float32)
        place = pool.allocate(weights.rank)
        assert place is not None
        pool.put(place, weights)
        places.append(place)
    prompts = [[random.randrange(2, VOCABULARY) for _ in range(length)] for length in (5, 18, 1)]
    launched: list[bool] = []

    def record(device: torch.device) -> bool:
        launched.append(runs_triton(device))
        return launched[-1]

    monkeypatch.setattr(launch, "runs_triton", record)
    found = _logits(model, prompts, places)
    assert launched
    assert all(launched), "the kernels were not used"
    monkeypatch.setattr(launch, "runs_triton", lambda device: False)
    right = _logits(model, prompts, places)
    pool.close()
    plain = _logits(model, prompts, [None] * 3)
    assert torch.allclose(found, right, rtol=0, atol=1e-4 * float(right.abs().max()))
    assert not torch.allclose(plain, right, rtol=0, atol=1e-2 * float(right.abs().max()))


@torch.inference_mode()
def _logits(model: Any, prompts: list[list[int]], places: list[RankPages | None]) -> Tensor:
    cache = KVCache(BLOCKS * len(prompts), 16, CPU)
    forward = LocalForward(model, cache, invariant=True)
    pieces = [
        Piece(prompt, 0, range(1 + n * BLOCKS, 1 + (n + 1) * BLOCKS), True, place)
        for n, (prompt, place) in enumerate(zip(prompts, places, strict=True))
    ]
    forward.submit(Work(tuple(pieces)))
    return forward.result().clone()


def test_the_kernel_moves_the_same_blocks_as_plain_copies() -> None:
    layers = (LayerShape(kv_heads=2, key_dim=16, value_dim=16, dtype=torch.bfloat16),) * 3
    cache, other = KVCache(7, 8, CPU, layers), KVCache(7, 8, CPU, layers)
    blocks = [3, 1, 6]
    generator = torch.Generator().manual_seed(1)
    data = torch.randint(0, 256, (3 * cache.block_bytes,), generator=generator, dtype=torch.uint8)
    cache.restore(blocks, data)
    other.restore_staged(blocks, data)
    out, staged = torch.zeros_like(data), torch.zeros_like(data)
    other.save(blocks, out)
    cache.save_staged(blocks, staged)
    assert torch.equal(out, data)
    assert torch.equal(staged, data)
