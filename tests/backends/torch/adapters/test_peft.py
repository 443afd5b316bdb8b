"""Reads of adapter files: supported options, and refusals that name the reason."""

from __future__ import annotations

import json
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hotswap import Adapter, AdapterId
from hotswap.backends.torch import SkeletonCache, TorchEngine
from hotswap.backends.torch.adapters.peft import AdapterWeights, PeftCache, read
from hotswap.backends.torch.loader import LocalModel
from hotswap.errors import HotswapError, ShardCorrupt, ShardMissing, UnsafeFile, UnsupportedAdapter
from tests.backends.torch.adapters.files import write
from tests.backends.torch.dict_store import DictStore
from tests.backends.torch.zoo import make_model

MODEL = make_model("llama")
Q = "base_model.model.model.layers.0.self_attn.q_proj"
SKELETONS = SkeletonCache()


@pytest.mark.parametrize(
    "config",
    [
        {"use_dora": True},
        {"bias": "all"},
        {"lora_bias": True},
        {"modules_to_save": ["lm_head"]},
        {"layer_replication": [[0, 2]]},
        {"target_parameters": ["experts.gate_up_proj"]},
        {"trainable_token_indices": [1]},
        {"alora_invocation_tokens": [5]},
        {"init_lora_weights": "pissa"},
        {"peft_type": "IA3"},
        {"something_new": 3},
    ],
    ids=lambda config: next(iter(config)),
)
def test_unsupported_options_are_refused_by_name(config: dict[str, Any], tmp_path: Path) -> None:
    write(tmp_path, MODEL, **config)
    word = str(config.get("init_lora_weights") or config.get("peft_type") or next(iter(config)))
    with pytest.raises(UnsupportedAdapter, match="bias" if word == "bias" else word):
        read(tmp_path, torch.float32)


@pytest.mark.parametrize(
    ("tensors", "error"),
    [
        ({f"{Q}.lora_magnitude_vector.weight": torch.ones(64)}, UnsupportedAdapter),
        ({"base_model.model.model.embed_tokens.lora_embedding_A": torch.ones(8, 512)}, UnsupportedAdapter),
        ({f"{Q}.lora_B.weight": torch.full((64, 8), torch.inf)}, UnsupportedAdapter),
        ({f"{Q}.lora_A.weight": torch.ones(7, 64)}, ShardCorrupt),
        ({f"{Q}.lora_A.weight": torch.ones(8, 0)}, ShardCorrupt),
        ({"base_model.model.lm_head.lora_A.weight": torch.ones(8, 64)}, ShardCorrupt),
    ],
    ids=["dora", "embedding", "infinite", "ranks", "empty", "half"],
)
def test_invalid_tensors_are_refused(
    tensors: dict[str, Tensor], error: type[HotswapError], tmp_path: Path
) -> None:
    write(tmp_path, MODEL, tensors=tensors)
    with pytest.raises(error):
        read(tmp_path, torch.float32)


def test_missing_damaged_and_unsafe_files_raise_different_errors(tmp_path: Path) -> None:
    with pytest.raises(ShardMissing, match="adapter_config"):
        read(tmp_path, torch.float32)
    write(tmp_path, MODEL)
    (weights := tmp_path / "adapter_model.safetensors").write_bytes(b"\x00" * 100)
    with pytest.raises(ShardCorrupt, match="safetensors"):
        read(tmp_path, torch.float32)
    weights.unlink()
    with pytest.raises(ShardMissing, match="safetensors"):
        read(tmp_path, torch.float32)
    (tmp_path / "adapter_model.bin").write_bytes(b"cos\nsystem\n")
    with pytest.raises(UnsafeFile, match="pickle"):
        read(tmp_path, torch.float32)
    (tmp_path / "adapter_config.json").write_text("[", encoding="utf-8")
    with pytest.raises(ShardCorrupt, match="JSON"):
        read(tmp_path, torch.float32)


