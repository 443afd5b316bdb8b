"""Attention of models that compute it in code of their own: GPT-J, CodeGen, GPT-Neo, Falcon, Bloom, MPT.

These do not call transformers' attention interface. Some have a method for queries, keys and values, which is
replaced; of others the `forward` is written again up to there. Whether that is the same computation is
decided by the check of a load (`preflight`), which compares with the model's own code.

A bias that is linear in the position of a key (ALiBi: Press et al., arXiv:2108.12409) is a product of two
more entries of queries and keys: the slope of a head, and the position. The position is split in two numbers
below 256, one of them times 256, which every dtype has exactly. A key takes 16 more entries of the KV cache
for it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from hotswap.backends.torch.attention import MaskPattern, current, paged_attention
from hotswap.errors import UnsupportedModel

__all__ = ["has_own_attention", "replace_attention", "set_implementation", "with_bias"]

# Entries that a bias adds to queries and keys; a multiple of what kernels compute at once.
_BIAS_WIDTH = 16
_BASE = 256
_SLOPES = "_hotswap_slopes"


def replace_attention(model: nn.Module) -> None:
    """Make the layers that are known to have attention of their own call that of the engine in steps.

    Outside of steps they compute as before.
    """
    for number, (module, replace) in enumerate(_known(model)):
        replace(module, number)


def set_implementation(model: Any, name: str) -> None:
    """Set the attention implementation of a model, also of one with attention of its own, for its masks."""
    if has_own_attention(model):
        model.config._attn_implementation_internal = name
    else:
        model.set_attn_implementation(name)


def has_own_attention(model: nn.Module) -> bool:
    """Whether a model has layers that are replaced."""
    return any(True for _ in _known(model))


def _known(model: nn.Module) -> Iterator[tuple[nn.Module, Callable[[Any, int], None]]]:
    for module in model.modules():
        kind = type(module)
        name = f"{kind.__module__.rpartition('.')[2]}.{kind.__name__}"
        if name in _KNOWN:
            yield module, _KNOWN[name]
        elif name in _METHODS and hasattr(module, "_attn"):  # some call the interface since transformers 5.24
            yield module, _METHODS[name]


def _attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Any,
    scale: float,
    slopes: Tensor | None = None,
) -> Tensor:
    """Return `[1, T, heads, dim]`, with a bias of `slopes` times the position of a key if they are given."""
    query, key = query.to(value.dtype), key.to(value.dtype)
    if slopes is not None:
        query, key = with_bias(query, key, slopes / scale)
    return paged_attention(module, query, key, value, mask, scaling=scale)[0]


def with_bias(query: Tensor, key: Tensor, slopes: Tensor) -> tuple[Tensor, Tensor]:
    """Append entries to queries and keys whose product is `slopes`, `[heads]`, times the key's position."""
    step = current()
    assert step is not None, "biases are appended in steps only"
    assert step.positions is not None, "`assemble` sets them"
    num_rows = key.shape[2]
    of_head = query.new_zeros(1, query.shape[1], 1, _BIAS_WIDTH)
    of_head[0, :, 0, 0], of_head[0, :, 0, 1] = slopes * _BASE, slopes
    of_key = key.new_zeros(1, 1, num_rows, _BIAS_WIDTH)
    of_key[..., 0], of_key[..., 1] = step.positions // _BASE, step.positions % _BASE
    return (
        torch.cat([query, of_head.expand(-1, -1, num_rows, -1)], -1),
        torch.cat([key, of_key.expand(-1, key.shape[1], -1, -1)], -1),
    )


# ------------------------------------------------------------------ models with a method for it


def _by_method(scale_of: Callable[[Any], float]) -> Callable[[Any, int], None]:
    def replace(module: Any, number: int) -> None:
        original, scale = module._attn, float(scale_of(module))
        if not isinstance(getattr(module, "layer_idx", None), int):
            module.layer_idx = number
        window = module.config.window_size if getattr(module, "attention_type", "") == "local" else None

        def attend(query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None) -> Any:
            if not isinstance(attention_mask, MaskPattern):
                return original(query, key, value, attention_mask)
            mask = attention_mask if window is None else _within(attention_mask, window)
            return _attend(module, query, key, value, mask, scale).transpose(1, 2), None

        module._attn = attend

    return replace


def _replace_gpt(module: Any, number: int) -> None:
    """Of the first GPT, whose keys are transposed and which has no pattern as a mask."""
    original, module.layer_idx = module._attn, number

    def attend(query: Tensor, key: Tensor, value: Tensor, *others: Any) -> Any:
        if current() is None:
            return original(query, key, value, *others)
        scale = value.shape[-1] ** -0.5 if module.scale else 1.0
        out = _attend(module, query, key.transpose(2, 3), value, MaskPattern(_causal), scale)
        return [out.transpose(1, 2)]

    module._attn = attend


