"""Writes adapter files in PEFT's format, and merges adapters into their base model."""

from __future__ import annotations

import copy
import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
ALL = (*ATTENTION, "gate_proj", "up_proj", "down_proj")
SAVED_CONFIG: dict[str, Any] = {
    "alpha_pattern": {},
    "auto_mapping": None,
    "base_model_name_or_path": "base",
    "bias": "none",
    "corda_config": None,
    "eva_config": None,
    "exclude_modules": None,
    "fan_in_fan_out": False,
    "inference_mode": True,
    "init_lora_weights": True,
    "layer_replication": None,
    "layers_pattern": None,
    "layers_to_transform": None,
    "loftq_config": {},
    "lora_alpha": 16,
    "lora_bias": False,
    "lora_dropout": 0.05,
    "megatron_config": None,
    "megatron_core": "megatron.core",
    "modules_to_save": None,
    "peft_type": "LORA",
    "qalora_group_size": 16,
    "r": 8,
    "rank_pattern": {},
    "revision": None,
    "target_modules": ["q_proj"],
    "target_parameters": None,
    "task_type": "CAUSAL_LM",
    "trainable_token_indices": None,
    "use_dora": False,
    "use_qalora": False,
    "use_rslora": False,
}


def linear_layers(model: nn.Module, names: Sequence[str]) -> dict[str, tuple[int, int]]:
    """Return the layers whose last name is among `names`, with their widths."""
    found: dict[str, tuple[int, int]] = {}
    for name, layer in model.named_modules():
        if name.rpartition(".")[2] in names:
            if isinstance(layer, nn.Linear):
                found[name] = (layer.in_features, layer.out_features)
            elif isinstance(layer, Conv1D):
                found[name] = (int(layer.weight.shape[0]), int(layer.weight.shape[1]))
    assert found
    return found


def write(
    directory: Path,
    model: nn.Module,
    *,
    seed: int = 0,
    names: Sequence[str] = ALL,
    size: float = 0.6,
    dtype: torch.dtype = torch.float32,
    tensors: Mapping[str, Tensor] | None = None,
    **config: Any,
) -> Path:
    """Write a random adapter for layers of `model` named `names`; `config` and `tensors` override parts."""
    chosen = {**SAVED_CONFIG, "target_modules": list(names), **config}
    generator = torch.Generator().manual_seed(seed)
    made: dict[str, Tensor] = {}
    for name, (width_in, width_out) in linear_layers(model, names).items():
        rank = by_pattern(chosen["rank_pattern"], name, chosen["r"])
        down = torch.randn(rank, width_in, generator=generator) / math.sqrt(width_in)
        up = size * torch.randn(width_out, rank, generator=generator) / math.sqrt(rank)
        made[f"base_model.model.{name}.lora_A.weight"] = down.to(dtype)
        made[f"base_model.model.{name}.lora_B.weight"] = up.to(dtype)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "adapter_config.json").write_text(json.dumps(chosen), encoding="utf-8")
    save_file({**made, **(tensors or {})}, directory / "adapter_model.safetensors", metadata={"format": "pt"})
    return directory


def merged(model: Any, directory: Path) -> Any:
    """Return a copy of `model` with an adapter merged: `W + scaling * B @ A`, as PEFT's own `merge`."""
    from safetensors.torch import load_file

    config = json.loads((directory / "adapter_config.json").read_text(encoding="utf-8"))
    tensors = load_file(directory / "adapter_model.safetensors")
    whole = copy.deepcopy(model)
    if (head := whole.get_output_embeddings()) is not None:  # a tied head must not change the embeddings
        head.weight = nn.Parameter(head.weight.detach().clone())
    for key, down in tensors.items():
        if ".lora_A." not in key:
            continue
        name = key.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        up = tensors[key.replace(".lora_A.", ".lora_B.")]
        alpha = by_pattern(config["alpha_pattern"], name, config["lora_alpha"])
        scaling = alpha / (math.sqrt(len(down)) if config["use_rslora"] else len(down))
        layer = whole.get_submodule(name)
        change = scaling * (up.float() @ down.float())
        layer.weight.data += (change.T if isinstance(layer, Conv1D) else change).to(layer.weight.dtype)
    return whole


def by_pattern(patterns: Mapping[str, Any], name: str, otherwise: Any) -> Any:
    for pattern, value in patterns.items():
        if re.match(rf"(.*\.)?({pattern})$", name):
            return value
    return otherwise
