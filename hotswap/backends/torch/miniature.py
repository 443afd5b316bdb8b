"""Miniatures of architectures: a model's config with every size reduced, and random weights.

Features that a config enables stay enabled, and are scaled to have an effect within a few dozen tokens:
windows, chunks and the key selections of sparse attention are shorter than the prompts of a check, and
long-context scaling starts after a few positions. So a miniature shows in milliseconds and without a
checkpoint how an architecture behaves, where the full model would need thousands of tokens.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from hotswap.backends.torch.weights import named_tensors

__all__ = ["CONTEXT", "COUNTS", "VOCABULARY", "WINDOW", "randomize", "shrink"]

VOCABULARY = 256
CONTEXT = 256
# The size of windows, chunks and key selections, in tokens: less than the length of a check's prompts.
WINDOW = 12
# The length from which on long-context scaling has an effect: one of the prompts of a check is shorter.
LONG = 18

_LAYERS = 4
_WIDTH, _INNER, _HEADS, _KV_HEADS, _HEAD_DIM = 64, 96, 4, 2, 16

# The names of sizes in configs, by the reduced value. Other names keep their value.
_NAMES: tuple[tuple[int, str], ...] = (
    (
        VOCABULARY,
        "vocab_size decoder_vocab_size unpadded_vocab_size vocab_size_per_layer_input ngram_vocab_size_base "
        "encoder_hash_byte_group_vocab",
    ),
    (
        CONTEXT,
        "max_position_embeddings n_positions n_ctx max_seq_len model_max_length context_length "
        "max_target_positions num_position_embeddings",
    ),
    (
        _LAYERS,
        "num_hidden_layers n_layer n_layers num_layers decoder_layers num_decoder_layers num_blocks "
        "encoder_layers num_encoder_layers",
    ),
    (
        _HEADS,
        "num_attention_heads n_head n_heads num_heads decoder_attention_heads attention_heads "
        "encoder_attention_heads num_decoder_attention_heads num_encoder_attention_heads "
        "swa_num_attention_heads mamba_n_heads mamba_num_heads num_query_groups n_mamba_heads",
    ),
    (
        _KV_HEADS,
        "num_key_value_heads num_kv_heads n_kv_heads kv_n_heads multi_query_group_num "
        "swa_num_key_value_heads "
        "num_global_key_value_heads linear_num_key_heads linear_num_value_heads "
        "linear_num_heads index_n_heads",
    ),
    (
        _HEAD_DIM,
        "head_dim kv_channels v_head_dim qk_nope_head_dim index_head_dim global_head_dim swa_head_dim "
        "swa_v_head_dim linear_head_dim linear_key_head_dim linear_value_head_dim d_kv dim_head d_head "
        "state_size ssm_state_size mamba_d_state attention_head_size query_pre_attn_scalar",
    ),
    (_HEAD_DIM + 8, "qk_head_dim"),
    (8, "qk_rope_head_dim rotary_dim"),
    (
        _WIDTH,
        "hidden_size n_embd d_model dim word_embed_proj_dim embedding_size lru_width emb_dim embedding_dim "
        "backbone_hidden_size input_embedding_size out_hidden_size "
        "output_embedding_size hidden_size_global",
    ),
    (2 * _WIDTH, "mamba_d_ssm attention_hidden_size"),
    (
        _INNER,
        "intermediate_size n_inner ffn_dim ffn_hidden_size d_ff dff dim_ff intermediate_size_mlp "
        "dense_intermediate_size decoder_ffn_dim encoder_ffn_dim d_inner feed_forward_size mlp_dim",
    ),
    (4, "num_local_experts num_experts n_routed_experts moe_num_experts zero_expert_num"),
    (2, "num_experts_per_tok num_experts_per_token moe_top_k moe_topk moe_k top_k_experts top_k_expert"),
    (
        32,
        "moe_intermediate_size expert_ffn_hidden_size shared_expert_intermediate_size "
        "shared_experts_intermediate_size shared_intermediate_size moe_shared_expert_intermediate_size "
        "q_lora_rank kv_lora_rank o_lora_rank mamba_d_head mamba_head_dim mamba_headdim attention_head_dim",
    ),
    (
        1,
        "n_group topk_group num_expert_group first_k_dense_replace expert_interval n_shared_experts "
        "num_shared_experts moe_num_shared_experts moe_layer_start_index attn_layer_offset "
        "expert_layer_offset",
    ),
    (
        2,
        "max_window_layers interleave_moe_layer_step depth "
        "no_rope_layer_interval sliding_window_pattern full_attention_interval attn_layer_period "
        "expert_layer_period decoder_sparse_step moe_layer_freq dense_attention_every_n_layers "
        "global_attn_every_n_layers num_kv_shared_layers altup_num_inputs mamba_n_groups mamba_ngroups "
        "n_groups o_groups index_topk_blocks",
    ),
    (4, "index_block_size block_size"),
    (
        WINDOW,
        "sliding_window sliding_window_size attention_chunk_size attention_window attention_window_size "
        "local_attention window_size keep_window_size index_topk rel_extent",
    ),
    (LONG, "original_max_position_embeddings"),
    (
        8,
        "floor_scale log_scaling_n_floor chunk_size mamba_chunk_size "
        "hidden_size_per_layer_input laurel_rank time_step_rank mamba_dt_rank d_rel gated_norm_rank "
        "adapter_rank hc_lowrank router_hidden_size ple_embed_dim",
    ),
)
_SIZES: dict[str, float] = {name: size for size, names in _NAMES for name in names.split()}
_FEW = 8
# The logits of a miniature are small: the usual caps would have no effect.
_CAPS = {"attn_logit_softcapping": 2.0, "attention_logit_cap": 2.0, "final_logit_softcapping": 5.0}
# Pairs of sizes that stay equal if a config has them equal.
_EQUALS = (
    ("num_key_value_heads", "num_attention_heads"),
    ("head_dim", "qk_rope_head_dim"),
    ("rotary_dim", "head_dim"),
)
# Sizes that some models require although their config's default is `None`.
_FILLED = frozenset(
    {"head_dim", "n_group", "n_routed_experts", "n_shared_experts", "num_experts_per_tok"}
    | {"num_key_value_heads", "topk_group"}
)
# The names of the number of layers in configs.
COUNTS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_TOKENS = ("pad_token_id", "bos_token_id", "eos_token_id", "sep_token_id", "cls_token_id", "mask_token_id")


def shrink(config: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield reduced configs of an architecture, the most faithful first; some may be inconsistent.

    Args:
        config: All fields of a config, default values included.
    """
    for layered, fill in itertools.product((True, False), (False, True)):
        yield _small(config, layered=layered, fill=fill)


