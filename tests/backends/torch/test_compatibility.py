"""The check of a config predicts whether its architecture is served exactly, also for long prompts."""

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
from tests.backends.torch.hybrids import HYBRIDS
from tests.backends.torch.zoo import CONFIGS, make_model


def text(config: Any, **changes: Any) -> str:
    return json.dumps(config.to_dict() | changes, default=str)


@pytest.mark.parametrize("architecture", CONFIGS)
def test_supported_architectures_are_exact(architecture: str) -> None:
    assert compatibility.check_config(text(CONFIGS[architecture]())) is Verdict.EXACT


# At their default sizes a prompt of a few dozen tokens would not show these features.
LATE: dict[str, tuple[Callable[[], Any], str]] = {
    "chooses 2048 keys by an index": (lambda: transformers.DeepseekV32Config(), "index"),
    "keeps states of an unknown kind": (lambda: transformers.ZayaConfig(), "recurrent"),
    "adds a tensor to its masks": (lambda: transformers.DogeConfig(), "masks"),
    "sees what comes later": (lambda: transformers.BertConfig(), "causal"),
    "attends twice a layer": (lambda: transformers.DiffLlamaConfig(), "times"),
    "has attention of its own": (lambda: transformers.XGLMConfig(), "of its own"),
}


@pytest.mark.parametrize("why", LATE)
def test_features_that_only_long_prompts_show_are_refused_with_the_reason(why: str) -> None:
    make, reason = LATE[why]
    with pytest.raises(UnsupportedModel, match=reason):
        compatibility.check_config(text(make()))


def test_queries_that_are_scaled_by_position_get_those_of_their_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Llama 4's own forward would count from the start of the step."""
    config = text(transformers.Llama4TextConfig())
    assert compatibility.check_config(config) is Verdict.EXACT
    compatibility._cached_verdict.cache_clear()
    monkeypatch.setattr(modeling, "tell_positions", lambda module: ())
    try:
        with pytest.raises(UnsupportedModel, match="row"):
            compatibility.check_config(config)
    finally:
        compatibility._cached_verdict.cache_clear()


def _with_rope(rope: str) -> str:
    factors = {"short_factor": [1.0] * 8, "long_factor": [3.0] * 8} if rope == "longrope" else {}
    parameters = {"rope_type": rope, "rope_theta": 1e4, "factor": 4.0, **factors}
    config = CONFIGS["llama"]()
    config.rope_parameters = parameters | {"original_max_position_embeddings": 64}
    return text(config)


@pytest.mark.parametrize("rope", ["dynamic", "longrope"])
def test_rope_that_depends_on_the_length_of_a_text_is_exact(rope: str) -> None:
    # transformers scales `dynamic` beyond `max_position_embeddings` only, which is never served.
    assert compatibility.check_config(_with_rope(rope)) is Verdict.EXACT


def test_factors_chosen_for_a_whole_row_are_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """As they would be in a model whose RoPE is not recognized."""
    monkeypatch.setattr(modeling, "choose_factors", lambda module: ((), None))
    check = compatibility._check_config  # pyright: ignore[reportPrivateUsage]
    with pytest.raises(UnsupportedModel, match="code of its own"):
        modeling.Skeleton(_with_rope("longrope"), torch.device("cpu"))
    monkeypatch.setattr(modeling, "row_wise_rope", lambda text: "")
    with pytest.raises(UnsupportedModel, match=r"causal|differs"):
        check(_with_rope("longrope"))


