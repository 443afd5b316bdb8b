"""Small random models with recurrent states, one or more for each kind of mixer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import transformers

from tests.backends.torch.zoo import COMMON, make_model

__all__ = ["HYBRIDS", "OTHERS", "make_hybrid"]

_DELTA: dict[str, Any] = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
_MAMBA: dict[str, Any] = {"mamba_n_heads": 4, "mamba_d_head": 32, "mamba_n_groups": 2, "mamba_d_state": 16}
_MIXED: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}

HYBRIDS: dict[str, Callable[[], Any]] = {
    "lfm2": lambda: transformers.Lfm2Config(**COMMON, layer_types=["conv", "full_attention", "conv"]),
    "lfm2_moe": lambda: transformers.Lfm2MoeConfig(
        **COMMON, **_MIXED, num_dense_layers=1, layer_types=["conv", "full_attention", "conv"]
    ),
    "qwen3_5": lambda: transformers.Qwen3_5TextConfig(
        **COMMON,
        **_DELTA,
        head_dim=32,
        layer_types=["linear_attention", "linear_attention", "full_attention"],
    ),
    "qwen3_next": lambda: transformers.Qwen3NextConfig(
        **COMMON,
        **_DELTA,
        **_MIXED,
        head_dim=32,
        shared_expert_intermediate_size=32,
        layer_types=["linear_attention", "full_attention", "linear_attention"],
    ),
    "bamba": lambda: transformers.BambaConfig(**COMMON, **_MAMBA, attn_layer_indices=[1]),
    "falcon_h1": lambda: transformers.FalconH1Config(**COMMON, **_MAMBA, head_dim=16, mamba_d_ssm=128),
    "mamba2": lambda: transformers.Mamba2Config(
        **{key: COMMON[key] for key in ("vocab_size", "hidden_size", "num_hidden_layers", "eos_token_id")},
        num_heads=8,
        head_dim=16,
        n_groups=2,
        state_size=16,
    ),
    "kimi_linear": lambda: transformers.KimiLinearConfig(
        **COMMON | {"num_key_value_heads": 4},
        **_MIXED,
        n_shared_experts=1,
        kv_lora_rank=32,
        qk_nope_head_dim=16,
        qk_rope_head_dim=16,
        v_head_dim=16,
        linear_num_heads=4,
        linear_head_dim=16,
        layer_types=["linear_attention", "full_attention", "linear_attention"],
    ),
    "zamba2": lambda: transformers.Zamba2Config(
        **COMMON | {"num_key_value_heads": 4},
        mamba_d_state=16,
        mamba_ngroups=2,
        n_mamba_heads=4,
        num_mem_blocks=1,
        layers_block_type=["mamba", "hybrid", "hybrid"],
        use_shared_attention_adapter=True,
        adapter_rank=8,
    ),
    "jamba": lambda: transformers.JambaConfig(
        **COMMON,
        num_experts=2,
        num_experts_per_tok=1,
        attn_layer_period=2,
        attn_layer_offset=1,
        expert_layer_period=3,
        mamba_d_state=16,
        mamba_dt_rank=8,
        mamba_expand=2,
    ),
}
"""Configs by name: convolutions alone, the delta rule, Mamba 2, and the selective scan of Mamba."""


OTHERS: dict[str, Callable[[], Any]] = {
    "qwen3_5_moe": lambda: transformers.Qwen3_5MoeTextConfig(
        **COMMON,
        **_DELTA,
        **_MIXED,
        head_dim=32,
        shared_expert_intermediate_size=32,
        layer_types=["linear_attention", "full_attention", "linear_attention"],
    ),
}
"""Others, with mixers of the same kinds."""


def make_hybrid(name: str, **options: Any) -> Any:
    """Return a random model whose greedy tokens vary, as far as the architecture allows; see `make_model`."""
    sharpness = 10.0 if name == "lfm2_moe" else 4.0
    return make_model((HYBRIDS | OTHERS)[name](), **{"sharpness": sharpness, **options})
