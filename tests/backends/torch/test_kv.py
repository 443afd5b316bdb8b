"""The KV cache: old contents of blocks have no effect, and copies of blocks are exact."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
import torch

from hotswap import Sampling
from hotswap.backends.torch import attention, kv
from hotswap.backends.torch.batcher import Batcher
from hotswap.backends.torch.blocks import BlockPool
from hotswap.backends.torch.forward import LocalForward
from hotswap.backends.torch.kv import KVCache, LayerShape, bytes_per_token
from hotswap.backends.torch.runner import Runner
from hotswap.backends.torch.sampling import Sampler
from hotswap.backends.torch.sequence import Sequence
from tests.backends.torch.zoo import generate, make_model

CPU = torch.device("cpu")
LAYERS = (LayerShape(kv_heads=2, key_dim=16, value_dim=16, dtype=torch.float32),) * 3
DEVICES = (
    "cpu",
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
        ],
    ),
)
PROMPTS = ([5, 6, 7], [9] * 20, list(range(40, 75)))


def run(model: Any, cache: KVCache) -> list[list[int]]:
    batcher = Batcher(BlockPool(cache.num_blocks), block_tokens=16, token_budget=32, max_requests=8)
    sequences = [
        Sequence(ticket, list(prompt), len(prompt), len(prompt) + 30, Sampler(Sampling(), (), ()))
        for ticket, prompt in enumerate(PROMPTS)
    ]
    for sequence in sequences:
        batcher.add(sequence)
    runner = Runner(LocalForward(model, cache, invariant=True), batcher)
    with torch.inference_mode():
        while not runner.idle:
            runner.step()
    return [sequence.tokens[sequence.num_prompt :] for sequence in sequences]


@pytest.mark.parametrize("in_place", [True, False])
def test_blocks_full_of_nan_change_nothing(in_place: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model("llama")
    expected = [generate(model, prompt, 30) for prompt in PROMPTS]
    attention.register()
    model.set_attn_implementation(attention.IMPLEMENTATION)
    cache = KVCache(16, 16, CPU, LAYERS)
    monkeypatch.setattr(KVCache, "in_place", in_place)
    for pool in (*cache._keys.values(), *cache._values.values()):
        pool[1:] = float("nan")
    assert run(model, cache) == expected


def test_the_size_of_a_cache_follows_from_its_layers() -> None:
    cache = KVCache(10, 32, CPU, LAYERS)
    assert cache.size_bytes == 11 * 32 * bytes_per_token(LAYERS)
    assert tuple(cache.layers.values()) == LAYERS


def test_kernels_that_copy_blocks_are_compiled_ahead_and_copy_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cache, moved = KVCache(4, 16, CPU, LAYERS), list[tuple[str, int]]()
    for pool in (*cache._keys.values(), *cache._values.values()):
        pool.fill_(7.0)
    cache.build_kernels()  # a CPU has none

    def noting(name: str) -> Any:
        original = getattr(kv, name)

        def note(table: Any, blocks: Any, staging: torch.Tensor) -> None:
            moved.append((name, len(staging)))
            original(table, blocks, staging)

        return note

    for name in ("gather", "scatter"):
        monkeypatch.setattr(kv, name, noting(name))
    monkeypatch.setattr(kv, "runs_triton", lambda device: True)
    cache.build_kernels()
    assert moved == [("gather", cache.block_bytes), ("scatter", cache.block_bytes)]
    assert all((pool == 7.0).all() for pool in (*cache._keys.values(), *cache._values.values()))
    KVCache(4, 16, CPU).build_kernels()
    assert len(moved) == 2, "a cache without layers has nothing to move"


# Layers of different shapes and dtypes, and one without values.
UNLIKE = (
    LayerShape(kv_heads=2, key_dim=16, value_dim=16, dtype=torch.float32),
    LayerShape(kv_heads=2, key_dim=16, value_dim=8, dtype=torch.float32),
    LayerShape(kv_heads=1, key_dim=24, value_dim=8, dtype=torch.bfloat16),
    LayerShape(kv_heads=1, key_dim=5, value_dim=0, dtype=torch.bfloat16),
)


@pytest.mark.parametrize("layers", [LAYERS, UNLIKE, UNLIKE[3:]])
def test_staged_copies_equal_direct_ones(layers: tuple[LayerShape, ...]) -> None:
    """Blocks that one engine saves can be restored by another, on any device."""
    random, cache, other = Random(1), KVCache(9, 4, CPU, layers), KVCache(9, 4, CPU, layers)
    blocks = random.sample(range(1, 10), 5)
    data = torch.tensor([random.randrange(256) for _ in range(5 * cache.block_bytes)], dtype=torch.uint8)
    cache.restore(blocks, data)
    other.restore_staged(blocks, data)
    for order in (blocks, blocks[::-1], blocks[:1]):
        out, staged = (torch.zeros(len(order) * cache.block_bytes, dtype=torch.uint8) for _ in range(2))
        other.save(order, out)
        cache.save_staged(order, staged)
        assert torch.equal(out, staged)
        assert order != blocks or torch.equal(out, data)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("allocated", [True, False])
@pytest.mark.parametrize("copied", [True, False])
def test_blocks_are_copied_on_any_thread_wherever_they_were_allocated(
    device: str, allocated: bool, copied: bool
) -> None:
    """The engine's thread is in inference mode, and the event loop, which makes small copies, is not."""
    with torch.inference_mode(allocated):
        cache = KVCache(3, 4, torch.device(device), LAYERS)
        data = torch.randint(256, (2 * cache.block_bytes,), dtype=torch.uint8)
        out = torch.zeros_like(data)
    with torch.inference_mode(copied):
        cache.restore_staged([3, 1], data)
        cache.save_staged([3, 1], out)
    assert torch.equal(out, data)


def test_blocks_of_layers_that_were_added_later_are_copied() -> None:
    """A cache without layer shapes takes them from the first writes."""
    cache = KVCache(3, 4, CPU)
    for layer in range(2):
        key, value = torch.full((1, 2, 4, 8), layer + 1.0), torch.full((1, 2, 4, 8), layer + 5.0)
        cache.write(layer, key, value, torch.tensor([2] * 4), torch.arange(4))
        out, staged = (torch.zeros(cache.block_bytes, dtype=torch.uint8) for _ in range(2))
        cache.save([2], out)
        cache.save_staged([2], staged)
        assert torch.equal(out, staged)
        assert staged.any()