def _small(config: Mapping[str, Any], *, layered: bool, fill: bool) -> dict[str, Any]:
    kept = _telling_layers(config) if layered else ()
    small: dict[str, Any] = {}
    for name, value in config.items():
        if name in _TOKENS:
            small[name] = None if name == "eos_token_id" or value is None else 0
        elif isinstance(value, dict):
            small[name] = _small(_relayered(cast("dict[str, Any]", value), kept), layered=layered, fill=fill)
        elif isinstance(value, list):
            values = cast("Sequence[Any]", value)
            if _names_layers(name, values, config):
                small[name] = [new for new, old in enumerate(kept or range(_LAYERS)) if old in values]
            elif len(values) != _count(config):
                small[name] = [min(v, _INNER) if type(v) is int else v for v in values]
            elif layered:
                small[name] = [_smaller(name, values[index]) for index in kept]
        elif value is None and fill and name in _FILLED:
            small[name] = _SIZES[name]
        else:
            small[name] = _smaller(name, value)
    if {"factor", "original_max_position_embeddings"} <= small.keys():
        small["factor"] = CONTEXT / small["original_max_position_embeddings"]
    if isinstance(rope := small.get("rope_parameters"), dict):
        _fit_factors(cast("dict[str, Any]", rope), small)
    for name, other in _EQUALS:
        if config.get(name) is not None and config.get(name) == config.get(other):
            small[name] = small[other]
    if (
        _inner_heads(config) and _inner_heads(small) is not None
    ):  # of a state space, which fill its inner width
        small["num_heads"] = small["hidden_size"] * small["expand"] // small["head_dim"]
    return small | ({name: len(kept) for name in COUNTS if config.get(name)} if kept else {})


