"""The flat layout has every tensor once, and tensors are read back unchanged."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hotswap.backends.torch.weights import (
    ALIGNMENT_BYTES,
    convert,
    fill,
    layout,
    load_checkpoint,
    recast,
    tensor_at,
)
from hotswap.errors import ShardCorrupt, ShardMissing, UnsafeFile, UnsupportedModel
from tests.backends.torch.zoo import CONFIGS, make_model


@pytest.mark.parametrize("architecture", CONFIGS)
def test_tensors_are_read_back_from_the_buffer(architecture: str) -> None:
    model = make_model(architecture)
    specs, size_bytes = layout(model)
    flat = torch.zeros(size_bytes, dtype=torch.uint8)
    fill(flat, model, specs)
    state = model.state_dict()
    assert [spec.name for spec in specs] == list(state)
    assert all(torch.equal(tensor_at(flat, spec), state[spec.name]) for spec in specs)
    assert all(spec.offset_bytes % ALIGNMENT_BYTES == 0 for spec in specs)


def test_tied_names_have_one_offset() -> None:
    specs, size_bytes = layout(make_model("qwen2"))
    places = {spec.name: spec.offset_bytes for spec in specs}
    assert places["lm_head.weight"] == places["model.embed_tokens.weight"]
    spans = sorted({(spec.offset_bytes, spec.offset_bytes + spec.size_bytes) for spec in specs})
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
    assert spans[-1][1] <= size_bytes < spans[-1][1] + ALIGNMENT_BYTES


def test_the_layout_needs_no_values() -> None:
    model = make_model("mixtral")
    assert layout(model) == layout(model.to("meta"))


def test_only_tensors_of_the_main_dtype_are_converted() -> None:
    model = make_model("qwen2", dtype=torch.bfloat16)
    model.model.norm.weight.data = model.model.norm.weight.data.float()
    specs, size_bytes = layout(model)
    flat = torch.zeros(size_bytes, dtype=torch.uint8)
    fill(flat, model, specs)
    wanted, wanted_bytes = recast(specs, torch.bfloat16, torch.float16)
    converted = torch.zeros(wanted_bytes, dtype=torch.uint8)
    convert(flat, specs, converted, wanted)
    for spec in wanted:
        original = model.state_dict()[spec.name]
        expected = original if spec.name == "model.norm.weight" else original.to(torch.float16)
        assert torch.equal(tensor_at(converted, spec), expected)


@pytest.mark.parametrize(
    "change", [{"offset_bytes": 1 << 40}, {"size_bytes": 4}, {"dtype": "nonsense"}], ids=str
)
def test_an_inconsistent_spec_is_refused(change: dict[str, object]) -> None:
    specs, size_bytes = layout(make_model("llama"))
    with pytest.raises(ShardCorrupt, match=specs[0].name):
        tensor_at(torch.zeros(size_bytes, dtype=torch.uint8), replace(specs[0], **change))  # type: ignore[arg-type]


def test_a_checkpoint_is_read_in_its_own_dtype(tmp_path: Path) -> None:
    model = make_model("mixtral", dtype=torch.bfloat16)
    model.save_pretrained(tmp_path)
    read = load_checkpoint(tmp_path)
    assert layout(read) == layout(model)
    assert all(
        torch.equal(a, b)
        for a, b in zip(read.state_dict().values(), model.state_dict().values(), strict=True)
    )


def test_an_invalid_checkpoint_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ShardMissing, match=r"config\.json"):
        load_checkpoint(tmp_path)
    config = tmp_path / "config.json"
    config.write_text('{"model_type": "llama"}')
    with pytest.raises(ShardMissing, match="safetensors"):
        load_checkpoint(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    with pytest.raises(UnsafeFile, match=r"pytorch_model\.bin"):
        load_checkpoint(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"no such thing")
    with pytest.raises(ShardCorrupt, match=str(tmp_path)):
        load_checkpoint(tmp_path)
    config.write_text('{"model_type": "no-such-type"}')
    with pytest.raises(UnsupportedModel, match="no-such-type"):
        load_checkpoint(tmp_path)
    config.write_text('{"model_type": "llama", "quantization_config": {}}')
    with pytest.raises(UnsupportedModel, match="quantized"):
        load_checkpoint(tmp_path)
    config.write_text("{")
    with pytest.raises(ShardCorrupt, match="JSON"):
        load_checkpoint(tmp_path)


def test_a_checkpoint_that_lacks_a_tensor_is_refused(tmp_path: Path) -> None:
    model = make_model("llama")
    state = {name: tensor for name, tensor in model.state_dict().items() if "layers.1.mlp" not in name}
    model.save_pretrained(tmp_path, state_dict=state)
    with pytest.raises(ShardCorrupt, match=r"layers\.1\.mlp"):
        load_checkpoint(tmp_path)