def _causal(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return key <= query


_windows: WeakKeyDictionary[MaskPattern, MaskPattern] = WeakKeyDictionary()


def _within(mask: MaskPattern, window: int) -> MaskPattern:
    """Return the pattern of a window, one for all layers of a step."""
    found = _windows.get(mask)
    if found is None:
        found = _windows[mask] = MaskPattern(lambda batch, head, query, key: key > query - window)
    return found


def _share(module: Any, number: int) -> None:
    """Of one module for several layers (Zamba), which is told the layer that it computes."""
    original = _own_forward(module)

    def forward(*args: Any, layer_idx: int, **named: Any) -> Any:
        module.layer_idx = layer_idx
        return original(module, *args, layer_idx=layer_idx, **named)

    vars(module)["forward"] = forward


# ------------------------------------------------------------------ models without


def _replace_forward(written: Callable[..., Any]) -> Callable[[Any, int], None]:
    def replace(module: Any, number: int) -> None:
        original = _own_forward(module)

        def forward(hidden_states: Tensor, *args: Any, attention_mask: Any = None, **named: Any) -> Any:
            if not isinstance(attention_mask, MaskPattern):
                return original(module, hidden_states, *args, attention_mask=attention_mask, **named)
            return written(module, hidden_states, *args, mask=attention_mask, **named)

        vars(module)["forward"] = forward

    return replace


def _bloom(module: Any, hidden: Tensor, residual: Tensor, *, mask: MaskPattern, **_: Any) -> Any:
    query, key, value = module._reshape(module.query_key_value(hidden))
    slopes = _slopes(module, "build_alibi_tensor", module.num_heads, hidden.device)
    out = _attend(module, query, key, value, mask, module.inv_norm_factor, slopes)
    return residual + module.dense(out.flatten(2)), None


def _mpt(module: Any, hidden: Tensor, *, mask: MaskPattern, **_: Any) -> Any:
    mixed = module.Wqkv(hidden)
    if module.clip_qkv:
        mixed = mixed.clamp(min=-module.clip_qkv, max=module.clip_qkv)
    each = (part.unflatten(2, (module.n_heads, -1)).transpose(1, 2) for part in mixed.chunk(3, dim=2))
    query, key, value = each
    slopes = _slopes(module, "build_mpt_alibi_tensor", module.n_heads, hidden.device)
    return module.out_proj(
        _attend(module, query, key, value, mask, module.softmax_scale, slopes).flatten(2)
    ), None


def _falcon(
    module: Any,
    hidden: Tensor,
    *,
    mask: MaskPattern,
    alibi: Tensor | None,
    position_embeddings: Any,
    **_: Any,
) -> Any:
    if alibi is not None:
        raise UnsupportedModel(
            "The 'falcon' model has ALiBi, which transformers' two attentions compute differently; serve it "
            "with another engine."
        )
    query, key, value = (part.transpose(1, 2) for part in module._split_heads(module.query_key_value(hidden)))
    if module.new_decoder_architecture:  # which repeats keys and values for each query head
        each = module.num_heads // module.num_kv_heads
        key, value = key[:, ::each], value[:, ::each]
    rotate = _function(module, "apply_rotary_pos_emb")
    query, key = rotate(query, key, *position_embeddings)
    out = _attend(module, query, key, value, mask, module.inv_norm_factor)
    return module.dense(out.flatten(2)), None


def _slopes(module: Any, function: str, num_heads: int, device: torch.device) -> Tensor:
    """Return the slopes of the heads, `[heads]`, fp32, from the biases of the model's own function."""
    kept = cast("dict[str, Tensor]", vars(module))
    if _SLOPES not in kept:
        build = _function(module, function)
        sizes = (num_heads, 2) if function == "build_mpt_alibi_tensor" else _two_tokens(num_heads)
        biases: Tensor = build(*sizes)
        kept[_SLOPES] = (biases[:, 0, 1] - biases[:, 0, 0]).float().to(device)
    return kept[_SLOPES]


def _two_tokens(num_heads: int) -> tuple[Tensor, int, torch.dtype]:
    return torch.ones(1, 2), num_heads, torch.float32


def _own_forward(module: Any) -> Any:
    """Return the `forward` of a module's class."""
    return cast("Any", type(module)).forward


def _function(module: Any, name: str) -> Any:
    """Return a function of the module that a layer comes from; decorators of `forward` come from others."""
    return inspect.unwrap(_own_forward(module)).__globals__[name]


_KNOWN: dict[str, Callable[[Any, int], None]] = {
    "modeling_openai.Attention": _replace_gpt,
    "modeling_bloom.BloomAttention": _replace_forward(_bloom),
    "modeling_falcon.FalconAttention": _replace_forward(_falcon),
    "modeling_mpt.MptAttention": _replace_forward(_mpt),
    "modeling_zamba.ZambaAttention": _share,
    "modeling_zamba2.Zamba2Attention": _share,
}
_METHODS: dict[str, Callable[[Any, int], None]] = {
    "modeling_codegen.CodeGenAttention": _by_method(lambda module: 1 / module.scale_attn),
    "modeling_gptj.GPTJAttention": _by_method(lambda module: 1 / module.scale_attn),
    "modeling_gpt_neo.GPTNeoSelfAttention": _by_method(lambda module: 1.0),
    "modeling_gpt_neox_japanese.GPTNeoXJapaneseAttention": _by_method(lambda module: 1 / module.norm_factor),
}