@pytest.mark.parametrize(
    ("architecture", "ignored"), [("gemma2", "softcap"), ("mistral", "attention_mask"), ("gpt_oss", "s_aux")]
)
def test_an_ignored_feature_is_detected_at_real_sizes(
    architecture: str, ignored: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = attention.paged_attention

    def without_feature(
        module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **given: Any
    ) -> Any:
        if ignored == "attention_mask":
            attention_mask = attention.MaskPattern(lambda b, h, q, k: q >= k)
        return original(module, query, key, value, attention_mask, **{**given, ignored: None})

    def without_mask(module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **given: Any) -> Any:
        pattern = attention.MaskPattern(lambda b, h, q, k: q >= k)
        return original(module, query, key, value, pattern, **given)

    monkeypatch.setattr(
        attention, "paged_attention", without_mask if ignored == "attention_mask" else without_feature
    )
    real = {"gemma2": transformers.Gemma2Config, "mistral": transformers.MistralConfig}
    real["gpt_oss"] = transformers.GptOssConfig
    with pytest.raises(UnsupportedModel, match="differs"):
        compatibility._check_config(text(real[architecture]()))  # pyright: ignore[reportPrivateUsage]


async def test_an_architecture_is_refused_before_weights_are_read() -> None:
    store = DictStore()
    store.add(
        "m",
        make_model(
            transformers.XGLMConfig(vocab_size=128, d_model=64, ffn_dim=64, num_layers=2, attention_heads=4)
        ),
    )
    read: list[int] = []
    store.on_chunk = lambda model, index: read.append(index)
    async with TorchEngine("e0", kv_tokens=256, threads=1) as engine:
        with pytest.raises(UnsupportedModel):
            await engine.load(store.card("m"), store)
    assert read == []


def test_a_config_is_checked_once_per_process(monkeypatch: pytest.MonkeyPatch) -> None:
    config = text(CONFIGS["llama"](), rms_norm_eps=3e-6)
    compatibility.check_config(config)
    monkeypatch.setattr(compatibility, "preflight", None)
    assert (
        compatibility.check_config(text(CONFIGS["llama"](), rms_norm_eps=3e-6, _name_or_path="other"))
        is Verdict.EXACT
    )
    refused = text(transformers.XGLMConfig(), num_layers=3)
    for _ in range(2):
        with pytest.raises(UnsupportedModel):
            compatibility.check_config(refused)


def test_a_config_whose_miniatures_do_not_run_is_unknown() -> None:
    # A model that cannot be built cannot be checked; its load decides.
    config = text(CONFIGS["llama"](), hidden_act="no-such-activation")
    assert compatibility.check_config(config) is Verdict.UNKNOWN


def test_infinities_and_nans_are_read_in_the_form_of_transformers() -> None:
    config = transformers.GraniteMoeHybridConfig(layer_types=["attention"] * 4, num_hidden_layers=4)
    assert "__float__" in config.to_json_string()
    assert compatibility.check_config(config.to_json_string()) is Verdict.EXACT


@pytest.mark.parametrize("config", ["", "[]"])
def test_an_invalid_config_is_corrupt(config: str) -> None:
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


def test_every_parameter_of_a_miniature_has_an_effect() -> None:
    model: Any = transformers.Qwen2ForCausalLM(
        transformers.Qwen2Config(**next(shrink(CONFIGS["qwen2"]().to_dict())))
    )
    randomize(model)
    for name, parameter in model.named_parameters():
        assert parameter.abs().max() > 0.1, name
        assert not torch.equal(parameter, torch.ones_like(parameter)), name


@pytest.mark.parametrize(
    "changes",
    [
        {"num_key_value_heads": -1},
        {"pad_token_id": 10**12},
        {"hidden_size": 10**12},
        {"block_multiple_of": 0},
        {"vocab_size": 0},
        {"max_position_embeddings": -1},
        {"initializer_range": float("nan")},
        {"num_hidden_layers": 10**6, "layer_types": None},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_sizes_that_no_model_has_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedModel, match="'lfm2'"):
        modeling.Skeleton(text(HYBRIDS["lfm2"](), **changes), torch.device("cpu"))


@pytest.mark.parametrize("limit", [None, 0, "x"])
async def test_long_rope_without_a_length_is_refused(limit: Any) -> None:
    store, config = DictStore(), json.loads(_with_rope("longrope"))
    config["rope_parameters"]["original_max_position_embeddings"] = limit
    card = store.add("m", make_model("llama"), config=json.dumps(config))
    async with TorchEngine("e0", kv_tokens=512, threads=1) as engine:
        with pytest.raises(UnsupportedModel):
            await engine.load(card, store)