def _fit_factors(rope: dict[str, Any], small: Mapping[str, Any]) -> None:
    """Shorten the lists of RoPE factors, which have one for two entries of a reduced head."""
    width = small.get("head_dim") or _WIDTH // _HEADS
    width = int(width * (rope.get("partial_rotary_factor") or small.get("partial_rotary_factor") or 1))
    for name in ("short_factor", "long_factor"):
        if name in rope:
            rope[name] = rope[name][: width // 2]


def _inner_heads(config: Mapping[str, Any]) -> bool | None:
    """Whether heads fill the expanded width of a model; `None` if the config has no such sizes."""
    sizes = [config.get(name) for name in ("hidden_size", "expand", "num_heads", "head_dim")]
    if not all(type(size) is int for size in sizes):
        return None
    width, factor, heads, head_dim = cast("list[int]", sizes)
    return width * factor == heads * head_dim


def _smaller(name: str, value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value <= 0:
        return value
    size = type(value)((_SIZES | _CAPS).get(name, value))
    # A model with one expert, or one KV head, differs from one with several.
    return min(value, size) if size <= _FEW else size


def _relayered(part: dict[str, Any], kept: tuple[int, ...]) -> dict[str, Any]:
    """Return a part of a config; if its keys are layer numbers, those of the kept layers, renumbered."""
    if not part or not all(str(key).isdigit() for key in part):
        return part
    given = {int(key): value for key, value in part.items()}
    return {str(new): given[old] for new, old in enumerate(kept) if old in given}


def _count(config: Mapping[str, Any]) -> int:
    return next((config[name] for name in COUNTS if config.get(name)), 0)


def _names_layers(name: str, values: Sequence[Any], config: Mapping[str, Any]) -> bool:
    """Whether a list of a config contains layer numbers; other lists have one entry per layer."""
    named = "layer" in name or "idx" in name
    return named and list(values) == sorted({v for v in values if type(v) is int and 0 <= v < _count(config)})


def _telling_layers(config: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the layers to keep: one of each kind that the config's lists distinguish, then more of each."""
    count = _count(config)
    facts: list[Sequence[Any]] = []
    for name, value in config.items():
        values: Sequence[Any] = cast("Sequence[Any]", value) if isinstance(value, list) else ()
        if values and _names_layers(name, values, config):
            facts.append([index in values for index in range(count)])
        elif values and len(values) == count:
            facts.append(values)
    if not facts:
        return ()
    kinds: dict[str, list[int]] = {}
    for index in range(count):
        kinds.setdefault(repr([values[index] for values in facts]), []).append(index)
    turns = itertools.chain.from_iterable(itertools.zip_longest(*kinds.values()))
    order = [index for index in turns if index is not None]
    return tuple(sorted(order[: min(max(_LAYERS, len(kinds)), 2 * _LAYERS)]))


def randomize(module: nn.Module, *, seed: int = 0) -> None:
    """Fill every parameter with random values large enough to have an effect on the logits.

    Biases differ from 0 and scales from 1. Buffers keep their values, except those that are all zeros, such
    as a router's bias correction.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        tensors = {id(tensor): (name, tensor) for name, tensor in named_tensors(module)}
        for name, tensor in tensors.values():
            blank = tensor.is_floating_point() and tensor.numel() and not tensor.any()
            if isinstance(tensor, nn.Parameter) or blank:
                tensor.copy_(_values(name, tensor, generator))


def _values(name: str, like: Tensor, generator: torch.Generator) -> Tensor:
    noise = torch.randn(like.shape, generator=generator)
    if like.ndim >= 2:
        return noise.mul_(1.5 / math.sqrt(max(like.shape[-1], 1)))
    return 1 + noise * 0.2 if "norm" in name or "ln_" in name else noise * 0.2
