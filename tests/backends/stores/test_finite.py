"""A checkpoint with NaN or infinite weights is refused by the tensor's name, once, when it is imported."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from hotswap import Model, ModelId
from hotswap.backends.stores import NvmeStore
from hotswap.backends.stores.convert import convert
from hotswap.backends.stores.copying import check_finite
from hotswap.errors import ShardCorrupt

MATRIX, VECTOR = "model.layers.1.mlp.up_proj.weight", "model.layers.1.input_layernorm.weight"


@pytest.fixture
def source(tmp_path: Path, checkpoint: Path) -> Path:
    return Path(shutil.copytree(checkpoint, tmp_path / "source"))


def set_one(source: Path, name: str, value: float) -> None:
    weights = load_file(source / "model.safetensors")
    weights[name].flatten()[-1] = value
    save_file(weights, source / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("name", "value", "what"),
    [
        (MATRIX, math.nan, r"NaN at \[47, 31\]"),
        (MATRIX, math.inf, r"infinite at \[47, 31\]"),
        (MATRIX, -math.inf, r"infinite at \[47, 31\]"),
        (VECTOR, math.nan, r"NaN at \[31\]"),
    ],
)
@pytest.mark.parametrize("options", [{}, {"world_size": 2}, {"dtype": "bfloat16"}])
def test_weights_that_are_not_finite_are_refused_by_name(
    name: str, value: float, what: str, options: dict[str, object], source: Path, tmp_path: Path
) -> None:
    set_one(source, name, value)
    with pytest.raises(ShardCorrupt, match=f"{name}.*{what}"):
        convert(source, tmp_path / "root", model_id="tiny", **options)  # type: ignore[arg-type]
    assert list((tmp_path / "root").iterdir()) == []


async def test_a_fleet_does_not_begin_with_such_a_model(source: Path, tmp_path: Path) -> None:
    set_one(source, MATRIX, math.nan)
    async with NvmeStore(tmp_path / "root") as store:
        with pytest.raises(ShardCorrupt, match=MATRIX):
            await store.import_model(Model("tiny", source))


def test_a_mask_may_be_infinite(source: Path, tmp_path: Path) -> None:
    set_one(source, VECTOR, -math.inf)
    assert convert(source, tmp_path / "root", model_id="tiny").model == ModelId("tiny")


def test_weights_that_overflow_in_another_dtype_are_refused(source: Path, tmp_path: Path) -> None:
    set_one(source, MATRIX, 1e30)
    convert(source, tmp_path / "root", model_id="tiny")
    with pytest.raises(ShardCorrupt, match=f"{MATRIX}.*infinite.*float16"):
        convert(source, tmp_path / "root", model_id="half", dtype="float16")


def test_buffers_may_be_infinite_and_are_not_nan(source: Path, tmp_path: Path) -> None:
    """A model's config decides which tensors are buffers, so this one is asked of the check itself."""
    assert json.loads((source / "config.json").read_text())["model_type"] == "llama"
    mask = torch.full((4, 4), -math.inf).triu(1)
    check_finite("c", "mask", mask, 0, is_matrix=False)
    mask[0, 0] = math.nan
    with pytest.raises(ShardCorrupt, match="NaN"):
        check_finite("c", "mask", mask, 0, is_matrix=False)


@given(
    dtype=st.sampled_from([torch.bfloat16, torch.float16, torch.float32, torch.float64]),
    shape=st.sampled_from([(), (1,), (7,), (3, 5), (2, 3, 4), (33, 65)]),
    value=st.sampled_from([math.nan, math.inf, -math.inf, 1.0]),
    place=st.floats(0, 1, exclude_max=True),
)
def test_one_number_is_found_wherever_it_is(
    dtype: torch.dtype, shape: tuple[int, ...], value: float, place: float
) -> None:
    rows = torch.ones(shape, dtype=dtype)
    rows.view(-1)[int(place * rows.numel())] = value
    try:
        check_finite("c", "w", rows, 0, is_matrix=True)
    except ShardCorrupt:
        assert not math.isfinite(value)
    else:
        assert math.isfinite(value)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.float8_e4m3fn, torch.float8_e5m2])
def test_what_has_no_such_numbers_or_is_coded_is_not_looked_at(dtype: torch.dtype) -> None:
    every = torch.arange(256, dtype=torch.uint8)
    check_finite("c", "w", every.view(dtype) if dtype.itemsize == 1 else every.to(dtype), 0, is_matrix=True)
