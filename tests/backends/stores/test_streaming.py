"""Streamed conversion gives the bytes of the loaded model, in bounded memory."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from hotswap.abc import Manifest
from hotswap.backends.stores import streaming
from hotswap.backends.stores.convert import convert
from hotswap.backends.torch import weights
from hotswap.errors import ConfigError, ShardCorrupt
from tests.backends.torch.zoo import CONFIGS, make_model


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every architecture of the zoo, in several files each, in the names that its checkpoints have."""
    torch.set_num_threads(1)
    root = tmp_path_factory.mktemp("zoo")
    for name in CONFIGS:
        dtype = torch.bfloat16 if name in {"qwen3", "mixtral", "deepseek_v3"} else torch.float32
        make_model(name, dtype=dtype).save_pretrained(root / name, max_shard_size="200KB")
    return root


def written(root: Path, manifest: Manifest, rank: int = 0) -> bytes:
    """The bytes of a rank's data files, one after the other."""
    directory = root / manifest.model
    return b"".join((directory / shard.file).read_bytes() for shard in manifest.shards_of(rank))


def loaded(source: Path, dtype: torch.dtype | None) -> tuple[Any, bytes]:
    """The layout and the flat buffer of the model that transformers loads."""
    module = weights.load_checkpoint(source, dtype)
    specs, size = weights.layout(module)
    flat = torch.zeros(size, dtype=torch.uint8)
    weights.fill(flat, module, specs)
    return specs, flat.numpy().tobytes()


def assert_as_loaded(source: Path, root: Path, dtype: str | None = None, **options: Any) -> None:
    manifest = convert(source, root, model_id="m", dtype=dtype, replace_existing=True, **options)
    specs, flat = loaded(source, None if dtype is None else getattr(torch, dtype))
    assert [(t.name, t.dtype, t.shape, t.stride, t.offset_bytes) for t in manifest.tensors] == [
        (t.name, t.dtype, t.shape, t.stride, t.offset_bytes) for t in specs
    ]
    assert written(root, manifest) == flat.ljust(manifest.buffer_bytes, b"\0")


@pytest.mark.parametrize("dtype", [None, "bfloat16", "float16"])
@pytest.mark.parametrize("name", CONFIGS)
def test_the_bytes_are_those_of_the_loaded_model(
    tmp_path: Path, checkpoints: Path, monkeypatch: pytest.MonkeyPatch, name: str, dtype: str | None
) -> None:
    monkeypatch.setattr(streaming, "_PIECE_BYTES", 3000)  # many pieces, of odd numbers of rows
    monkeypatch.setattr(streaming, "_loaded", None)  # the model itself is never loaded
    assert_as_loaded(checkpoints / name, tmp_path, dtype)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    name=st.sampled_from(["qwen2", "gpt2", "mixtral", "deepseek_v3"]),
    piece_bytes=st.integers(1, 100_000),
    max_file_bytes=st.integers(1, 300_000),
)
def test_pieces_and_files_of_any_size_make_the_same_bytes(
    tmp_path: Path, checkpoints: Path, name: str, piece_bytes: int, max_file_bytes: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(streaming, "_PIECE_BYTES", piece_bytes)
        assert_as_loaded(checkpoints / name, tmp_path, max_file_bytes=max(4096 * 8, max_file_bytes))


def test_a_conversion_that_needs_whole_tensors_is_followed_too(
    tmp_path: Path, checkpoints: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streaming.Recipe, "is_stacked", False)
    assert_as_loaded(checkpoints / "mixtral", tmp_path)


def test_what_cannot_be_followed_is_loaded_whole_where_memory_allows(
    tmp_path: Path, checkpoints: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise NotImplementedError("a way of its own")

    monkeypatch.setattr(streaming, "recipes", refuse)
    assert_as_loaded(checkpoints / "mixtral", tmp_path)
    with pytest.raises(ConfigError, match=r"loaded whole.*a way of its own.*memory_bytes"):
        convert(checkpoints / "mixtral", tmp_path, model_id="other", memory_bytes=1000)
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


def test_a_row_that_does_not_fit_in_memory_is_refused(tmp_path: Path, checkpoints: Path) -> None:
    with pytest.raises(ConfigError, match=r"A row of .*experts.*memory_bytes"):
        convert(checkpoints / "mixtral", tmp_path, model_id="m", memory_bytes=1000)


def changed(source: Path, target: Path, **tensors: torch.Tensor | None) -> Path:
    """A copy of a checkpoint in one file, with tensors added, or removed for `None`."""
    target.mkdir()
    shutil.copy(source / "config.json", target)
    state: dict[str, torch.Tensor] = {}
    for file in source.glob("*.safetensors"):
        state |= load_file(file)
    for name, tensor in tensors.items():
        state.pop(name, None)
        if tensor is not None:
            state[name] = tensor
    save_file(state, target / "model.safetensors", metadata={"format": "pt"})
    return target


@pytest.mark.parametrize("same", [True, False])
def test_a_tie_holds_only_between_equal_tensors(tmp_path: Path, checkpoints: Path, same: bool) -> None:
    embedding = make_model("qwen2").get_input_embeddings().weight.detach()
    head = embedding.clone() if same else embedding + 1
    source = changed(checkpoints / "qwen2", tmp_path / "source", **{"lm_head.weight": head})
    assert_as_loaded(source, tmp_path / "root")
    index = json.loads((tmp_path / "root/m/index.json").read_text())
    places = {tensor["name"]: tensor["offset_bytes"] for tensor in index["manifest"]["tensors"]}
    assert (places["lm_head.weight"] == places["model.embed_tokens.weight"]) is same


def test_a_tied_tensor_may_be_there_under_its_other_name(tmp_path: Path, checkpoints: Path) -> None:
    embedding = make_model("qwen2").get_input_embeddings().weight.detach().clone()
    renamed = {"lm_head.weight": embedding, "model.embed_tokens.weight": None}
    assert_as_loaded(changed(checkpoints / "qwen2", tmp_path / "source", **renamed), tmp_path / "root")


@pytest.mark.parametrize("tensor", [None, torch.zeros(3, 5)])
def test_a_tensor_that_is_missing_or_of_another_shape_is_named(
    tmp_path: Path, checkpoints: Path, tensor: torch.Tensor | None
) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    source = changed(checkpoints / "llama", tmp_path / "source", **{name: tensor})
    with pytest.raises(ShardCorrupt, match=name):
        convert(source, tmp_path / "root", model_id="m")
    assert not (tmp_path / "root").exists()


def test_tensors_of_no_use_and_old_names_do_no_harm(tmp_path: Path, checkpoints: Path) -> None:
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4), "surplus": torch.ones(2)}
    assert_as_loaded(changed(checkpoints / "llama", tmp_path / "source", **extra), tmp_path / "root")


