"""Small random models of many architectures, scaled so that their greedy text varies."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Sequence
from typing import Any

import torch
import transformers

from hotswap.backends.torch.modeling import Skeleton
from hotswap.backends.torch.weights import layout

VOCABULARY = 512

COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
_MIXED: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
_GEMMA: dict[str, Any] = {
    "head_dim": 32,
    "sliding_window": 24,
    "query_pre_attn_scalar": 32,
    "tie_word_embeddings": False,
}
_CLASSIC: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "hidden_size": 64,
    "max_position_embeddings": 1024,
    "bos_token_id": 1,
    "eos_token_id": None,
}

CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": lambda: transformers.LlamaConfig(**COMMON),
    "qwen2": lambda: transformers.Qwen2Config(**COMMON, tie_word_embeddings=True),
    "qwen3": lambda: transformers.Qwen3Config(**COMMON, head_dim=32),
    "mistral": lambda: transformers.MistralConfig(**COMMON, sliding_window=24),
    # A soft cap with an effect: with the default of 50 a model without it would have equal tokens.
    "gemma2": lambda: transformers.Gemma2Config(**COMMON, **_GEMMA, attn_logit_softcapping=2.0),
    "gemma3": lambda: transformers.Gemma3TextConfig(**COMMON, **_GEMMA),
    "phi": lambda: transformers.PhiConfig(**COMMON),
    "phi3": lambda: transformers.Phi3Config(**COMMON),
    "gpt2": lambda: transformers.GPT2Config(
        vocab_size=VOCABULARY,
        n_embd=64,
        n_layer=3,
        n_head=4,
        n_positions=1024,
        bos_token_id=1,
        eos_token_id=None,
    ),
    "gpt_neox": lambda: transformers.GPTNeoXConfig(**_CLASSIC, intermediate_size=128),
    "opt": lambda: transformers.OPTConfig(**_CLASSIC, ffn_dim=128, word_embed_proj_dim=64, pad_token_id=0),
    "mixtral": lambda: transformers.MixtralConfig(**COMMON, num_local_experts=4, num_experts_per_tok=2),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(**COMMON, **_MIXED, head_dim=32, num_experts=4),
    "gpt_oss": lambda: transformers.GptOssConfig(
        **COMMON,
        head_dim=32,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=24,
        # The factor that fits the lengths, or transformers warns that its default does not.
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 150000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 256,
        },
    ),
    "deepseek_v3": lambda: transformers.DeepseekV3Config(
        **{**COMMON, "num_key_value_heads": 4},
        **_MIXED,
        n_routed_experts=4,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
        q_lora_rank=32,
        kv_lora_rank=32,
        qk_rope_head_dim=16,
        qk_nope_head_dim=32,
        v_head_dim=32,
    ),
}


_GPT: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "n_embd": 64,
    "n_layer": 3,
    "n_head": 4,
    "eos_token_id": None,
}
_FALCON: dict[str, Any] = {key: value for key, value in COMMON.items() if "key_value" not in key}

OWN_ATTENTION: dict[str, Callable[[], Any]] = {
    # With five heads, whose slopes are those of eight and some between.
    "bloom": lambda: transformers.BloomConfig(
        vocab_size=VOCABULARY, hidden_size=80, n_layer=3, n_head=5, eos_token_id=None
    ),
    "codegen": lambda: transformers.CodeGenConfig(**_GPT, rotary_dim=8, n_positions=1024),
    "falcon": lambda: transformers.FalconConfig(**_FALCON),
    "falcon with grouped queries": lambda: transformers.FalconConfig(
        **_FALCON, new_decoder_architecture=True, num_kv_heads=2
    ),
    # Its attention has no scale, and every second layer a window.
    "gpt_neo": lambda: transformers.GPTNeoConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        num_layers=4,
        num_heads=4,
        attention_types=[[["global", "local"], 2]],
        window_size=24,
        max_position_embeddings=1024,
        eos_token_id=None,
    ),
    "gpt_neox_japanese": lambda: transformers.GPTNeoXJapaneseConfig(
        vocab_size=VOCABULARY, hidden_size=64, num_hidden_layers=3, num_attention_heads=4, eos_token_id=None
    ),
    "gptj": lambda: transformers.GPTJConfig(**_GPT, rotary_dim=8, n_positions=1024),
    "mpt": lambda: transformers.MptConfig(
        vocab_size=VOCABULARY, d_model=64, n_layers=3, n_heads=4, max_seq_len=1024, eos_token_id=None
    ),
    "openai-gpt": lambda: transformers.OpenAIGPTConfig(**_GPT, n_positions=1024),
}
"""Configs of models with attention code of their own."""


def make_model(
    config: str | Any, *, seed: int = 0, dtype: torch.dtype = torch.float32, sharpness: float | None = None
) -> Any:
    """Return a random model whose weight matrices are scaled up by `sharpness`, so that its tokens vary."""
    if sharpness is None:
        sharpness = 12.0 if config in ("gpt2", "qwen3_moe") else 8.0
    made = CONFIGS[config]() if isinstance(config, str) else copy.deepcopy(config)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model: Any = transformers.AutoModelForCausalLM.from_config(
            made, dtype=torch.float32, attn_implementation="eager"
        )
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.mul_(sharpness)
            # `model.to` would round rotary frequencies too, which loading a checkpoint never does.
            parameter.data = parameter.data.to(dtype)
    return model.eval()


def linear_only(model: Any) -> bool:
    """Whether linear layers are the only products with weights, as the engine finds."""
    specs, size_bytes = layout(model)
    skeleton = Skeleton(json.dumps(model.config.to_dict()), torch.device("cpu"))
    skeleton.bind(torch.zeros(size_bytes, dtype=torch.uint8), specs)
    return skeleton.linear_only


def generate(model: Any, prompt: Sequence[int], max_tokens: int) -> list[int]:
    """Return the greedy tokens of transformers' own `generate` for the prompt alone."""
    ids = torch.tensor([list(prompt)], device=model.device)
    with torch.inference_mode():
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
    tokens: list[int] = out[0, len(prompt) :].tolist()
    return tokens
