"""A checkpoint that is not the one it was imported from is noticed, and handled as its model says."""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from hotswap import Model, ModelId
from hotswap.backends.stores import NvmeStore, PinnedStore, TieredStore
from hotswap.backends.stores.convert import convert
from hotswap.backends.stores.fingerprint import Fingerprint
from hotswap.backends.stores.layout import SOURCE_NAME
from hotswap.errors import ConfigError, ShardCorrupt, SourceChanged, StoreError
from hotswap.store import WeightStore

M = ModelId("tiny")


@pytest.fixture
def source(tmp_path: Path, checkpoint: Path) -> Path:
    return Path(shutil.copytree(checkpoint, tmp_path / "source"))


@pytest.fixture
def root(tmp_path: Path, source: Path) -> Path:
    """A store that the source was imported into."""
    convert(source, tmp_path / "root", model_id=M)
    return tmp_path / "root"


def change_one_number(source: Path) -> None:
    """One number of one tensor: neither the file's length nor its header changes."""
    weights = load_file(source / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"][3, 5] += 1
    save_file(weights, source / "model.safetensors", metadata={"format": "pt"})


def change_a_shape(source: Path) -> None:
    weights = load_file(source / "model.safetensors")
    save_file({**weights, "another": torch.zeros(1)}, source / "model.safetensors", metadata={"format": "pt"})


def rename_two_tensors(source: Path) -> None:
    """The bytes and their number are the same, what they mean is not; the time is set back."""
    path = source / "model.safetensors"
    before = path.stat()
    text = path.read_bytes()
    one, other = b"layers.0.mlp.up_proj", b"layers.1.mlp.up_proj"
    path.write_bytes(text.replace(one, b"#").replace(other, one).replace(b"#", other))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def end_elsewhere(source: Path) -> None:
    (source / "generation_config.json").write_text(json.dumps({"eos_token_id": 7}))


def another_tokenizer(source: Path) -> None:
    path = source / "tokenizer.json"
    path.write_text(path.read_text().replace("hello", "hullo"))


def another_template(source: Path) -> None:
    (source / "chat_template.jinja").write_text("{{ messages }}")


def a_template_for_tools(source: Path) -> None:
    (source / "additional_chat_templates").mkdir()
    (source / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools }}")


def another_config(source: Path) -> None:
    path = source / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "rope_theta": 5.0}))


def another_file_of_weights(source: Path) -> None:
    (source / "model.safetensors").rename(source / "model-2.safetensors")


CHANGES = [
    change_one_number,
    change_a_shape,
    rename_two_tensors,
    end_elsewhere,
    another_tokenizer,
    another_template,
    a_template_for_tools,
    another_config,
    another_file_of_weights,
]


def touch(source: Path) -> None:
    for path in source.iterdir():
        os.utime(path, ns=(1, 1))


def copy(source: Path) -> None:
    shutil.move(source, source.with_name("before"))
    shutil.copytree(source.with_name("before"), source, copy_function=shutil.copyfile)


def add_a_readme(source: Path) -> None:
    (source / "README.md").write_text("Read me.")


def delete(source: Path) -> None:
    shutil.rmtree(source)


def delete_the_files(source: Path) -> None:
    for path in source.iterdir():
        path.unlink()


def nothing(source: Path) -> None:
    """The second start of a service."""


def stamp(root: Path) -> int:
    """Another one after each conversion."""
    return (root / M / "index.json").stat().st_ino


@pytest.mark.parametrize("change", CHANGES)
async def test_a_changed_checkpoint_is_refused_and_the_error_says_both_remedies(
    change: Callable[[Path], None], source: Path, root: Path
) -> None:
    change(source)
    before = stamp(root)
    async with NvmeStore(root) as store:
        with pytest.raises(SourceChanged, match=r"tiny.*convert.*serve"):
            await store.import_model(Model("tiny", source))
        await store.manifest(M)
    assert stamp(root) == before


@pytest.mark.parametrize("change", [touch, copy, add_a_readme, delete, delete_the_files, nothing])
async def test_a_checkpoint_of_the_same_content_is_not_converted_again(
    change: Callable[[Path], None], source: Path, root: Path
) -> None:
    before = stamp(root)
    change(source)
    async with NvmeStore(root) as store:
        await store.import_model(Model("tiny", source, on_change="convert"))
    assert stamp(root) == before


