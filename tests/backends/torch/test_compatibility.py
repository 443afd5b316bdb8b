"""A config alone tells whether an architecture is served exactly, also where only long prompts show it."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers

from hotswap.backends.torch import TorchEngine, attention, compatibility, modeling
from hotswap.backends.torch.compatibility import Verdict
from hotswap.backends.torch.miniature import WINDOW, randomize, shrink
from hotswap.errors import ShardCorrupt, UnsupportedModel
from tests.backends.torch.dict_store import DictStore
from tests.backends.torch.zoo import CONFIGS, make_model


def text(config: Any, **changes: Any) -> str:
    return json.dumps(config.to_dict() | changes, default=str)


@pytest.mark.parametrize("architecture", CONFIGS)
def test_what_is_served_exactly_is_said_to_be(architecture: str) -> None:
    assert compatibility.check_config(text(CONFIGS[architecture]())) is Verdict.EXACT


# In none of them would a prompt of a few dozen tokens show it, at the sizes they have.
LATE: dict[str, tuple[Callable[[], Any], str]] = {
    "chooses 2048 keys by an index": (lambda: transformers.DeepseekV32Config(), "index"),
    "scales queries by their row after 8192": (lambda: transformers.Llama4TextConfig(), "row"),
    "convolves some layers": (
        lambda: transformers.Lfm2Config(layer_types=["conv", "full_attention"] * 16),
        "convolution",
    ),
    "keeps recurrent states": (lambda: transformers.Qwen3NextConfig(), "recurrent"),
    "adds a tensor to its masks": (lambda: transformers.DogeConfig(), "masks"),
    "sees what comes later": (lambda: transformers.BertConfig(), "causal"),
    "attends twice a layer": (lambda: transformers.DiffLlamaConfig(), "times"),
    "has attention of its own": (lambda: transformers.BloomConfig(), "of its own"),
}


@pytest.mark.parametrize("why", LATE)
def test_what_long_prompts_would_show_is_refused_by_its_reason(why: str) -> None:
    make, reason = LATE[why]
    with pytest.raises(UnsupportedModel, match=reason):
        compatibility.check_config(text(make()))


@pytest.mark.parametrize("rope", ["dynamic", "longrope"])
def test_rope_that_looks_at_the_row_is_found_without_knowing_its_name(
    rope: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(modeling, "_ROW_WISE_ROPE", frozenset[str]())
    factors = {"short_factor": [1.0] * 8, "long_factor": [3.0] * 8} if rope == "longrope" else {}
    parameters = {"rope_type": rope, "rope_theta": 1e4, "factor": 4.0, **factors}
    config = CONFIGS["llama"]()
    config.rope_parameters = parameters | {"original_max_position_embeddings": 64}
    try:
        verdict = compatibility._check_config(text(config))  # pyright: ignore[reportPrivateUsage]
    except UnsupportedModel:
        return
    # transformers scales `dynamic` beyond `max_position_embeddings` only, where nothing is ever served.
    assert (rope, verdict) == ("dynamic", Verdict.EXACT)


@pytest.mark.parametrize(
    ("architecture", "ignored"), [("gemma2", "softcap"), ("mistral", "attention_mask"), ("gpt_oss", "s_aux")]
)
def test_an_engine_that_ignores_a_feature_is_found_at_the_sizes_of_real_models(
    architecture: str, ignored: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = attention.paged_attention

    def deaf(module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **given: Any) -> Any:
        if ignored == "attention_mask":
            attention_mask = attention.MaskPattern(lambda b, h, q, k: q >= k)
        return honest(module, query, key, value, attention_mask, **{**given, ignored: None})

    def blind(module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **given: Any) -> Any:
        pattern = attention.MaskPattern(lambda b, h, q, k: q >= k)
        return honest(module, query, key, value, pattern, **given)

    monkeypatch.setattr(attention, "paged_attention", blind if ignored == "attention_mask" else deaf)
    real = {"gemma2": transformers.Gemma2Config, "mistral": transformers.MistralConfig}
    real["gpt_oss"] = transformers.GptOssConfig
    with pytest.raises(UnsupportedModel, match="differs"):
        compatibility._check_config(text(real[architecture]()))  # pyright: ignore[reportPrivateUsage]


async def test_a_refusal_comes_before_any_weight_is_read() -> None:
    store = DictStore()
    store.add("m", make_model(transformers.MambaConfig(vocab_size=128, hidden_size=64, num_hidden_layers=2)))
    read: list[int] = []
    store.on_chunk = lambda model, index: read.append(index)
    async with TorchEngine("e0", kv_tokens=256, threads=1) as engine:
        with pytest.raises(UnsupportedModel):
            await engine.load(store.card("m"), store)
    assert read == []


def test_a_config_is_examined_once_in_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    config = text(CONFIGS["llama"](), rms_norm_eps=3e-6)
    compatibility.check_config(config)
    monkeypatch.setattr(compatibility, "preflight", None)
    assert (
        compatibility.check_config(text(CONFIGS["llama"](), rms_norm_eps=3e-6, _name_or_path="other"))
        is Verdict.EXACT
    )
    refused = text(transformers.BloomConfig(), n_layer=3)
    for _ in range(2):
        with pytest.raises(UnsupportedModel):
            compatibility.check_config(refused)


def test_a_config_whose_miniatures_do_not_run_is_unknown() -> None:
    # Nothing can be said of a module that nobody could build; its load will tell.
    config = text(CONFIGS["llama"](), hidden_act="no-such-activation")
    assert compatibility.check_config(config) is Verdict.UNKNOWN


def test_floats_that_json_does_not_know_are_read_as_transformers_writes_them() -> None:
    config = transformers.GraniteMoeHybridConfig(layer_types=["attention"] * 4, num_hidden_layers=4)
    assert "__float__" in config.to_json_string()
    assert compatibility.check_config(config.to_json_string()) is Verdict.EXACT


@pytest.mark.parametrize("config", ["", "[]"])
def test_a_config_that_is_none_is_corrupt(config: str) -> None:
    with pytest.raises(ShardCorrupt):
        compatibility.check_config(config)


def test_a_miniature_has_every_kind_of_layer_and_all_its_features() -> None:
    kinds = ["sliding_attention"] * 40 + ["full_attention"] * 8
    config = transformers.Gemma3TextConfig(num_hidden_layers=48, layer_types=kinds, sliding_window=4096)
    small = next(shrink(config.to_dict()))
    assert set(small["layer_types"]) == set(kinds)
    assert len(small["layer_types"]) == small["num_hidden_layers"] == 4
    assert small["sliding_window"] == WINDOW
    assert small["hidden_size"] == 64
    assert small["tie_word_embeddings"] is True


def test_no_parameter_of_a_miniature_is_without_effect_by_its_value() -> None:
    model: Any = transformers.Qwen2ForCausalLM(
        transformers.Qwen2Config(**next(shrink(CONFIGS["qwen2"]().to_dict())))
    )
    randomize(model)
    for name, parameter in model.named_parameters():
        assert parameter.abs().max() > 0.1, name
        assert not torch.equal(parameter, torch.ones_like(parameter)), name
