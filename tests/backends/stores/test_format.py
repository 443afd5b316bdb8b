"""The format on disk, compared with the files in `golden`, which must stay readable."""

from __future__ import annotations

import json
import re
import struct
import zlib
from pathlib import Path
from typing import Any

from hotswap import ModelId
from hotswap.abc import Manifest, TensorSpec
from hotswap.backends.stores.index import parse_index
from hotswap.backends.stores.layout import INDEX_NAME
from hotswap.backends.stores.writer import write_model
from hotswap.commands.store import verify

GOLDEN = Path(__file__).parent / "golden"
DOCUMENT = Path(__file__).parents[3] / "docs" / "format.md"
M = ModelId("tiny")


def make_manifest() -> Manifest:
    """Two ranks: a tie, an fp8 tensor of other shapes on each, that goes across files, and a scalar."""
    tensors: list[TensorSpec] = []
    for rank, rows in enumerate((2, 1)):
        places: list[tuple[str, str, tuple[int, ...], int, int]] = [
            ("embed.weight", "bfloat16", (2, 4), 0, 16),
            ("layer.weight", "float8_e4m3fn", (rows, 2048), 256, rows * 2048),
            ("layer.scale", "float32", (), 256 + rows * 2048, 4),
            ("head.weight", "bfloat16", (2, 4), 0, 16),
        ]
        tensors += [
            TensorSpec(name=name, dtype=dtype, shape=shape, offset_bytes=offset, size_bytes=size, rank=rank)
            for name, dtype, shape, offset, size in places
        ]
    return Manifest(
        model=M,
        shards=(),
        buffer_bytes=4356,
        tensors=tuple(tensors),
        world_size=2,
        architecture="TinyForCausalLM",
        config='{"model_type": "tiny"}',
        eos_token_ids=(2,),
        max_context_tokens=64,
        kv_bytes_per_token=32,
    )


def make_buffer(rank: int) -> bytes:
    """A rank's buffer: values from 1 to 251 where there are tensors, zeros between them."""
    buffer = bytearray(4356)
    for tensor in make_manifest().tensors_of(rank):
        for at in range(tensor.offset_bytes, tensor.offset_bytes + tensor.size_bytes):
            buffer[at] = (at * 7 + rank) % 251 + 1
    return bytes(buffer)


def write(root: Path) -> Manifest:
    ranks = [[memoryview(make_buffer(rank))] for rank in range(2)]
    return write_model(root, make_manifest(), ranks, max_file_bytes=4096)


def test_a_fresh_write_gives_the_golden_bytes(tmp_path: Path) -> None:
    write(tmp_path)
    fresh = {path.name: path.read_bytes() for path in (tmp_path / M).iterdir()}
    golden = {path.name: path.read_bytes() for path in (GOLDEN / M).iterdir()}
    assert fresh == golden, "the format has changed: raise its version, and keep reading this one"


def test_the_golden_index_is_read_as_it_was_meant(tmp_path: Path) -> None:
    path = GOLDEN / M / INDEX_NAME
    assert parse_index(path.read_bytes(), path=path, model=M) == write(tmp_path) == verify(GOLDEN, M)


def test_an_index_may_be_written_in_any_form_of_json(tmp_path: Path) -> None:
    """Ours is canonical and is checked without writing it again; other forms are valid too."""
    path = GOLDEN / M / INDEX_NAME
    index: dict[str, Any] = json.loads(path.read_bytes())
    reordered = {name: index[name] for name in ("manifest", "version", "format", "checksum")}
    for text in (json.dumps(index, indent=1), json.dumps(reordered), f" {path.read_text()}\n"):
        assert parse_index(text.encode(), path=path, model=M) == write(tmp_path / str(len(text)))


def test_a_reader_written_from_the_document_alone_finds_every_byte() -> None:
    directory = GOLDEN / "tiny"
    index: dict[str, Any] = json.loads((directory / "index.json").read_bytes())
    body = index["manifest"]
    text = json.dumps(body, sort_keys=True, separators=(",", ":")).encode()
    assert (index["format"], index["version"]) == ("hotswap-weights", 2)
    assert index["checksum"] == f"crc32:{zlib.crc32(text):08x}"
    for rank in range(body["world_size"]):
        buffer = bytearray(body["buffer_bytes"])
        for shard in body["shards"]:
            if shard["rank"] == rank:
                data = (directory / shard["file"]).read_bytes()
                data = data[shard["file_offset_bytes"] :][: shard["size_bytes"]]
                assert shard["checksum"] == f"crc32:{zlib.crc32(data):08x}"
                buffer[shard["buffer_offset_bytes"] : shard["buffer_offset_bytes"] + len(data)] = data
        assert bytes(buffer) == make_buffer(rank).ljust(8192, b"\0")
        for tensor in body["tensors"]:
            if tensor["rank"] == rank:
                data = buffer[tensor["offset_bytes"] : tensor["offset_bytes"] + tensor["size_bytes"]]
                assert tensor["checksum"] == f"crc32:{zlib.crc32(data):08x}"
    scale = next(t for t in body["tensors"] if t["name"] == "layer.scale" and t["rank"] == 1)
    (value,) = struct.unpack_from("<f", buffer, scale["offset_bytes"])
    assert value == struct.unpack("<f", make_buffer(1)[2304:2308])[0]


def test_the_documents_dumps_are_those_of_the_golden_files() -> None:
    text = DOCUMENT.read_text()
    dumps = re.findall(r"\$ xxd (\S+)\n((?:[0-9a-f]{8}: .*\n|\*\n)+)", text)
    assert dumps
    for name, lines in dumps:
        content = (GOLDEN / M / name).read_bytes()
        for at, row in re.findall(r"([0-9a-f]{8}): ((?:[0-9a-f]{4} ){8})", lines):
            assert content[int(at, 16) :][:16] == bytes.fromhex(row.replace(" ", "")), (name, at)
    quoted = re.search(r"```json\n(.*?)```", text, re.DOTALL)
    assert quoted
    golden: dict[str, Any] = json.loads((GOLDEN / M / INDEX_NAME).read_bytes())
    assert json.loads(quoted[1]) == {
        **golden,
        "manifest": {
            **golden["manifest"],
            "tensors": golden["manifest"]["tensors"][:2],
            "shards": golden["manifest"]["shards"][:1],
        },
    }