async def test_a_copy_is_read_once(source: Path, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its times are kept, so later starts compare those."""
    copy(source)
    async with NvmeStore(root) as store:
        await store.import_model(Model("tiny", source))
        monkeypatch.setattr("hotswap.backends.stores.fingerprint._checksum", None)
        await store.import_model(Model("tiny", source))


@pytest.mark.parametrize("change", CHANGES[:1] + CHANGES[3:4])
async def test_a_changed_checkpoint_is_converted_anew_where_the_model_says_so(
    change: Callable[[Path], None], source: Path, root: Path, tmp_path: Path
) -> None:
    change(source)
    async with NvmeStore(root) as store:
        await store.import_model(Model("tiny", source, on_change="convert"))
        now = await store.manifest(M)
        converted = stamp(root)
        await store.import_model(Model("tiny", source))
    assert stamp(root) == converted
    assert now == convert(source, tmp_path / "fresh", model_id=M)


async def test_a_model_is_converted_anew_with_the_options_of_before(source: Path, tmp_path: Path) -> None:
    options = {"dtype": "bfloat16", "world_size": 2, "quantize": "fp8-e4m3"}
    convert(source, tmp_path / "root", model_id=M, dtype="bfloat16", world_size=2, quantize="fp8-e4m3")
    change_one_number(source)
    async with NvmeStore(tmp_path / "root") as store:
        await store.import_model(Model("tiny", source, on_change="convert"))
        now = await store.manifest(M)
    assert (now.unquantized_dtype, now.world_size, now.quantization) == tuple(options.values())


async def test_the_weights_of_before_are_served_with_a_warning_where_the_model_says_so(
    source: Path, root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    change_one_number(source)
    before = stamp(root)
    async with NvmeStore(root) as store:
        await store.import_model(Model("tiny", source, on_change="serve"))
    assert stamp(root) == before
    (record,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert "'tiny'" in record.getMessage()
    assert "model.safetensors" in record.getMessage()


async def test_a_model_imported_before_files_were_recorded_is_compared_by_its_config(
    source: Path, root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (root / M / SOURCE_NAME).unlink()
    change_one_number(source)
    async with NvmeStore(root) as store:
        await store.import_model(Model("tiny", source))
        assert "config alone" in caplog.text
        another_config(source)
        with pytest.raises(SourceChanged, match=r"config\.json"):
            await store.import_model(Model("tiny", source))


async def test_a_checkpoint_that_changes_while_it_is_converted_is_not_imported(
    source: Path, tmp_path: Path
) -> None:
    def write_again(progress: object) -> None:
        if getattr(progress, "phase", "") == "write":
            another_tokenizer(source)

    with pytest.raises(StoreError, match=r"changed while it was imported.*tokenizer\.json"):
        convert(source, tmp_path / "root", model_id=M, progress=write_again)
    assert not (tmp_path / "root" / M).exists()


@pytest.mark.parametrize("kept", ["host", "disk"])
async def test_no_tier_keeps_the_weights_of_before(kept: str, source: Path, root: Path) -> None:
    host = PinnedStore("1 MiB")
    async with TieredStore(host, NvmeStore(root)) as store:
        await store.prefetch(M) if kept == "host" else None
        before = await store.manifest(M)
        change_one_number(source)
        await store.import_model(Model("tiny", source, on_change="convert"))
        assert await store.manifest(M) != before
        assert await read(store) == await read(NvmeStore(root))


async def read(store: WeightStore) -> bytes:
    manifest, data = await store.manifest(M), bytearray()
    for shard in manifest.shards:
        async with store.open(shard) as chunks:
            async for chunk in chunks:
                data += chunk.data
    return bytes(data)


@given(data=st.data())
def test_a_damaged_record_of_a_checkpoint_is_no_record(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory, checkpoint: Path
) -> None:
    text = Fingerprint.of(checkpoint).dump()
    at = data.draw(st.integers(0, len(text) - 1))
    damaged = text[:at] + data.draw(st.sampled_from([b"", b"x", b"0", b"}", b"[", b"null"])) + text[at + 1 :]
    with suppress(ShardCorrupt):
        Fingerprint.parse(damaged, tmp_path_factory.getbasetemp()).difference(checkpoint)


def test_what_a_model_does_on_change_is_one_of_three() -> None:
    with pytest.raises(ConfigError, match=r"on_change.*'ask'"):
        Model("tiny", on_change="ask")  # type: ignore[arg-type]


async def test_an_import_is_logged_once_as_information(
    caplog: pytest.LogCaptureFixture, tmp_path: Path, checkpoint: Path
) -> None:
    caplog.set_level(logging.INFO, "hotswap")
    async with NvmeStore(tmp_path) as store:
        await store.import_model(Model("tiny", checkpoint))
        await store.import_model(Model("tiny", checkpoint))
        size = (await store.manifest(M)).weight_bytes
    (line,) = [r.getMessage() for r in caplog.records if "imported" in r.getMessage()]
    assert "'tiny'" in line
    assert f"{size} bytes" in line
