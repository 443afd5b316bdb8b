"""The index of a model, written and parsed with full validation, and the indexes of all models under a root.

An index comes from a disk and is not trusted. pydantic parses the text straight into the dataclasses that
engines use, and checks the types; the relations between the numbers are checked here.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import stat
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from hashlib import blake2b
from itertools import groupby, pairwise
from operator import mul
from pathlib import Path
from typing import Annotated, Final

from pydantic import BaseModel, FailFast, Field, ValidationError

from hotswap.backends.crc import crc32
from hotswap.backends.fields import LARGEST, Fields, parse_object
from hotswap.backends.stores.files import BlockFile, check_no_link, map_read_errors, read_head, read_small
from hotswap.backends.stores.layout import (
    INDEX_NAME,
    check_file_name,
    is_checksum,
    item_bits,
    model_directory,
    model_in,
)
from hotswap.errors import ShardMissing, StoreError
from hotswap.model import Layout, Manifest, Shard, TensorSpec
from hotswap.request import ModelId

__all__ = ["VERSION", "Indexes", "dump_index", "load_index", "models_in", "parse_index"]

_log = logging.getLogger("hotswap.stores")
_HEAD_BYTES = 32 << 10
_SHARDS = re.compile(rb'"shards":(\[[^]]*\])')
FORMAT: Final = "hotswap-weights"
VERSION: Final = 2

_MOST_DIMENSIONS = 64
_MANIFEST = b'"manifest":'

_Whole = Annotated[int, Field(ge=0, lt=LARGEST)]
_Positive = Annotated[int, Field(ge=1, lt=LARGEST)]


class _ShardFields(BaseModel):
    rank: _Whole
    file: str
    file_offset_bytes: _Whole
    buffer_offset_bytes: _Whole
    size_bytes: _Positive
    checksum: str


class _ManifestFields(BaseModel):
    # Without the model id: that is the directory's name, and a directory may be renamed.
    shards: Annotated[tuple[_ShardFields, ...], FailFast()]
    buffer_bytes: _Whole
    tensors: Annotated[tuple[TensorSpec, ...], FailFast()]  # `_wrong_with` has the bounds
    world_size: _Positive
    alignment_bytes: Annotated[int, Field(ge=512, lt=LARGEST)]
    architecture: str
    config: str
    eos_token_ids: Annotated[tuple[_Whole, ...], FailFast()]
    max_context_tokens: _Positive
    kv_bytes_per_token: _Whole
    quantization: str
    unquantized_dtype: str
    layout: Layout


class _IndexFields(BaseModel):
    format: str
    version: int
    checksum: str
    manifest: _ManifestFields


# ------------------------------------------------------------------------------------------------- writing


def dump_index(manifest: Manifest) -> bytes:
    """Return the text of `index.json` for a manifest."""
    body = asdict(manifest)
    del body["model"]
    for shard in body["shards"]:
        del shard["model"]
    summed = _canonical(body)
    head = _canonical({"format": FORMAT, "version": VERSION, "checksum": _checksum_of(summed)})
    return head[:-1] + b"," + _MANIFEST + summed + b"}"


def _canonical(body: object) -> bytes:
    """The canonical text of a JSON value, which its checksum covers."""
    return json.dumps(body, sort_keys=True, separators=(",", ":")).encode()


def _checksum_of(text: bytes | memoryview) -> str:
    return f"crc32:{crc32(text, 0):08x}"


# ------------------------------------------------------------------------------------------------- reading


def parse_index(text: bytes, *, path: Path | str, model: ModelId) -> Manifest:
    """Return the manifest that an index describes, fully validated.

    Checked are types and ranges, that tensors of known dtypes lie within the buffer without overlapping
    (tied names share one place), that the shards of each rank tile its buffer, and the index's own checksum.
    The data files are not looked at.

    Raises:
        ShardCorrupt: the text is not an index of this version, or contradicts itself.
        UnsafeFile: a file name could lead out of the directory.
    """
    try:
        index = _IndexFields.model_validate_json(text, strict=True)
    except ValidationError as exc:
        fields = parse_object(text, path)
        _check_version(fields)
        raise fields.wrong(_first_complaint(exc)) from None
    if index.format != FORMAT or index.version != VERSION:
        _check_version(parse_object(text, path))
    manifest = _manifest(index.manifest, path, model)
    for complaint in _complaints(manifest):
        raise Fields({}, path).wrong(complaint)
    if not _checksum_matches(text, index.checksum, path):
        raise Fields({}, path).wrong("its checksum does not match")
    return manifest


def _check_version(index: Fields) -> None:
    if index.text("format") != FORMAT:
        raise index.wrong(f"its format is not {FORMAT!r}")
    if (version := index.size("version")) != VERSION:
        raise index.wrong(f"its version is {version}, this release reads version {VERSION}")


def _first_complaint(exc: ValidationError) -> str:
    error = exc.errors(include_url=False, include_context=False, include_input=False)[0]
    return f"the field {'.'.join(map(str, error['loc']))!r} is wrong ({error['msg']})"


def _checksum_matches(text: bytes, checksum: str, path: Path | str) -> bool:
    """Whether the checksum matches the manifest; ours comes last in the text, and in canonical form."""
    start = text.find(_MANIFEST)
    if start >= 0 and checksum == _checksum_of(memoryview(text)[start + len(_MANIFEST) : -1]):
        return True
    return checksum == _checksum_of(_canonical(parse_object(text, path).record("manifest").raw))


def _manifest(fields: _ManifestFields, path: Path | str, model: ModelId) -> Manifest:
    for shard in fields.shards:
        check_file_name(shard.file, path)
    shards = tuple(Shard(model=model, **dict(shard)) for shard in fields.shards)
    rest = {name: value for name, value in fields if name != "shards"}
    return Manifest(model=model, shards=shards, **rest)


# ------------------------------------------------------------------------------------------------ checking


def _complaints(manifest: Manifest) -> Iterator[str]:
    """The contradictions of a manifest, as ends of sentences."""
    # Models repeat a few layouts: each is checked once, which saves most of the work.
    layouts: dict[tuple[str, tuple[int, ...], tuple[int, ...]], tuple[int, int]] = {}
    for tensor in manifest.tensors:
        layout = tensor.dtype, tensor.shape, tensor.stride
        sizes = layouts.get(layout)
        if sizes is None:
            if complaint := _wrong_with_layout(*layout):
                yield f"tensor {tensor.name!r} {complaint}"
                return
            bits = item_bits(tensor.dtype)
            # Elements of less than a whole number of bytes are packed, and begin anywhere.
            item_bytes = 1 if bits % 8 else bits // 8
            sizes = layouts[layout] = item_bytes, -(-math.prod(tensor.shape) * bits // 8)
        if complaint := _wrong_with(tensor, *sizes):
            yield complaint
    for check in (
        _check_layout,
        _check_checksums,
        _check_tensors,
        _check_alignment,
        _check_tiling,
        _check_files,
    ):
        if complaint := check(manifest):
            yield complaint


def _check_layout(manifest: Manifest) -> str | None:
    if manifest.layout == "checkpoint" and (manifest.world_size != 1 or manifest.quantization):
        return "a checkpoint as it is can be neither cut for ranks nor quantized by hotswap"
    return None


def _wrong_with_layout(dtype: str, shape: tuple[int, ...], stride: tuple[int, ...]) -> str | None:
    if not item_bits(dtype):
        return f"has the unknown dtype {dtype!r}"
    if len(shape) > _MOST_DIMENSIONS or min(shape, default=0) < 0:
        return "has a shape that no tensor has"
    # The element that lies last must be one of the tensor's own.
    count = math.prod(shape)
    last = sum(map(mul, shape, stride)) - sum(stride)
    if len(stride) != len(shape) or min(stride, default=0) < 0 or (count and last >= count):
        return "has a stride that leads out of it"
    return None


def _wrong_with(tensor: TensorSpec, item_bytes: int, size_bytes: int) -> str | None:
    if tensor.size_bytes != size_bytes or size_bytes >= LARGEST:
        return f"the size of tensor {tensor.name!r} is not that of its shape"
    if not 0 <= tensor.offset_bytes < LARGEST or tensor.offset_bytes % item_bytes:
        return f"tensor {tensor.name!r} does not begin on a multiple of its item size"
    if not is_checksum(tensor.checksum):
        return f"the checksum {tensor.checksum[:40]!r} is of no known kind"
    if tensor.rank < 0:
        return f"tensor {tensor.name!r} is of rank {tensor.rank}"
    return None


def _check_checksums(manifest: Manifest) -> str | None:
    unknown = (shard.checksum for shard in manifest.shards if not is_checksum(shard.checksum))
    return next((f"the checksum {checksum[:40]!r} is of no known kind" for checksum in unknown), None)


def _check_tensors(manifest: Manifest) -> str | None:
    by_rank: dict[int, list[TensorSpec]] = {}
    for tensor in manifest.tensors:
        by_rank.setdefault(tensor.rank, []).append(tensor)
    if by_rank and max(by_rank) >= manifest.world_size:
        return f"a tensor belongs to rank {max(by_rank)}, and world_size is {manifest.world_size}"
    complaints = (_check_places(tensors, manifest.buffer_bytes) for tensors in by_rank.values())
    return next(filter(None, complaints), None)


def _check_places(tensors: Sequence[TensorSpec], buffer_bytes: int) -> str | None:
    if len({tensor.name for tensor in tensors}) != len(tensors):
        return "it names a tensor twice"
    # An empty tensor takes no room, so it may lie anywhere; tied tensors are one place with several names.
    places: dict[int, tuple[int, str]] = {}
    for tensor in tensors:
        if size_bytes := tensor.size_bytes:
            place = size_bytes, tensor.checksum
            size_bytes, checksum = places.setdefault(tensor.offset_bytes, place)
            if size_bytes != tensor.size_bytes:
                return "two tensors overlap"
            if checksum != tensor.checksum:
                return "two names of one tensor have different checksums"
    end = 0
    for start in sorted(places):
        if start < end:
            return "two tensors overlap"
        end = start + places[start][0]
    return "a tensor lies outside the buffer" if end > buffer_bytes else None


def _check_alignment(manifest: Manifest) -> str | None:
    unit = manifest.alignment_bytes
    if unit & (unit - 1):
        return f"its alignment of {unit} bytes is not a power of two"
    for shard in manifest.shards:
        if (shard.file_offset_bytes | shard.buffer_offset_bytes | shard.size_bytes) % unit:
            return f"a shard in {shard.file!r} is not aligned to {unit} bytes"
    return None


def _check_tiling(manifest: Manifest) -> str | None:
    shards = sorted(manifest.shards, key=lambda shard: (shard.rank, shard.buffer_offset_bytes))
    ranks = 0
    for rank, group in groupby(shards, key=lambda shard: shard.rank):
        ranks, end = ranks + 1, 0
        for shard in group:
            if shard.buffer_offset_bytes != end:
                return f"the shards of rank {rank} leave a gap or overlap at byte {end} of the buffer"
            end += shard.size_bytes
        if rank >= manifest.world_size or end != manifest.buffer_bytes:
            return f"the shards of rank {rank} hold {end} bytes, which is not what its buffer is"
    if ranks != (manifest.world_size if manifest.buffer_bytes else 0):
        return f"it has shards for {ranks} ranks, and world_size is {manifest.world_size}"
    return None


def _check_files(manifest: Manifest) -> str | None:
    shards = sorted(manifest.shards, key=lambda shard: (shard.file, shard.file_offset_bytes))
    for file, group in groupby(shards, key=lambda shard: shard.file):
        for one, other in pairwise(group):
            if one.file_offset_bytes + one.size_bytes > other.file_offset_bytes:
                return f"two shards overlap in {file!r}"
    return None


def models_in(root: Path) -> dict[ModelId, int]:
    """Return the usable models under `root`, and the bytes of their data files; others are logged. Blocking.

    It costs a tenth of a millisecond for each model: only the place of its shards is read, at the head of its
    index, and the lengths of its files. The tensors are checked when the model is asked for.
    """
    found: dict[ModelId, int] = {}
    for name in sorted(_names(root)):
        model = model_in(name)
        if model is None or name.startswith(".") or not os.path.lexists(root / name / INDEX_NAME):
            continue
        size_bytes = _glance(root / name)
        try:
            found[model] = load_index(root, model).weight_bytes if size_bytes is None else size_bytes
        except StoreError as exc:
            _log.warning("Model %r is not used: %s", model, exc)
    return found


def _names(root: Path) -> list[str]:
    with map_read_errors(root), suppress(FileNotFoundError):
        return os.listdir(root)
    return []


def _glance(directory: Path) -> int | None:
    """The bytes of a model whose index looks like ours, and whose files are there; `None` to look closely."""
    with suppress(OSError, StoreError, ValueError):
        check_no_link(directory)
        head, end = read_head(directory / INDEX_NAME, _HEAD_BYTES)
        shards = _SHARDS.search(head)
        if shards is None or end != b"}}":
            return None
        total_bytes = 0
        for shard in Fields({"shards": json.loads(shards[1])}, directory).records("shards"):
            size_bytes, file = shard.size("size_bytes"), shard.text("file")
            check_file_name(file, directory)
            status, end_bytes = os.lstat(directory / file), shard.size("file_offset_bytes") + size_bytes
            if not stat.S_ISREG(status.st_mode) or status.st_size < end_bytes:
                return None
            total_bytes += size_bytes
        return total_bytes
    return None


def load_index(root: Path, model: ModelId) -> Manifest:
    """Read a model's index, and check that its files exist and are long enough. Blocking.

    Raises:
        ShardMissing: there is no such model, or a file of it is missing.
        ShardCorrupt: the index cannot be used, or a file is truncated.
        UnsafeFile: a name leads out of the directory, or a file is a link.
    """
    return Indexes(root).load(model)


class Indexes:
    """A cache of the parsed indexes under a root, keyed by their bytes.

    Parsing ten thousand tensors takes a tenth of a second. The bytes are read each time, and the files
    checked. May be used from any thread.

    Args:
        root: The directory of the models.
        most_tensors: The most tensors that the cached manifests may have together.
    """

    def __init__(self, root: Path, *, most_tensors: int = 50_000) -> None:
        self._root = root
        self._most_tensors = most_tensors
        self._known: OrderedDict[ModelId, tuple[bytes, Manifest]] = OrderedDict()
        self._lock = threading.Lock()

    def load(self, model: ModelId) -> Manifest:
        """Return the manifest of a model; see `load_index`."""
        directory = model_directory(self._root, model)
        check_no_link(directory)
        if not directory.is_dir():
            raise ShardMissing(
                f"The store at {str(self._root)!r} holds no model {model!r}. "
                "Add it with `hotswap store add`, or register it with its source."
            )
        manifest = self._parse(directory / INDEX_NAME, model)
        for shard in manifest.shards:
            file = BlockFile(directory / shard.file, direct=False)
            try:
                file.open()
                file.check_size(shard.file_offset_bytes + shard.size_bytes)
            finally:
                file.close()
        return manifest

    def _parse(self, path: Path, model: ModelId) -> Manifest:
        text = read_small(path)
        digest = blake2b(text).digest()
        with self._lock:
            known = self._known.get(model)
        if known is not None and known[0] == digest:
            return known[1]
        manifest = parse_index(text, path=path, model=model)
        with self._lock:
            self._known[model] = digest, manifest
            self._known.move_to_end(model)
            self._shrink()
        return manifest

    def _shrink(self) -> None:
        """Evict the models that were parsed longest ago, down to `most_tensors`."""
        num_tensors = sum(len(manifest.tensors) for _, manifest in self._known.values())
        while num_tensors > self._most_tensors:
            _, (_, manifest) = self._known.popitem(last=False)
            num_tensors -= len(manifest.tensors)
