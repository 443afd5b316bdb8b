"""No quantized checkpoint is taken for plain weights: each is refused by what tells of it, with a remedy."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from hotswap.backends.stores.convert import convert
from hotswap.errors import UnsupportedModel
from tests.backends.quantized.kinds import KINDS, write

REMEDY = r"layout='checkpoint'.*GGUF"


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("plain"), "unquantised")


def changed(plain: Path, directory: Path, config: dict[str, Any], **tensors: torch.Tensor) -> Path:
    """A copy with other fields of the config, and more tensors or others."""
    directory.mkdir()
    written = json.loads((plain / "config.json").read_text()) | config
    (directory / "config.json").write_text(json.dumps(written))
    save_file({**load_file(plain / "model.safetensors"), **tensors}, directory / "model.safetensors")
    return directory


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "unquantised"])
def test_every_kind_is_refused_for_modules(kind: str, tmp_path: Path) -> None:
    source = write(tmp_path / "source", kind)
    with pytest.raises(UnsupportedModel, match=REMEDY):
        convert(source, tmp_path / "root", model_id="m")
    assert not (tmp_path / "root").exists()


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "unquantised"])
def test_every_kind_is_refused_by_its_tensors_alone(kind: str, tmp_path: Path) -> None:
    """A config that lost its section is what made garbage before."""
    source = write(tmp_path / "source", kind)
    config = json.loads((source / "config.json").read_text())
    config.pop("quantization_config", None)
    (source / "config.json").write_text(json.dumps(config))
    (source / "hf_quant_config.json").unlink(missing_ok=True)
    with pytest.raises(UnsupportedModel, match=REMEDY):
        convert(source, tmp_path / "root", model_id="m")


@pytest.mark.parametrize("section", ["quantization_config", "compression_config", "quantization"])
def test_every_section_that_tells_of_quantization_counts(section: str, plain: Path, tmp_path: Path) -> None:
    source = changed(plain, tmp_path / "source", {section: {"quant_method": "new"}})
    with pytest.raises(UnsupportedModel, match=f"'{section}' of its config is 'new'"):
        convert(source, tmp_path / "root", model_id="m")


def test_a_section_that_is_null_says_nothing(plain: Path, tmp_path: Path) -> None:
    source = changed(plain, tmp_path / "source", {"quantization_config": None})
    (source / "consolidated.safetensors").write_bytes(b"broken")
    convert(source, tmp_path / "root", model_id="m")


WEIGHT = "model.layers.0.mlp.up_proj.weight"
GARBAGE: dict[str, Callable[[], dict[str, torch.Tensor]]] = {
    "int8": lambda: {WEIGHT: torch.ones(512, 256, dtype=torch.int8)},
    "int32": lambda: {WEIGHT: torch.ones(512, 256, dtype=torch.int32)},
    "fp8": lambda: {WEIGHT: torch.ones(512, 256).to(torch.float8_e4m3fn)},
    "scale": lambda: {f"{WEIGHT}_scale": torch.ones(1)},
    "zero_point": lambda: {f"{WEIGHT}_zero_point": torch.zeros(1)},
    "g_idx": lambda: {"model.layers.0.mlp.up_proj.g_idx": torch.zeros(256, dtype=torch.int32)},
}


@pytest.mark.parametrize("what", GARBAGE)
def test_a_tensor_that_would_be_misread_is_named(what: str, plain: Path, tmp_path: Path) -> None:
    source = changed(plain, tmp_path / "source", {}, **GARBAGE[what]())
    with pytest.raises(UnsupportedModel, match=r"tensor 'model\.layers\.0\.mlp\.up_proj"):
        convert(source, tmp_path / "root", model_id="m")


@pytest.mark.parametrize("architecture", ["BertModel", "BertForMaskedLM", "XLMRobertaModel"])
def test_a_model_that_generates_nothing_is_refused(architecture: str, plain: Path, tmp_path: Path) -> None:
    source = changed(plain, tmp_path / "source", {"architectures": [architecture]})
    with pytest.raises(UnsupportedModel, match="generates no text"):
        convert(source, tmp_path / "root", model_id="m")


def test_the_directory_of_an_adapter_asks_for_its_base_model(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(Exception, match="register its base model"):
        convert(tmp_path, tmp_path / "root", model_id="m")
