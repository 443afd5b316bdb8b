"""A checkpoint as it is: every tensor and every GGUF file arrives byte for byte, whatever its dtype."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from hotswap import Model, ModelId
from hotswap.abc import Manifest
from hotswap.backends.stores import NvmeStore, PinnedStore, TieredStore
from hotswap.backends.stores.convert import Progress, convert
from hotswap.backends.stores.index import load_index
from hotswap.backends.stores.layout import model_directory
from hotswap.backends.stores.remote import RemoteStore
from hotswap.commands.store import verify
from hotswap.errors import ConfigError, ShardCorrupt, ShardMissing, SourceChanged
from tests.backends.stores.checkpoints import (
    DTYPES,
    FIELDS,
    data_of,
    gguf_bytes,
    size_of,
    write_checkpoint,
    write_safetensors,
)

pytestmark = pytest.mark.anyio
M = ModelId("m")
ALL = {f"t.{dtype.lower()}": (dtype, (3, 8)) for dtype in DTYPES}
SOME = {
    "layer.weight": ("F8_E4M3", (4, 100)),
    "layer.weight_scale_inv": ("F32", (1, 1)),
    "norm": ("BF16", (7,)),
}


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def tensors_in(root: Path, manifest: Manifest) -> dict[str, bytes]:
    """The bytes of every tensor, read from the data files."""
    directory = model_directory(root, manifest.model)
    buffer = b"".join((directory / shard.file).read_bytes() for shard in manifest.shards_of(0))
    return {
        tensor.name: buffer[tensor.offset_bytes : tensor.offset_bytes + tensor.size_bytes]
        for tensor in manifest.tensors
    }


# ------------------------------------------------------------------------------------------- safetensors


def test_tensors_of_every_dtype_keep_their_names_and_bytes(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source", ALL)
    root = tmp_path / "root"
    convert(source, root, model_id=M, layout="checkpoint", max_file_bytes=4096)
    manifest = verify(root, M)
    assert manifest.layout == "checkpoint"
    assert tensors_in(root, manifest) == {name: data_of(name, size_of(*kind)) for name, kind in ALL.items()}
    dtypes = {tensor.name: (tensor.dtype, tensor.shape) for tensor in manifest.tensors}
    assert dtypes["t.f8_e8m0"] == ("float8_e8m0fnu", (3, 8))
    assert dtypes["t.f4"] == ("float4_e2m1fn_x2", (3, 4))
    assert dtypes["t.f6_e2m3"] == ("float6_e2m3fn", (3, 8))


def test_the_facts_and_small_files_of_a_checkpoint_come_along(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source", SOME, quantization_config={"quant_method": "fp8"})
    (source / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "FP8"}}')
    (source / "tokenizer.model").write_bytes(b"\x00\x01")
    (source / "modeling_evil.py").write_text("raise SystemExit")
    manifest = convert(source, tmp_path / "root", model_id=M, layout="checkpoint")
    assert (manifest.architecture, manifest.max_context_tokens, manifest.eos_token_ids) == (
        "LlamaForCausalLM",
        64,
        (2,),
    )
    assert json.loads(manifest.config)["quantization_config"] == {"quant_method": "fp8"}
    files = {path.name for path in model_directory(tmp_path / "root", M).iterdir()}
    assert {"hf_quant_config.json", "tokenizer.model"} <= files
    assert not any(name.endswith(".py") for name in files)


def test_a_checkpoint_is_imported_without_tensor_libraries(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source", SOME)
    code = (
        "import sys\n"
        "from hotswap.backends.stores.convert import convert\n"
        f"convert({str(source)!r}, {str(tmp_path / 'root')!r}, model_id='m', layout='checkpoint')\n"
        "assert not {'torch', 'transformers', 'safetensors', 'numpy'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    assert load_index(tmp_path / "root", M).layout == "checkpoint"


def test_a_killed_import_is_resumed(tmp_path: Path) -> None:
    tensors = {f"t{number}": ("U8", (5000,)) for number in range(8)}
    source = write_checkpoint(tmp_path / "source", tensors)
    root = tmp_path / "root"
    done = 0

    def kill(progress: Progress) -> None:
        if progress.phase == "write" and progress.done_bytes > 20_000:
            raise KeyboardInterrupt

    def note(progress: Progress) -> None:
        nonlocal done
        if progress.phase == "write" and not done:
            done = progress.done_bytes

    arguments = {"model_id": "m", "layout": "checkpoint", "max_file_bytes": 4096}
    with pytest.raises(KeyboardInterrupt):
        convert(source, root, progress=kill, **arguments)  # type: ignore[arg-type]
    convert(source, root, progress=note, **arguments)  # type: ignore[arg-type]
    assert done >= 16_384, "the finished files were written again"
    manifest = verify(root, M)
    assert tensors_in(root, manifest) == {name: data_of(name, 5000) for name in tensors}


@pytest.mark.parametrize("options", [{"dtype": "float16"}, {"quantize": "fp8-e4m3"}, {"world_size": 2}])
def test_options_of_the_other_layout_are_refused(tmp_path: Path, options: dict[str, object]) -> None:
    source = write_checkpoint(tmp_path / "source", SOME)
    with pytest.raises(ConfigError, match="'checkpoint' keeps weights as they are"):
        convert(source, tmp_path / "root", model_id=M, layout="checkpoint", **options)  # type: ignore[arg-type]
    assert not (tmp_path / "root").exists()


@pytest.mark.parametrize(
    ("entry", "why"),
    [
        ({"dtype": "F7", "shape": [1], "data_offsets": [0, 1]}, "unknown dtype 'F7'"),
        ({"dtype": "U8", "shape": [2], "data_offsets": [0, 1]}, "not those of its shape"),
        ({"dtype": "F4", "shape": [1], "data_offsets": [0, 1]}, "odd number of 4-bit values"),
        ({"dtype": "U8", "shape": [1], "data_offsets": [0, 1, 2]}, "not those of its shape"),
        ({"dtype": "U8", "shape": [-1], "data_offsets": [0, 1]}, "not a whole number"),
    ],
)
def test_a_header_that_contradicts_itself_is_refused(tmp_path: Path, entry: object, why: str) -> None:
    source = write_checkpoint(tmp_path / "source", SOME)
    text = json.dumps({"t": entry}).encode()
    (source / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + b"x")
    with pytest.raises(ShardCorrupt, match=why):
        convert(source, tmp_path / "root", model_id=M, layout="checkpoint")


def test_tensors_that_overlap_are_refused(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source", SOME)
    entry = {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}
    text = json.dumps({"a": entry, "b": {**entry, "data_offsets": [3, 7]}}).encode()
    (source / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + bytes(7))
    with pytest.raises(ShardCorrupt, match="'b' are those of another"):
        convert(source, tmp_path / "root", model_id=M, layout="checkpoint")


def test_a_tensor_of_two_files_is_refused_unless_an_index_says_which(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source", SOME)
    (source / "model.safetensors").rename(source / "a.safetensors")
    write_safetensors(source / "b.safetensors", SOME)
    with pytest.raises(ShardCorrupt, match="both have the tensor"):
        convert(source, tmp_path / "root", model_id=M, layout="checkpoint")
    index = {"weight_map": dict.fromkeys(SOME, "b.safetensors")}
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    manifest = convert(source, tmp_path / "root", model_id=M, layout="checkpoint")
    assert {tensor.name for tensor in manifest.tensors} == set(SOME)


@pytest.mark.parametrize("layout", ["checkpoint", "modules"])
def test_a_broken_file_that_does_not_count_refuses_nothing(tmp_path: Path, layout: str) -> None:
    from hotswap.backends.stores.checkpoint import read_checkpoint, weight_files

    source = write_checkpoint(tmp_path / "source", SOME)
    (source / "consolidated.safetensors").write_bytes(b"broken")
    read_checkpoint(source)
    assert [path.name for path in weight_files(source)] == ["model.safetensors"]


# -------------------------------------------------------------------------------------------------- GGUF


@pytest.mark.parametrize("as_file", [True, False])
def test_a_gguf_file_is_kept_whole_with_the_facts_of_its_header(tmp_path: Path, *, as_file: bool) -> None:
    directory = tmp_path / "source"
    directory.mkdir()
    content = gguf_bytes()
    (directory / "tiny.Q4_K.gguf").write_bytes(content)
    source = directory / "tiny.Q4_K.gguf" if as_file else directory
    convert(source, tmp_path / "root", model_id=M)
    manifest = verify(tmp_path / "root", M)
    assert (manifest.layout, manifest.tensors, manifest.architecture) == ("checkpoint", (), "llama")
    assert (manifest.max_context_tokens, manifest.eos_token_ids, manifest.vocabulary) == (128, (2,), 3)
    assert manifest.kv_bytes_per_token == 2 * 2 * 2 * (16 + 16)
    stored = model_directory(tmp_path / "root", M)
    assert (stored / "model.gguf").read_bytes()[: len(content)] == content
    assert (stored / "chat_template.jinja").read_text() == FIELDS["tokenizer.chat_template"]


async def test_the_parts_of_a_gguf_model_are_lent_in_order(tmp_path: Path) -> None:
    directory = tmp_path / "source"
    directory.mkdir()
    parts = [gguf_bytes(size=size) for size in (100, 9000, 5)]
    for number, part in enumerate(parts, 1):
        (directory / f"tiny-{number:05d}-of-00003.gguf").write_bytes(part)
    disk = NvmeStore(tmp_path / "root")
    async with TieredStore(PinnedStore("1 MiB"), disk) as store:
        await store.import_model(Model("m", directory / "tiny-00002-of-00003.gguf"))
        manifest = await store.manifest(M)
        async with store.lend_files(manifest) as paths:
            assert [path.name for path in paths] == [f"model-{n:05d}-of-00003.gguf" for n in (1, 2, 3)]
            assert [path.read_bytes()[: len(part)] for path, part in zip(paths, parts, strict=True)] == parts
        with pytest.raises(ShardMissing, match="Another conversion"):
            async with store.lend_files(replace(manifest, config="{}")):
                pass


async def test_damage_is_found_before_files_are_lent(tmp_path: Path) -> None:
    source = tmp_path / "tiny.gguf"
    source.write_bytes(gguf_bytes())
    convert(source, tmp_path / "root", model_id=M)
    path = model_directory(tmp_path / "root", M) / "model.gguf"
    path.write_bytes(path.read_bytes().replace(b"token_embd", b"tokem_embd"))
    async with NvmeStore(tmp_path / "root") as store:
        with pytest.raises(ShardCorrupt):
            async with store.lend_files(await store.manifest(M)):
                pass


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"GGML" + gguf_bytes()[4:], "does not begin"),
        (gguf_bytes(version=1), "version 1"),
        (gguf_bytes()[:200], "truncated"),
        (gguf_bytes()[:-900], "truncated"),
        (gguf_bytes({"general.name": "x"}), "names no architecture"),
        (b"GGUF" + struct.pack("<IQQ", 3, 1, 2**60), "claims"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 2**60), "a text of"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"a" + struct.pack("<IIQ", 9, 4, 2**50), "an array"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"a" + struct.pack("<I", 99), "unknown type 99"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"a" + struct.pack("<IIQ", 9, 9, 1) * 9, "deep"),
    ],
)
def test_a_gguf_header_that_cannot_be_trusted_is_refused(tmp_path: Path, content: bytes, why: str) -> None:
    source = tmp_path / "tiny.gguf"
    source.write_bytes(content)
    with pytest.raises(ShardCorrupt, match=why):
        convert(source, tmp_path / "root", model_id=M)


def test_a_directory_with_several_gguf_models_asks_for_one(tmp_path: Path) -> None:
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(gguf_bytes())
    with pytest.raises(ConfigError, match=r"several GGUF models, 'a.gguf' and 'b.gguf'"):
        convert(tmp_path, tmp_path / "root", model_id=M)


def test_a_missing_part_is_named(tmp_path: Path) -> None:
    (tmp_path / "a-00001-of-00002.gguf").write_bytes(gguf_bytes())
    with pytest.raises(ShardMissing, match="a-00002-of-00002"):
        convert(tmp_path, tmp_path / "root", model_id=M)


def test_a_gguf_model_is_refused_for_modules_with_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(gguf_bytes())
    with pytest.raises(ShardMissing, match="layout='checkpoint'"):
        convert(tmp_path, tmp_path / "root", model_id=M, layout="modules")


# ------------------------------------------------------------------------------------------------ stores


async def test_a_model_is_imported_once_and_again_when_it_changes(tmp_path: Path) -> None:
    source = tmp_path / "tiny.gguf"
    source.write_bytes(gguf_bytes())
    async with NvmeStore(tmp_path / "root", budget="1 MiB") as store:
        await store.import_model(Model("m", source))
        before = await store.manifest(M)
        await store.import_model(Model("m", source))
        assert await store.manifest(M) == before
        assert store.view().tiers[0].used_bytes == before.weight_bytes
        source.write_bytes(gguf_bytes(size=5000))
        with pytest.raises(SourceChanged, match=r"tiny\.gguf"):
            await store.import_model(Model("m", source))
        await store.import_model(Model("m", source, on_change="convert"))
        assert (await store.manifest(M)).weight_bytes > before.weight_bytes
        source.unlink()
        await store.import_model(Model("m", source))


async def test_another_layout_than_the_stored_one_counts_as_a_change(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source", SOME)
    async with NvmeStore(tmp_path / "root") as store:
        await store.import_model(Model("m", source, layout="checkpoint"))
        await store.import_model(Model("m", source))
        with pytest.raises(SourceChanged, match="'modules' is asked for"):
            await store.import_model(Model("m", source, layout="modules"))


async def test_models_as_they_are_pass_every_tier(tmp_path: Path) -> None:
    """Pushed, fetched, and read from host memory, with their files."""
    convert(write_checkpoint(tmp_path / "source", SOME), tmp_path / "one", model_id=M, layout="checkpoint")
    (tmp_path / "g.gguf").write_bytes(gguf_bytes())
    convert(tmp_path / "g.gguf", tmp_path / "one", model_id="g")
    (tmp_path / "remote").mkdir()
    remote = (tmp_path / "remote").as_uri()
    async with RemoteStore(remote) as store:
        for model in ("m", "g"):
            await store.push(tmp_path / "one" / model)
    disk = NvmeStore(tmp_path / "two")
    async with TieredStore(PinnedStore("1 MiB"), disk, RemoteStore(remote)) as tiers:
        for model in (M, ModelId("g")):
            manifest = await tiers.manifest(model)
            await tiers.prefetch(model)
            async with tiers.lend(manifest) as buffer:
                assert buffer is not None
                lent = bytes(buffer.data)
            async with tiers.lend_files(manifest) as paths:
                assert b"".join(path.read_bytes() for path in paths) == lent
            assert load_index(tmp_path / "one", model) == manifest
