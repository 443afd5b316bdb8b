"""The pool of pages: shared down products, freed pages, and restored layers."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hotswap.backends.torch.adapters import plan
from hotswap.backends.torch.adapters.paged import PagedPool
from hotswap.backends.torch.adapters.peft import AdapterWeights, LowRank, read
from hotswap.backends.torch.adapters.plan import adaptation
from hotswap.backends.torch.adapters.slots import RankPages
from hotswap.backends.torch.adapters.targets import targets
from hotswap.backends.torch.attention import Step, running
from hotswap.backends.torch.kv import KVCache
from hotswap.kernels.segmented_lora import RankPool, shrink
from tests.backends.torch.adapters.files import ALL, write
from tests.backends.torch.zoo import make_model

CPU = torch.device("cpu")


def _pool(model: Any, num_ranks: int = 100) -> PagedPool:
    return PagedPool(targets(model, frozenset()), num_ranks=num_ranks, dtype=torch.float32, device=CPU)


def _put(pool: PagedPool, weights: AdapterWeights) -> RankPages:
    slot = pool.allocate(weights.rank)
    assert slot is not None
    pool.put(slot, weights)
    return slot


def _step(num_rows: int, rows_of: dict[RankPages, range]) -> Step:
    return Step(
        cache=KVCache(1, 16, CPU),
        blocks=torch.zeros(num_rows, dtype=torch.long),
        offsets=torch.zeros(num_rows, dtype=torch.long),
        adapters=adaptation([(slot, rows, range(0)) for slot, rows in rows_of.items()], CPU),
    )


def test_layers_with_one_input_share_the_down_product(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model("llama")
    pool = _pool(model)
    slot = _put(pool, read(write(tmp_path / "all", model, names=ALL), torch.float32))
    launched: Counter[int] = Counter()
    original = shrink

    def count(x: Tensor, ranks: RankPool, segments: Any) -> Tensor:
        launched[ranks.num_slices] += 1
        return original(x, ranks, segments)

    monkeypatch.setattr(plan, "shrink", count)
    layer = model.model.layers[0]
    with torch.inference_mode(), running(_step(3, {slot: range(3)})):
        hidden = torch.randn(1, 3, model.config.hidden_size)
        for projection in (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj):
            projection(hidden)
        layer.self_attn.o_proj(torch.randn(1, 3, layer.self_attn.o_proj.in_features))
        hidden = torch.randn(1, 3, model.config.hidden_size)
        layer.mlp.gate_proj(hidden)
        layer.mlp.up_proj(hidden)
    assert launched == {3: 1, 1: 1, 2: 1}
    pool.close()


def test_a_layer_without_adapters_in_the_step_is_not_changed(tmp_path: Path) -> None:
    model = make_model("llama")
    pool = _pool(model)
    first = _put(pool, read(write(tmp_path / "q", model, names=("q_proj",)), torch.float32))
    second = _put(pool, read(write(tmp_path / "v", model, names=("v_proj",)), torch.float32))
    attention = model.model.layers[0].self_attn
    hidden = torch.randn(1, 4, model.config.hidden_size)
    with torch.inference_mode():
        plain = {layer: layer(hidden) for layer in (attention.q_proj, attention.k_proj, attention.v_proj)}
        for slot, changed in ((first, attention.q_proj), (second, attention.v_proj)):
            with running(_step(4, {slot: range(1, 3)})):
                for layer, before in plain.items():
                    after = layer(hidden)
                    assert torch.equal(after[:, ::3], before[:, ::3])
                    assert torch.equal(after, before) == (layer is not changed)
    pool.close()


def test_freed_pages_are_reallocated_without_being_neighbours() -> None:
    """An adapter of rank 32 fits in the pages of two of rank 16 that were not neighbours."""
    model = make_model("llama")
    pool = _pool(model, num_ranks=71)
    assert pool.num_ranks == 64
    slots = [pool.allocate(16) for _ in range(4)]
    assert None not in slots
    assert pool.allocate(1) is None
    for slot in (slots[0], slots[2]):
        assert slot is not None
        pool.free(slot)
    wide = pool.allocate(32)
    assert wide is not None
    assert len(set(wide.pages)) == 2
    assert wide.serial not in {slot.serial for slot in slots if slot is not None}


def test_closing_a_pool_restores_the_model() -> None:
    model = make_model("llama")
    layer = model.model.layers[0].self_attn.q_proj
    before = vars(layer).get("forward")
    pool = _pool(model)
    rank = torch.randn(4, layer.in_features), torch.randn(4, layer.out_features)
    slot = _put(pool, AdapterWeights({"model.layers.0.self_attn.q_proj": LowRank(*rank)}))
    assert vars(layer).get("forward") is not before
    pool.close()
    assert vars(layer).get("forward") is before
    pool.put(slot, AdapterWeights({"model.layers.0.self_attn.q_proj": LowRank(*rank)}))
    assert vars(layer).get("forward") is before, "a write after the end has no effect"