def test_an_adapter_is_read_again_only_if_its_files_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = PeftCache(1 << 20)
    first = cache.get(write(tmp_path, MODEL, seed=1), torch.float32)
    assert cache.get(tmp_path, torch.float32) is first
    assert cache.get(tmp_path, torch.bfloat16) is not first
    outdated = weakref.ref(next(iter(first.layers.values())).down)
    del first

    def read_alone(directory: Path, dtype: torch.dtype) -> AdapterWeights:
        assert outdated() is None, "the outdated version is freed before the new one is read"
        return read(directory, dtype)

    monkeypatch.setattr("hotswap.backends.torch.adapters.peft.read", read_alone)
    second = cache.get(write(tmp_path, MODEL, seed=2, r=16), torch.bfloat16)
    assert second.rank == 16
    assert PeftCache(0).get(tmp_path, torch.float32).rank == 16


def test_patterns_and_scalings_are_those_of_the_config(tmp_path: Path) -> None:
    tensors = {f"{Q}.lora_A.weight": torch.ones(4, 64), f"{Q}.lora_B.weight": torch.ones(64, 4)}
    for config, scaling in (
        ({"lora_alpha": 8}, 2.0),
        ({"lora_alpha": 8, "use_rslora": True}, 4.0),
        ({"alpha_pattern": {"k_proj": 1, "layers.0.self_attn.q_proj": 2}}, 0.5),
        ({"alpha_pattern": {"q_pro": 1}, "lora_alpha": 12}, 3.0),
        ({"alpha_pattern": {r"layers\.\d\..*": 40}}, 10.0),
    ):
        write(tmp_path, MODEL, names=("q_proj",), tensors=tensors, **config)
        pair = read(tmp_path, torch.float32).layers[Q.removeprefix("base_model.model.")]
        assert pair.rank == 4
        assert torch.equal(pair.up, torch.full((4, 64), scaling)), config


async def test_an_adapter_must_fit_the_model_that_is_served(tmp_path: Path) -> None:
    store = DictStore()
    mixtral = make_model("mixtral")
    card = store.add("m", mixtral)
    other = make_model(make_other_config())
    foreign = write(tmp_path / "foreign", make_model("gpt2"), names=("c_fc",))
    wide = write(tmp_path / "wide", other, names=("q_proj",))
    experts = write(
        tmp_path / "experts",
        mixtral,
        names=("q_proj",),
        tensors={
            "base_model.model.model.layers.0.mlp.experts.lora_A.weight": torch.ones(8, 64),
            "base_model.model.model.layers.0.mlp.experts.lora_B.weight": torch.ones(64, 8),
        },
    )
    async with TorchEngine("e0", kv_tokens=256, threads=1, skeletons=SKELETONS) as engine:
        await engine.load(card, store)
        for directory, word in ((foreign, "c_fc"), (wide, "widths"), (experts, "experts")):
            with pytest.raises(UnsupportedAdapter, match=word):
                await engine.load_adapter(Adapter("x", "m", directory))
        with pytest.raises(ShardMissing, match="source"):
            await engine.load_adapter(Adapter("x", "m"))
        assert engine.status().adapters == ()


async def test_layers_are_restored_after_an_unload(tmp_path: Path) -> None:
    store, skeletons = DictStore(), SkeletonCache()
    card = store.add("m", MODEL)
    adapter = Adapter("x", "m", write(tmp_path, MODEL))
    async with TorchEngine("e0", kv_tokens=256, threads=1, skeletons=skeletons) as engine:
        seen: list[dict[str, object]] = []
        for _ in range(2):
            await engine.load(card, store)
            loaded = engine._models.serving
            assert isinstance(loaded, LocalModel)
            seen.append({name: vars(m).get("forward") for name, m in loaded.skeleton.module.named_modules()})
            await engine.load_adapter(adapter)
            await engine.drop_adapter(AdapterId("x"))
            await engine.load_adapter(adapter)
            await engine.unload()
        assert seen[0] == seen[1]


def make_other_config() -> Any:
    config = json.loads(MODEL.config.to_json_string())
    return type(MODEL.config)(**{**config, "hidden_size": 96, "head_dim": 24})