def test_the_dtype_is_that_of_the_weights_where_no_config_tells(tmp_path: Path, checkpoints: Path) -> None:
    source = changed(checkpoints / "qwen3", tmp_path / "source")
    config = json.loads((source / "config.json").read_text())
    del config["dtype"]
    (source / "config.json").write_text(json.dumps(config))
    assert_as_loaded(source, tmp_path / "root")


# Makes a checkpoint of some hundred MB, converts it, and prints its size and the most anonymous memory that
# the conversion took beyond what the libraries had.
_CHILD = """
    import re, sys
    from pathlib import Path
    import torch
    from hotswap.backends.stores.convert import convert
    from tests.backends.stores.large import write_checkpoint

    def anonymous():
        return int(re.search(r"RssAnon:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024

    torch.set_num_threads(1)
    kind, layers, target = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    write_checkpoint(target / "tiny", kind, layers=1, width=64)
    convert(target / "tiny", target / "root", model_id="tiny")  # what the libraries load on first use
    size = write_checkpoint(target / "source", kind, layers=layers, width=1024)
    before, peak = anonymous(), 0

    def watch(progress):
        global peak
        peak = max(peak, anonymous())

    convert(target / "source", target / "root", model_id="m", progress=watch, dtype=sys.argv[4])
    print(size, peak - before)
"""


@pytest.mark.parametrize(
    ("kind", "dtype"), [("llama", "bfloat16"), ("llama", "float32"), ("mixtral", "bfloat16")]
)
def test_memory_is_far_below_the_size_of_the_checkpoint(tmp_path: Path, kind: str, dtype: str) -> None:
    if not Path("/proc/self/status").exists():
        pytest.skip("how much anonymous memory a process has is asked of /proc")
    layers = {"llama": 10, "mixtral": 4}[kind]
    child = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(_CHILD), kind, str(layers), str(tmp_path), dtype],
        capture_output=True,
        text=True,
        check=True,
    )
    shutil.rmtree(tmp_path)
    size, peak = map(int, child.stdout.split())
    assert size > 250 << 20
    assert peak < 130 << 20, f"{peak} bytes for a checkpoint of {size}"
