"""A load refuses architectures that would be served wrongly, with the reason."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers

from hotswap import InstanceState
from hotswap.backends.torch import SkeletonCache, TorchEngine, attention, compatibility
from hotswap.backends.torch.kv import LayerShape
from hotswap.errors import ShardCorrupt, UnsupportedModel
from tests.backends.torch.dict_store import DictStore
from tests.backends.torch.zoo import CONFIGS, make_model

COMMON: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

REFUSED: dict[str, Any] = {
    "state in a cache of its own": lambda: transformers.RwkvConfig(
        vocab_size=128, hidden_size=64, attention_hidden_size=64, num_hidden_layers=2
    ),
    "attention of its own": lambda: transformers.XGLMConfig(
        vocab_size=128, d_model=64, ffn_dim=64, num_layers=2, attention_heads=4
    ),
    "two attentions a layer": lambda: transformers.DiffLlamaConfig(**COMMON),
    "no causal mask": lambda: transformers.BertConfig(
        vocab_size=128, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4
    ),
}


async def _load(store: DictStore, name: str = "m", skeletons: SkeletonCache | None = None) -> None:
    async with TorchEngine("e0", kv_tokens=256, threads=1, skeletons=skeletons) as engine:
        try:
            await engine.load(store.card(name), store)
            assert engine.status().state is InstanceState.SERVING
        except BaseException:
            assert engine.status().state is InstanceState.EMPTY
            assert engine.status().weight_bytes == 0
            raise


@pytest.mark.parametrize("why", REFUSED)
async def test_an_unsupported_architecture_is_refused(why: str) -> None:
    store = DictStore()
    store.add("m", make_model(REFUSED[why](), sharpness=2.0), max_context_tokens=128)
    with pytest.raises(UnsupportedModel):
        await _load(store)


@pytest.mark.parametrize(
    "config",
    ['{"model_type": "no-such"}', "{}", '{"model_type": "llama", "quantization_config": {}}'],
    ids=str,
)
async def test_a_config_that_cannot_be_served_is_refused(config: str) -> None:
    store = DictStore()
    store.add("m", make_model("llama"), config=config)
    with pytest.raises(UnsupportedModel):
        await _load(store)


@pytest.mark.parametrize("config", ["", "[]", "{"], ids=str)
async def test_an_invalid_config_is_corrupt(config: str) -> None:
    store = DictStore()
    store.add("m", make_model("llama"), config=config)
    with pytest.raises(ShardCorrupt):
        await _load(store)


async def test_weights_of_another_architecture_are_corrupt() -> None:
    store = DictStore()
    store.add("other", make_model("qwen3"))
    store.add("m", make_model("llama"))
    store.add("m", make_model("llama"), tensors=store.manifests["other"].tensors)
    with pytest.raises(ShardCorrupt):
        await _load(store)


async def test_an_architecture_is_verified_once() -> None:
    store, skeletons = DictStore(), SkeletonCache()
    store.add("a", make_model("llama", seed=1))
    store.add("b", make_model("llama", seed=2))
    await _load(store, "a", skeletons)
    (shapes,) = skeletons.verified.values()
    assert shapes == (LayerShape(kv_heads=2, key_dim=16, value_dim=16, dtype=torch.float32),) * 3
    await _load(store, "b", skeletons)
    assert len(skeletons.verified) == 1


@pytest.fixture
def verdicts_forgotten() -> Iterator[None]:
    """Clears the process-wide cache of verdicts, so that those of a mutant are not reused."""
    remembered = compatibility._cached_verdict  # pyright: ignore[reportPrivateUsage]
    remembered.cache_clear()
    yield
    remembered.cache_clear()


@pytest.mark.usefixtures("verdicts_forgotten")
async def test_an_ignored_soft_cap_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    original = attention.paged_attention

    def without_feature(*args: Any, softcap: float | None = None, **others: Any) -> Any:
        return original(*args, **others)

    monkeypatch.setattr(attention, "paged_attention", without_feature)
    store = DictStore()
    store.add("m", make_model(CONFIGS["gemma2"]()))
    with pytest.raises(UnsupportedModel, match="differs"):
        await _load(store)
