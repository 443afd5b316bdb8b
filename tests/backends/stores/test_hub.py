"""Models are found by the names that people know from the Hub, with and without a network."""

from __future__ import annotations

import builtins
from pathlib import Path
from typing import Any

import pytest

from hotswap import Model, ModelId
from hotswap.backends.hub import find, name_of, resolve
from hotswap.backends.stores import NvmeStore
from hotswap.cli import main
from hotswap.errors import BackendMissing, ShardMissing
from tests.backends.stores.checkpoints import gguf_bytes, write_checkpoint

TENSORS = {"w": ("BF16", (4, 4))}
SHA = "0123456789012345678901234567890123456789"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of the Hub with one model, and no network."""
    constants = pytest.importorskip("huggingface_hub.constants")
    cache = tmp_path / "hub"
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    model = cache / "models--org--Tiny-1.5"
    write_checkpoint(model / "snapshots" / SHA, TENSORS)
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text(SHA)
    return cache


def test_a_name_resolves_to_the_snapshot_of_the_cache(cache: Path) -> None:
    snapshot = cache / "models--org--Tiny-1.5" / "snapshots" / SHA
    assert resolve("org/Tiny-1.5") == snapshot
    assert resolve(f"org/Tiny-1.5@{SHA}") == snapshot
    assert resolve(cache / "models--org--Tiny-1.5") == snapshot
    assert resolve(snapshot) == find(snapshot) == snapshot


def test_a_path_that_exists_is_taken_first(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_checkpoint(tmp_path / "org" / "Tiny-1.5", TENSORS)
    assert resolve("org/Tiny-1.5") == Path("org/Tiny-1.5")


def test_what_is_not_in_the_cache_is_refused_with_what_to_type(cache: Path) -> None:
    with pytest.raises(ShardMissing, match="type `hf download org/other`"):
        resolve("org/other")
    assert find("org/other") is None


def test_without_the_library_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *args: Any) -> Any:
        if name == "huggingface_hub":
            raise ImportError(name)
        return real(name, *args)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(BackendMissing, match=r"hotswap\[hub\]"):
        resolve("org/name")


async def test_a_model_of_the_hub_is_imported_by_name_and_served_when_the_cache_is_gone(
    cache: Path, tmp_path: Path
) -> None:
    model = Model("org/tiny", "org/Tiny-1.5", layout="checkpoint")
    async with NvmeStore(tmp_path / "root") as store:
        await store.import_model(model)
        (cache / "models--org--Tiny-1.5").rename(tmp_path / "gone")
        await store.import_model(model)
        assert (await store.manifest(ModelId("org/tiny"))).layout == "checkpoint"
    assert [path.name for path in (tmp_path / "root").iterdir()] == ["org~2Ftiny"]


async def test_a_gguf_file_of_a_repository_is_named_after_a_colon(cache: Path, tmp_path: Path) -> None:
    """In a cache as the Hub's library writes it: the file is a link to a blob."""
    blob = cache / "models--org--Tiny-1.5" / "blobs" / "b"
    blob.parent.mkdir()
    blob.write_bytes(gguf_bytes())
    snapshot = cache / "models--org--Tiny-1.5" / "snapshots" / SHA
    (snapshot / "tiny-Q4_K.gguf").symlink_to(blob)
    source = "org/Tiny-1.5:tiny-Q4_K.gguf"
    assert resolve(source) == resolve(f"org/Tiny-1.5@{SHA}:tiny-Q4_K.gguf") == snapshot / "tiny-Q4_K.gguf"
    assert name_of(source) == "tiny-Q4_K"
    async with NvmeStore(tmp_path / "root") as store:
        await store.import_model(Model("tiny", source))
        assert (await store.manifest(ModelId("tiny"))).is_gguf
    with pytest.raises(ShardMissing, match=r"hf download org/Tiny-1.5 other\.gguf"):
        resolve("org/Tiny-1.5:other.gguf")


def test_the_command_takes_names_of_the_hub(
    cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["store", "add", "org/Tiny-1.5", str(tmp_path / "root"), "--layout", "checkpoint"]) == 0
    assert capsys.readouterr().out.startswith("Tiny-1.5: ")
    assert main(["store", "add", "org/none", str(tmp_path / "root")]) == 2
    assert "hf download org/none" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("source", "name"),
    [("org/Tiny@v1", "Tiny"), ("/x/models--org--A--B", "A--B"), ("/x/y.gguf", "y"), ("/x/y", "y")],
)
def test_a_model_is_called_after_its_source(source: str, name: str) -> None:
    assert name_of(source) == name
