"""Tiny Llamas quantised in the ways that checkpoints of the Hub are, written without their tools.

The weights of a random model are rounded as each format stores them; what counts is that an engine reads the
same from the store as from the directory.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

__all__ = ["KINDS", "SIZES", "write", "write_experts"]

SIZES: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_E4M3_LARGEST = 448.0
_GROUP = 128
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def write(directory: Path, kind: str, *, seed: int = 0) -> Path:
    """Write the checkpoint of a kind, and return its directory."""
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(**SIZES)
    module = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if "norm" not in name:
                parameter.copy_(torch.randn_like(parameter) * 0.08)
    quantize, settings, files = KINDS[kind]
    tensors: dict[str, Tensor] = {}
    for name, tensor in module.state_dict().items():
        if name.endswith("_proj.weight"):
            tensors |= quantize(name.removesuffix(".weight"), tensor.float())
        else:
            tensors[name] = tensor.bfloat16()
    directory.mkdir(parents=True, exist_ok=True)
    save_file({name: one.contiguous() for name, one in tensors.items()}, directory / "model.safetensors")
    written = {**config.to_dict(), "architectures": ["LlamaForCausalLM"], "dtype": "bfloat16", **settings}
    (directory / "config.json").write_text(json.dumps(written))
    for file, content in files.items():
        (directory / file).write_text(json.dumps(content))
    return directory


def write_experts(directory: Path, kind: str = "unquantised") -> Path:
    """Write a checkpoint with experts of a kind, and return its directory."""
    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(
        **SIZES, moe_intermediate_size=128, num_experts=8, num_experts_per_tok=2, dtype="bfloat16"
    )
    module = transformers.Qwen3MoeForCausalLM(config)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if "norm" not in name:
                parameter.copy_(torch.randn_like(parameter) * 0.08)
    module.bfloat16().save_pretrained(directory)
    quantize, settings, _ = KINDS[kind]
    tensors: dict[str, Tensor] = {}
    for name, tensor in load_file(directory / "model.safetensors").items():
        if name.endswith("_proj.weight"):
            tensors |= quantize(name.removesuffix(".weight"), tensor.float())
        else:
            tensors[name] = tensor
    save_file({name: one.contiguous() for name, one in tensors.items()}, directory / "model.safetensors")
    written = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**written, **settings}))
    return directory


# --------------------------------------------------------------------------------------------- one layer


def _plain(name: str, weight: Tensor) -> dict[str, Tensor]:
    return {f"{name}.weight": weight.bfloat16()}


def _fp8_block(name: str, weight: Tensor) -> dict[str, Tensor]:
    """DeepSeek's: a scale for 128 x 128 weights."""
    rows, columns = (size // _GROUP for size in weight.shape)
    blocks = weight.view(rows, _GROUP, columns, _GROUP)
    scale = blocks.abs().amax(dim=(1, 3)) / _E4M3_LARGEST
    values = (blocks / scale[:, None, :, None]).view(weight.shape)
    return {f"{name}.weight": values.to(torch.float8_e4m3fn), f"{name}.weight_scale_inv": scale}


def _fp8_channel(name: str, weight: Tensor) -> dict[str, Tensor]:
    scale = weight.abs().amax(dim=1, keepdim=True) / _E4M3_LARGEST
    return {
        f"{name}.weight": (weight / scale).to(torch.float8_e4m3fn),
        f"{name}.weight_scale": scale.bfloat16(),
    }


def _fp8_tensor(name: str, weight: Tensor) -> dict[str, Tensor]:
    scale = weight.abs().max() / _E4M3_LARGEST
    return {
        f"{name}.weight": (weight / scale).to(torch.float8_e4m3fn),
        f"{name}.weight_scale": scale,
        f"{name}.input_scale": torch.tensor(0.05),
    }


def _int4(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Values from -8 to 7 in groups along the last dimension, and their scales."""
    grouped = weight.view(weight.shape[0], -1, _GROUP)
    scale = grouped.abs().amax(dim=2) / 7
    values = (grouped / scale[..., None]).round().clamp(-8, 7)
    return values.view(weight.shape).to(torch.int32), scale


def _packed(values: Tensor, dim: int, order: tuple[int, ...] = tuple(range(8))) -> Tensor:
    """Eight values of 4 bits in each int32 along a dimension."""
    moved = values.movedim(dim, -1)
    parts = moved.reshape(*moved.shape[:-1], -1, 8).to(torch.int64)
    words = sum(parts[..., place] << (4 * at) for at, place in enumerate(order))
    assert isinstance(words, Tensor)
    signed = torch.where(words >= 2**31, words - 2**32, words)
    return signed.to(torch.int32).movedim(-1, dim)


def _compressed_int4(name: str, weight: Tensor) -> dict[str, Tensor]:
    values, scale = _int4(weight)
    return {
        f"{name}.weight_packed": _packed(values + 8, 1),
        f"{name}.weight_scale": scale.bfloat16(),
        f"{name}.weight_shape": torch.tensor(weight.shape, dtype=torch.int64),
    }


def _awq(name: str, weight: Tensor) -> dict[str, Tensor]:
    values, scale = _int4(weight)
    zeros = torch.full((weight.shape[1] // _GROUP, weight.shape[0]), 8, dtype=torch.int32)
    return {
        f"{name}.qweight": _packed(values.t() + 8, 1, _AWQ_ORDER),
        f"{name}.qzeros": _packed(zeros, 1, _AWQ_ORDER),
        f"{name}.scales": scale.t().half(),
    }


def _gptq(name: str, weight: Tensor) -> dict[str, Tensor]:
    values, scale = _int4(weight)
    zeros = torch.full((weight.shape[1] // _GROUP, weight.shape[0]), 7, dtype=torch.int32)
    return {
        f"{name}.qweight": _packed(values.t() + 8, 0),
        f"{name}.qzeros": _packed(zeros, 1),
        f"{name}.scales": scale.t().half(),
        f"{name}.g_idx": torch.arange(weight.shape[1], dtype=torch.int32) // _GROUP,
    }


def _mxfp4(name: str, weight: Tensor) -> dict[str, Tensor]:
    """Pairs of e2m1 values, a power of two for 32 of them."""
    steps = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    grouped = weight.view(weight.shape[0], -1, 32)
    exponent = (grouped.abs().amax(dim=2).clamp(min=1e-9) / 6).log2().ceil()
    scaled = grouped / exponent.exp2()[..., None]
    code = (scaled.abs()[..., None] - steps).abs().argmin(dim=-1) + 8 * (scaled < 0)
    pairs = code.view(weight.shape[0], -1, 2).to(torch.uint8)
    return {
        f"{name}.weight_packed": pairs[..., 0] | (pairs[..., 1] << 4),
        f"{name}.weight_scale": (exponent + 127).to(torch.uint8),
    }


def _bitsandbytes(name: str, weight: Tensor) -> dict[str, Tensor]:
    scale = weight.abs().amax(dim=1) / 127
    return {
        f"{name}.weight": (weight / scale[:, None]).round().to(torch.int8),
        f"{name}.SCB": weight.abs().amax(dim=1),
        f"{name}.weight_format": torch.tensor(0, dtype=torch.uint8),
    }


# ------------------------------------------------------------------------------------------------- kinds


def _compressed(weights: dict[str, Any], format: str, inputs: dict[str, Any] | None = None) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {
        "quantization_config": {
            "quant_method": "compressed-tensors",
            "format": format,
            "quantization_status": "compressed",
            "ignore": ["lm_head", "re:.*mlp.gate$"],
            "config_groups": {"group_0": group},
        }
    }


_FLOAT8 = {"num_bits": 8, "type": "float", "symmetric": True}
_Kind = tuple[Callable[[str, Tensor], dict[str, Tensor]], dict[str, Any], dict[str, Any]]

KINDS: dict[str, _Kind] = {
    "unquantised": (_plain, {}, {}),
    "FP8 in blocks": (
        _fp8_block,
        {
            "quantization_config": {
                "quant_method": "fp8",
                "activation_scheme": "dynamic",
                "weight_block_size": [_GROUP, _GROUP],
            }
        },
        {},
    ),
    "compressed-tensors FP8": (
        _fp8_channel,
        _compressed(
            {**_FLOAT8, "strategy": "channel", "dynamic": False},
            "float-quantized",
            {**_FLOAT8, "strategy": "token", "dynamic": True},
        ),
        {},
    ),
    "compressed-tensors int4": (
        _compressed_int4,
        _compressed(
            {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": _GROUP},
            "pack-quantized",
        ),
        {},
    ),
    "AWQ": (
        _awq,
        {
            "quantization_config": {
                "quant_method": "awq",
                "bits": 4,
                "group_size": _GROUP,
                "version": "gemm",
                "zero_point": True,
            }
        },
        {},
    ),
    "GPTQ": (
        _gptq,
        {
            "quantization_config": {
                "quant_method": "gptq",
                "bits": 4,
                "group_size": _GROUP,
                "desc_act": False,
                "sym": True,
            }
        },
        {},
    ),
    "MXFP4": (
        _mxfp4,
        _compressed(
            {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "group", "group_size": 32},
            "mxfp4-pack-quantized",
        ),
        {},
    ),
    "ModelOpt FP8": (
        _fp8_tensor,
        {},
        {
            "hf_quant_config.json": {
                "producer": {"name": "modelopt", "version": "0.31.0"},
                "quantization": {
                    "quant_algo": "FP8",
                    "kv_cache_quant_algo": None,
                    "exclude_modules": ["lm_head"],
                },
            }
        },
    ),
    "bitsandbytes int8": (
        _bitsandbytes,
        {"quantization_config": {"quant_method": "bitsandbytes", "load_in_8bit": True}},
        {},
    ),
}
