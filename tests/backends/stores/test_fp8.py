"""Conversion to FP8: the stored tensors, their size, and the groups of each rank's part."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from hotswap.abc import Manifest, TensorSpec
from hotswap.backends.stores.convert import convert
from hotswap.backends.torch.fp8 import SCHEMES, quantize
from hotswap.backends.torch.quantize import Quantizer, quantizable
from hotswap.backends.torch.weights import named_tensors, tensor_at
from hotswap.errors import ConfigError, ShardCorrupt
from tests.backends.torch.zoo import make_model

UNEVEN: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 320,
    "intermediate_size": 600,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 40,
}


def save(model: Any, directory: Path) -> Path:
    """A checkpoint of the model, as Hugging Face lays it out."""
    model.save_pretrained(directory)
    return directory


def rank_bytes(root: Path, manifest: Manifest, rank: int) -> Tensor:
    """A rank's flat buffer, put together from its files."""
    flat = torch.zeros(manifest.buffer_bytes, dtype=torch.uint8)
    for shard in manifest.shards_of(rank):
        data = bytearray((root / manifest.model / shard.file).read_bytes())
        part = torch.frombuffer(data, dtype=torch.uint8)[shard.file_offset_bytes :][: shard.size_bytes]
        flat[shard.buffer_offset_bytes :][: shard.size_bytes] = part
    return flat


def stored(root: Path, manifest: Manifest, rank: int = 0) -> dict[str, Tensor]:
    """The stored tensors of a rank by name."""
    flat = rank_bytes(root, manifest, rank)
    return {spec.name: tensor_at(flat, spec) for spec in manifest.tensors_of(rank)}


