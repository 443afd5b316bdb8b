"""The index reads back as it was written, and every field of it is validated."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotswap import ModelId
from hotswap.abc import Manifest
from hotswap.backends.stores import layout
from hotswap.backends.stores.index import Indexes, dump_index, parse_index
from hotswap.backends.stores.layout import Checksum
from hotswap.errors import ShardCorrupt, ShardMissing, StoreError, UnsafeFile
from tests.backends.stores.models import UNIT, put

PATH = Path("root/m/index.json")
M = ModelId("m")


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    """Two ranks of three files each."""
    return put(tmp_path_factory.mktemp("root"), world_size=2)[0]


def parse(text: bytes) -> Manifest:
    return parse_index(text, path=PATH, model=M)


def signed(index: dict[str, Any]) -> bytes:
    """An index whose own checksum is right, as an attacker would write it."""
    body = json.dumps(index["manifest"], sort_keys=True, separators=(",", ":")).encode()
    checksum = Checksum()
    checksum.update(body)
    return json.dumps({**index, "checksum": str(checksum)}).encode()


def changed(manifest: Manifest, *path: str | int, to: object) -> bytes:
    """The index with one field changed, and signed again."""
    index: dict[str, Any] = json.loads(dump_index(manifest))
    place: Any = index
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = to
    return signed(index)


def test_an_index_reads_back_as_it_was(manifest: Manifest) -> None:
    assert parse(dump_index(manifest)) == manifest


def test_a_directory_may_be_renamed(manifest: Manifest) -> None:
    renamed = parse_index(dump_index(manifest), path=PATH, model=ModelId("new"))
    assert {shard.model for shard in renamed.shards} == {"new"} == {renamed.model}


BAD_NAMES = [
    "../rank-0.bin",
    "/etc/passwd",
    "..",
    ".",
    ".hidden",
    "a/b",
    "a\\b",
    "a\0b",
    "",
    "x" * 300,
    "ä.bin",
]


@pytest.mark.parametrize("name", BAD_NAMES)
def test_a_file_name_that_leads_out_of_the_directory_is_unsafe(manifest: Manifest, name: str) -> None:
    with pytest.raises(UnsafeFile, match=r"index\.json.*hotswap store add"):
        parse(changed(manifest, "manifest", "shards", 0, "file", to=name))


# Each change, and the text of its error.
CONTRADICTIONS: list[tuple[tuple[str | int, ...], object, str]] = [
    (("format",), "safetensors", "format"),
    (("version",), 3, "version is 3"),
    (("version",), True, "version"),
    (("manifest",), [], "manifest"),
    (("manifest", "buffer_bytes"), UNIT, "outside"),
    (("manifest", "buffer_bytes"), -1, "buffer_bytes"),
    (("manifest", "buffer_bytes"), 1e3, "buffer_bytes"),
    (("manifest", "world_size"), 3, "world_size"),
    (("manifest", "world_size"), 1, "rank 1"),
    (("manifest", "world_size"), 2**61, "world_size"),
    (("manifest", "alignment_bytes"), 3000, "power of two"),
    (("manifest", "alignment_bytes"), 1 << 20, "not aligned"),
    (("manifest", "config"), None, "config"),
    (("manifest", "eos_token_ids"), ["2"], "eos_token_ids"),
    (("manifest", "shards"), [], "0 ranks"),
    (("manifest", "shards", 0, "checksum"), "md5:00", "checksum"),
    (("manifest", "shards", 0, "size_bytes"), 0, "size_bytes"),
    (("manifest", "shards", 0, "size_bytes"), UNIT, "gap or overlap"),
    (("manifest", "shards", 0, "buffer_offset_bytes"), UNIT, "gap or overlap"),
    (("manifest", "shards", 0, "file_offset_bytes"), 512, "not aligned"),
    (("manifest", "shards", 0, "rank"), 7, "rank"),
    (("manifest", "shards", 1, "file"), "rank-0-of-2.000.bin", "overlap"),
    (("manifest", "tensors", 0, "dtype"), "object", "dtype"),
    (("manifest", "tensors", 0, "shape"), [7], "shape"),
    (("manifest", "tensors", 0, "shape"), [2**61] * 1000, "shape"),
    (("manifest", "tensors", 0, "offset_bytes"), 2**50, "outside"),
    (("manifest", "tensors", 0, "offset_bytes"), 0, "overlap"),
    (("manifest", "tensors", 1, "offset_bytes"), 2, "multiple"),
    (("manifest", "tensors", 1, "name"), "head", "twice"),
    (("manifest", "tensors", 1, "stride"), [8], "stride"),
    (("manifest", "tensors", 1, "stride"), [8, 2], "stride"),
    (("manifest", "tensors", 1, "stride"), [8, -1], "stride"),
    (("manifest", "tensors", 1, "stride"), [2**61, 1], "stride"),
    (("manifest", "tensors", 1, "checksum"), "", "checksum"),
    (("manifest", "tensors", 1, "checksum"), "crc32:00000000", "different checksums"),
    (("manifest", "tensors", 0, "rank"), 2, "rank 2"),
    (("manifest", "tensors", 0, "rank"), -1, "rank"),
]


@pytest.mark.parametrize(("path", "to", "says"), CONTRADICTIONS)
def test_an_index_that_contradicts_itself_is_refused(
    manifest: Manifest, path: tuple[str | int, ...], to: object, says: str
) -> None:
    with pytest.raises(ShardCorrupt, match=says) as caught:
        parse(changed(manifest, *path, to=to))
    assert str(PATH) in str(caught.value)
    assert "hotswap store add" in str(caught.value)


def test_a_change_that_contradicts_nothing_shows_in_the_checksum(manifest: Manifest) -> None:
    text = dump_index(manifest).replace(b'"eos_token_ids":[2', b'"eos_token_ids":[3')
    assert text != dump_index(manifest)
    with pytest.raises(ShardCorrupt, match="checksum"):
        parse(text)


@given(st.data())
def test_any_damage_is_a_typed_error(manifest: Manifest, data: st.DataObject) -> None:
    text = bytearray(dump_index(manifest))
    for _ in range(data.draw(st.integers(1, 3))):
        start = data.draw(st.integers(0, len(text)))
        text[start : start + data.draw(st.integers(0, 9))] = data.draw(st.binary(max_size=9))
    try:
        parsed = parse(bytes(text))
    except StoreError:
        return
    assert parsed == manifest, "the damage went unnoticed"


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@given(st.data(), json_values)
def test_any_value_in_any_field_is_a_typed_error_or_a_sound_manifest(
    manifest: Manifest, data: st.DataObject, value: object
) -> None:
    index: dict[str, Any] = json.loads(dump_index(manifest))
    path = data.draw(st.sampled_from(list(_paths(index))))
    try:
        parsed = parse(changed(manifest, *path, to=value))
    except StoreError:
        return
    assert {shard.file for shard in parsed.shards} == {shard.file for shard in manifest.shards}
    assert all(tensor.offset_bytes + tensor.size_bytes <= parsed.buffer_bytes for tensor in parsed.tensors)


@given(
    st.data(), st.integers(-2, 70) | st.sampled_from([2**61, 2**62, 10**400, "int8", [1], [4, 2], [-1, -16]])
)
def test_no_tensor_leaves_the_buffer_or_its_own_bytes(
    manifest: Manifest, data: st.DataObject, value: object
) -> None:
    index: dict[str, Any] = json.loads(dump_index(manifest))
    inside = [path for path in _paths(index) if path[:2] == ("manifest", "tensors")]
    try:
        parsed = parse(changed(manifest, *data.draw(st.sampled_from(inside)), to=value))
    except StoreError:
        return
    for tensor in parsed.tensors:
        reached = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride, strict=True))
        count = math.prod(tensor.shape)
        assert min((*tensor.shape, *tensor.stride, tensor.offset_bytes, tensor.rank)) >= 0
        assert tensor.size_bytes == count * layout.DTYPE_BYTES[tensor.dtype]
        assert not count or reached < count


def test_an_index_is_parsed_again_only_when_its_bytes_have_changed(tmp_path: Path) -> None:
    put(tmp_path, M)
    path = tmp_path / M / layout.INDEX_NAME
    text, indexes = path.read_bytes(), Indexes(tmp_path)
    first = indexes.load(M)
    assert indexes.load(M) is first
    path.write_bytes(text.replace(b'"max_context_tokens"', b'"max_context_tokems"'))
    with pytest.raises(ShardCorrupt):
        indexes.load(M)
    path.write_bytes(text)
    assert indexes.load(M) == first
    (tmp_path / first.shards[0].file).unlink(missing_ok=True)
    next((tmp_path / M).glob("*.bin")).unlink()
    with pytest.raises(ShardMissing):
        indexes.load(M)


def test_no_more_indexes_are_kept_than_asked_for(tmp_path: Path) -> None:
    models = [ModelId(name) for name in "abc"]
    num_tensors = [len(put(tmp_path, model)[0].tensors) for model in models]
    indexes = Indexes(tmp_path, most_tensors=sum(num_tensors[:2]))
    a, b, c = (indexes.load(model) for model in models)
    assert indexes.load(models[1]) is b
    assert indexes.load(models[2]) is c
    assert indexes.load(models[0]) is not a


def _paths(value: object, path: tuple[str | int, ...] = ()) -> Any:
    """The path of every value of a JSON document."""
    if path:
        yield path
    steps = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for step, inner in steps:
        yield from _paths(inner, (*path, step))


@pytest.mark.parametrize("text", [b"", b"[]", b"{", b"\xff", b"[" * 100_000, b'{"format": NaN}', b"1" * 5000])
def test_a_text_that_is_no_index_is_refused(text: bytes) -> None:
    with pytest.raises(ShardCorrupt, match=r"index\.json"):
        parse(text)


def test_ranks_may_have_one_name_each(manifest: Manifest) -> None:
    index: dict[str, Any] = json.loads(dump_index(manifest))
    mine = index["manifest"]["tensors"]
    index["manifest"]["tensors"] = [*mine, *({**tensor, "rank": 1} for tensor in mine)]
    parsed = parse(signed(index))
    assert [tensor.name for tensor in parsed.tensors_of(1)] == [tensor["name"] for tensor in mine]
    assert parsed.tensors_of(0) == manifest.tensors


def test_every_dtype_of_torch_that_holds_weights_is_known() -> None:
    import torch

    for name, size in layout.DTYPE_BYTES.items():
        assert getattr(torch, name).itemsize == size
    dtypes = {
        str(value).removeprefix("torch."): value
        for value in vars(torch).values()
        if isinstance(value, torch.dtype)
    }
    # Those of less than a byte have no address, and quantized ones carry their scale outside of the tensor.
    unstorable = re.compile(r"u?int[1-7]|bits\w+|q\w+|complex32")
    assert {name for name in dtypes if not unstorable.fullmatch(name)} == set(layout.DTYPE_BYTES)
