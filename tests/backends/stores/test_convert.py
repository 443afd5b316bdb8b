"""Conversion gives the bytes of the module that will run, or a typed error and no leftovers."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch
from transformers import AutoModelForCausalLM

from hotswap import Model, ModelId
from hotswap.abc import Manifest
from hotswap.backends.stores import NvmeStore, nvme
from hotswap.backends.stores.convert import Progress, convert
from hotswap.errors import ConfigError, ShardCorrupt, ShardMissing, TierFull, UnsafeFile
from hotswap.testing.cancel import cancel_everywhere
from tests.backends.stores.models import read_rank

M = ModelId("tiny")


async def test_the_converted_bytes_are_the_modules_own(tmp_path: Path, checkpoint: Path) -> None:
    module = AutoModelForCausalLM.from_pretrained(checkpoint)
    convert(checkpoint, tmp_path, model_id=M, max_file_bytes=8192)
    async with NvmeStore(tmp_path) as store:
        manifest = await store.manifest(M)
        flat = torch.frombuffer(bytearray(await read_rank(store, manifest)), dtype=torch.uint8)
    state = module.state_dict()
    assert {tensor.name for tensor in manifest.tensors} == set(state)
    for tensor in manifest.tensors:
        piece = flat[tensor.offset_bytes : tensor.offset_bytes + tensor.size_bytes]
        value = piece.view(getattr(torch, tensor.dtype)).view(tensor.shape)
        assert torch.equal(value, state[tensor.name]), tensor.name


def test_tied_weights_are_stored_once(tmp_path: Path, checkpoint: Path) -> None:
    manifest = convert(checkpoint, tmp_path, model_id=M)
    places = {tensor.name: tensor.offset_bytes for tensor in manifest.tensors}
    assert places["lm_head.weight"] == places["model.embed_tokens.weight"]
    own = {(tensor.offset_bytes, tensor.size_bytes) for tensor in manifest.tensors}
    assert manifest.weight_bytes < sum(size for _, size in own) + len(own) * 256 + 4096


def test_the_manifest_says_what_engines_ask(tmp_path: Path, checkpoint: Path) -> None:
    manifest = convert(checkpoint, tmp_path, model_id=M)
    assert manifest.architecture == "LlamaForCausalLM"
    assert manifest.eos_token_ids == (2, 5)
    assert manifest.max_context_tokens == 128
    assert manifest.kv_bytes_per_token == 2 * 2 * 2 * 8 * 4
    assert json.loads(manifest.config)["hidden_size"] == 32


def test_a_dtype_halves_the_bytes(tmp_path: Path, checkpoint: Path) -> None:
    full = convert(checkpoint, tmp_path, model_id="full")
    half = convert(checkpoint, tmp_path, model_id="half", dtype="bfloat16")
    assert {tensor.dtype for tensor in half.tensors} == {"bfloat16"}
    assert half.kv_bytes_per_token * 2 == full.kv_bytes_per_token
    with pytest.raises(ConfigError, match="float33"):
        convert(checkpoint, tmp_path, model_id="none", dtype="float33")


def test_progress_ends_at_the_whole(tmp_path: Path, checkpoint: Path) -> None:
    seen: list[Progress] = []
    manifest = convert(checkpoint, tmp_path, model_id=M, progress=seen.append)
    done = [progress.done_bytes for progress in seen if progress.phase == "write"]
    assert done == sorted(done)
    assert done[-1] == seen[-1].total_bytes == manifest.weight_bytes


def test_pickles_alone_are_refused_by_name(tmp_path: Path, checkpoint: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    shutil.copy(checkpoint / "config.json", source)
    (source / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'true'\ntR.")
    with pytest.raises(UnsafeFile, match=r"pytorch_model\.bin.*safetensors"):
        convert(source, tmp_path / "root", model_id=M)
    assert not (tmp_path / "root").exists()


@pytest.mark.parametrize("cut", [1, 100, -1])
def test_a_damaged_checkpoint_is_refused_by_name(tmp_path: Path, checkpoint: Path, cut: int) -> None:
    source = tmp_path / "source"
    shutil.copytree(checkpoint, source)
    weights = source / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-cut] if cut > 0 else b"not weights at all")
    with pytest.raises(ShardCorrupt, match=r"model\.safetensors"):
        convert(source, tmp_path / "root", model_id=M)


def test_a_weight_index_is_not_believed(tmp_path: Path, checkpoint: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(checkpoint, source)
    (source / "model.safetensors").rename(source / "model-1.safetensors")  # else the index would not count
    index = source / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "../model.safetensors"}}))
    with pytest.raises(UnsafeFile, match=r"\.\./model"):
        convert(source, tmp_path / "root", model_id=M)
    index.write_text(json.dumps({"weight_map": {"a": "model-2.safetensors"}}))
    with pytest.raises(ShardMissing, match="model-2"):
        convert(source, tmp_path / "root", model_id=M)


def test_a_model_is_replaced_only_when_asked(tmp_path: Path, checkpoint: Path) -> None:
    convert(checkpoint, tmp_path, model_id=M)
    with pytest.raises(ConfigError, match="--replace"):
        convert(checkpoint, tmp_path, model_id=M, dtype="bfloat16")
    convert(checkpoint, tmp_path, model_id=M, dtype="bfloat16", replace_existing=True)
    assert [path.name for path in tmp_path.iterdir()] == [M]
    assert "bfloat16" in (tmp_path / M / "index.json").read_text()


async def test_import_makes_a_model_available_once(tmp_path: Path, checkpoint: Path) -> None:
    async with NvmeStore(tmp_path) as store:
        await store.import_model(Model("tiny", checkpoint))
        stamp = (tmp_path / M / "index.json").stat().st_mtime_ns
        await store.import_model(Model("tiny", tmp_path / "gone"))
        assert (tmp_path / M / "index.json").stat().st_mtime_ns == stamp
        assert store.view().tier_of(M) == "nvme"
        tokenizer = await store.tokenizer(M)
        assert tokenizer is not None
        assert tokenizer.decode(tokenizer.encode("hello world")) == "hello world"


async def test_import_without_a_source_says_so(tmp_path: Path) -> None:
    async with NvmeStore(tmp_path) as store:
        with pytest.raises(ShardMissing, match="tiny"):
            await store.import_model(Model("tiny"))
        with pytest.raises(ShardMissing, match="nowhere"):
            await store.import_model(Model("tiny", tmp_path / "nowhere"))


async def test_a_budget_refuses_before_it_writes(tmp_path: Path, checkpoint: Path) -> None:
    async with NvmeStore(tmp_path, budget=4096) as store:
        with pytest.raises(TierFull, match="4096"):
            await store.import_model(Model("tiny", checkpoint))
        assert os.listdir(tmp_path) == []
        assert store.view().tiers[0].used_bytes == 0


async def test_many_imports_convert_once(
    tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    converted: list[str] = []

    def counting(source: Path, root: Path, **options: Any) -> Manifest:
        converted.append(options["model_id"])
        return convert(source, root, **options)

    monkeypatch.setattr(nvme, "convert", counting)
    async with NvmeStore(tmp_path) as store, anyio.create_task_group() as tasks:
        for _ in range(4):
            tasks.start_soon(store.import_model, Model("tiny", checkpoint))
    assert converted == ["tiny"]


async def test_an_import_cancelled_anywhere_leaves_all_or_nothing(tmp_path: Path, checkpoint: Path) -> None:
    async with NvmeStore(tmp_path) as store:

        async def look() -> None:
            left = os.listdir(tmp_path)
            assert left in ([], ["tiny"])
            if left:
                await store.manifest(M)
                shutil.rmtree(tmp_path / M)
                with pytest.raises(ShardMissing):
                    await store.manifest(M)

        assert await cancel_everywhere(lambda: store.import_model(Model("tiny", checkpoint)), look) > 0


async def test_a_model_that_another_process_converted_meanwhile_is_used(
    tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def late(source: Path, root: Path, **options: Any) -> Manifest:
        convert(source, root, model_id=options["model_id"])
        return convert(source, root, **options)

    monkeypatch.setattr(nvme, "convert", late)
    async with NvmeStore(tmp_path) as store:
        await store.import_model(Model("tiny", checkpoint))
        assert store.view().tier_of(M) == "nvme"