def same(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are the same bytes of the same dtype and shape."""
    return (one.dtype, one.shape) == (other.dtype, other.shape) and torch.equal(
        one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8)
    )


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "mixtral", "gpt_oss"])
def test_the_store_has_quantized_values_and_scales_and_all_else_unchanged(
    architecture: str, scheme: str, tmp_path: Path
) -> None:
    model = make_model(architecture, dtype=torch.bfloat16)
    source = save(model, tmp_path / "source")
    manifest = convert(source, tmp_path, model_id="m", quantize=scheme)
    assert (manifest.quantization, manifest.unquantized_dtype) == (scheme, "bfloat16")
    found, chosen = stored(tmp_path, manifest), quantizable(model)
    assert set(found) == set(model.state_dict()) | {f"{name}.scale" for name in chosen}
    for name, tensor in model.state_dict().items():
        if name in chosen:
            quantized, scales = quantize(tensor, SCHEMES[scheme])
            assert same(found[name], quantized)
            assert same(found[f"{name}.scale"], scales)
        else:
            assert same(found[name], tensor)


def test_tied_weights_are_stored_once_and_as_they_were(tmp_path: Path) -> None:
    source = save(make_model("qwen2"), tmp_path / "source")
    manifest = convert(source, tmp_path, model_id="m", quantize="fp8-e4m3")
    spec = {spec.name: spec for spec in manifest.tensors}
    head, embedding = spec["lm_head.weight"], spec["model.embed_tokens.weight"]
    assert (head.offset_bytes, head.dtype) == (embedding.offset_bytes, embedding.dtype)
    assert head.dtype == "float32"
    assert "lm_head.weight.scale" not in spec


def test_a_model_with_nothing_to_quantize_is_stored_as_if_it_were_not_asked_for(tmp_path: Path) -> None:
    source = save(make_model("gpt2"), tmp_path / "source")
    asked = convert(source, tmp_path / "asked", model_id="m", quantize="fp8-e4m3")
    plain = convert(source, tmp_path / "plain", model_id="m")
    assert asked == plain
    assert asked.quantization == ""


@pytest.mark.parametrize("scheme", SCHEMES)
def test_each_rank_groups_what_it_has(scheme: str, tmp_path: Path) -> None:
    """K = 320 and 600 on two ranks: row-parallel parts of 80 and 300, whose groups begin anew."""
    model = make_model(transformers.LlamaConfig(**UNEVEN), dtype=torch.bfloat16)
    source = save(model, tmp_path / "source")
    cut = convert(source, tmp_path, model_id="cut", world_size=2)
    both = convert(source, tmp_path, model_id="both", world_size=2, quantize=scheme)
    chosen = quantizable(model)
    for rank in (0, 1):
        parts, found = stored(tmp_path, cut, rank), stored(tmp_path, both, rank)
        assert any(parts[name].shape[-1] % 128 for name in chosen)
        for name, part in parts.items():
            if name in chosen:
                quantized, scales = quantize(part, SCHEMES[scheme])
                assert same(found[name], quantized)
                assert same(found[f"{name}.scale"], scales)
            else:
                assert same(found[name], part)


def test_an_infinite_weight_is_refused_by_name_and_leaves_nothing(tmp_path: Path) -> None:
    model = make_model("llama")
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 5] = float("inf")
    source = save(model, tmp_path / "source")
    root = tmp_path / "root"
    with pytest.raises(ShardCorrupt, match=r"'model\.layers\.1\.mlp\.up_proj\.weight'"):
        convert(source, root, model_id="m", quantize="fp8-e4m3")
    assert not list(root.iterdir())


def test_an_unknown_scheme_is_refused(tmp_path: Path) -> None:
    source = save(make_model("llama"), tmp_path / "source")
    with pytest.raises(ConfigError, match="'int3'"):
        convert(source, tmp_path, model_id="m", quantize="int3")


# Bytes of an index, of models that no test could hold: 8 and 3 billion weights.
LARGE: dict[str, dict[str, Any]] = {
    "untied": {
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
    "tied": {
        "vocab_size": 32000,
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "num_hidden_layers": 28,
        "num_attention_heads": 24,
        "num_key_value_heads": 8,
        "tie_word_embeddings": True,
    },
}


@pytest.mark.parametrize("name", LARGE)
@pytest.mark.parametrize(("scheme", "per_weight"), [("fp8-e4m3", 1 + 4 / 128), ("fp8-e4m3-channel", 1.0)])
def test_a_model_of_linear_layers_takes_half_the_bytes(name: str, scheme: str, per_weight: float) -> None:
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM._from_config(
            transformers.LlamaConfig(**LARGE[name]), dtype=torch.bfloat16
        )
    quantizer = Quantizer(scheme, model)
    tensors = {id(tensor): (name, tensor) for name, tensor in named_tensors(model)}.values()
    plain = sum(tensor.nbytes for _, tensor in tensors)
    linear = sum(tensor.numel() for name, tensor in tensors if name in quantizer.names)
    channels = sum(len(tensor) for name, tensor in tensors if name in quantizer.names)
    size = sum(part.nbytes for name, tensor in tensors for _, part in quantizer(name, tensor))
    assert size == plain - 2 * linear + int(per_weight * linear) + (4 * channels if per_weight == 1 else 0)
    assert size <= 0.55 * plain


def test_the_index_adds_up(tmp_path: Path) -> None:
    config = transformers.LlamaConfig(**{**UNEVEN, "num_hidden_layers": 4})
    source = save(make_model(config, dtype=torch.bfloat16), tmp_path / "source")
    plain = convert(source, tmp_path, model_id="plain")
    manifest = convert(source, tmp_path, model_id="m", quantize="fp8-e4m3")
    spec = {spec.name: spec for spec in manifest.tensors}
    for before in plain.tensors:
        after, scales = spec[before.name], spec.get(f"{before.name}.scale")
        if scales is None:
            assert _facts(after) == _facts(before)
            continue
        assert (after.dtype, scales.dtype) == ("float8_e4m3fn", "float32")
        assert 2 * after.size_bytes == before.size_bytes
        assert scales.shape == (*after.shape[:-1], math.ceil(after.shape[-1] / 128))
    assert manifest.weight_bytes < 0.6 * plain.weight_bytes
    assert manifest.kv_bytes_per_token == plain.kv_bytes_per_token


def _facts(spec: TensorSpec) -> tuple[object, ...]:
    return spec.dtype, spec.shape, spec.size_bytes, spec.checksum
