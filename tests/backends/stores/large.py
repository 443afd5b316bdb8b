"""Checkpoints as large as asked for, written without ever being in memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.core_model_loading import revert_weight_conversion


def make_config(kind: str, *, layers: int, width: int) -> Any:
    """A Llama or Mixtral with the proportions of real ones."""
    common = {
        "vocab_size": 8000,
        "hidden_size": width,
        "intermediate_size": width * 4,
        "num_hidden_layers": layers,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "dtype": "bfloat16",
    }
    if kind == "llama":
        return transformers.LlamaConfig(**common)
    return transformers.MixtralConfig(**common, num_local_experts=4, num_experts_per_tok=2)


def write_checkpoint(directory: Path, kind: str, *, layers: int, width: int) -> int:
    """Write a checkpoint of repeated random bytes; return the size of its weights."""
    config = make_config(kind, layers=layers, width=width)
    directory.mkdir(parents=True)
    config.architectures = ["LlamaForCausalLM" if kind == "llama" else "MixtralForCausalLM"]
    config.save_pretrained(directory)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    state: dict[str, Any] = revert_weight_conversion(model, model.state_dict())
    header, end = {}, 0
    for name, tensor in state.items():
        size = tensor.numel() * 2
        header[name] = {"dtype": "BF16", "shape": list(tensor.shape), "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    noise = torch.randn(1 << 19).to(torch.bfloat16).view(torch.uint8).numpy().tobytes()
    with (directory / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for start in range(0, end, len(noise)):
            file.write(noise[: end - start])
    return end
