"""How a model lies on disk: an index, and aligned data files that hold each rank's flat buffer.

    <root>/<model>/index.json              format and version, config, tensors, shards, a checksum over it all
    <root>/<model>/rank-0-of-1.000.bin     the first bytes of rank 0's buffer; a multiple of 4096 long
    <root>/<model>/rank-0-of-1.001.bin     the next, where the buffer is longer than one file may be
    <root>/<model>/tokenizer.json ...      copied as they were

A reader needs the index alone to place every byte, so a model is read in large aligned pieces without
looking at single tensors. Nothing that an index says is believed before it was checked: it came from a disk.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import asdict
from itertools import groupby, pairwise
from operator import itemgetter
from pathlib import Path
from typing import Any, Final

from hotswap.backends.stores.crc import crc32
from hotswap.backends.stores.fields import LARGEST, Fields, parse_object
from hotswap.errors import UnsafeFile
from hotswap.model import Manifest, Shard, TensorSpec
from hotswap.request import ModelId

__all__ = [
    "ALIGNMENT_BYTES",
    "DTYPE_BYTES",
    "INDEX_NAME",
    "SIDE_FILES",
    "VERSION",
    "Checksum",
    "align",
    "check_checksum",
    "check_file_name",
    "data_file_name",
    "dump_index",
    "parse_index",
]

FORMAT: Final = "hotswap-weights"
VERSION: Final = 1
INDEX_NAME: Final = "index.json"
SIDE_FILES: Final = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")
ALIGNMENT_BYTES: Final = 4096

DTYPE_BYTES: Final = {
    **dict.fromkeys(("bool", "int8", "uint8", "float4_e2m1fn_x2"), 1),
    **dict.fromkeys((f"float8_{kind}" for kind in ("e4m3fn", "e4m3fnuz", "e5m2", "e5m2fnuz", "e8m0fnu")), 1),
    **dict.fromkeys(("bfloat16", "float16", "int16", "uint16"), 2),
    **dict.fromkeys(("float32", "int32", "uint32"), 4),
    **dict.fromkeys(("complex64", "float64", "int64", "uint64"), 8),
    "complex128": 16,
}

_MOST_DIMENSIONS = 64
_MANIFEST = b'"manifest":'
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,199}")
_CHECKSUM = re.compile(r"crc32:[0-9a-f]{8}")
_TENSOR_FIELDS = itemgetter(
    "name", "dtype", "shape", "offset_bytes", "size_bytes", "stride", "checksum", "rank"
)


class Checksum:
    """A running CRC-32 of the bytes fed so far; `so_far`, its text, goes on where another one was.

    CRC-32 runs at gigabytes a second with the standard library alone (several times faster than BLAKE2 or SHA
    on the processors we measured) and near memory speed with `isal`, releases the interpreter lock, and finds
    what a disk does to bytes: flipped bits, truncation, a file of another model. It is no defence against
    someone who can write the store.
    """

    def __init__(self, so_far: str = "crc32:00000000") -> None:
        self._value = int(so_far.removeprefix("crc32:"), 16)

    def update(self, data: bytes | bytearray | memoryview) -> None:
        """Feed the next bytes."""
        self._value = crc32(data, self._value)

    def __str__(self) -> str:
        return f"crc32:{self._value:08x}"


def align(size: int, alignment: int = ALIGNMENT_BYTES) -> int:
    """Return `size` rounded up to a multiple of `alignment`."""
    return -(-size // alignment) * alignment


def data_file_name(rank: int, world_size: int, part: int) -> str:
    """Return the name of a rank's `part`-th data file."""
    return f"rank-{rank}-of-{world_size}.{part:03d}.bin"


def check_file_name(name: str, where: Path | str) -> None:
    """Refuse a name that could lead out of the model's directory, or to a hidden file in it.

    Raises:
        UnsafeFile: it is anything but letters, digits, `.`, `_` and `-`, not beginning with a dot.
    """
    if not _PLAIN_NAME.fullmatch(name):
        raise UnsafeFile(
            f"{str(where)!r} names the file {name[:200]!r}, which is not a plain name in its directory. "
            "Do not use this directory; convert the model again with `hotswap store add --replace`."
        )


# ------------------------------------------------------------------------------------------------- writing


def dump_index(manifest: Manifest) -> bytes:
    """Return the text of `index.json` for a manifest."""
    body = asdict(manifest)
    del body["model"]  # the directory's name says it, so that a directory may be renamed
    for shard in body["shards"]:
        del shard["model"]
    summed = _summed_form(body)
    head = _summed_form({"format": FORMAT, "version": VERSION, "checksum": _checksum_of(summed)})
    return head[:-1] + b"," + _MANIFEST + summed + b"}"


def _summed_form(body: object) -> bytes:
    """The text of a JSON value that its checksum is over, however it is written elsewhere."""
    return json.dumps(body, sort_keys=True, separators=(",", ":")).encode()


def _checksum_of(text: bytes | memoryview) -> str:
    return f"crc32:{crc32(text, 0):08x}"


# ------------------------------------------------------------------------------------------------- reading


def parse_index(text: bytes, *, path: Path | str, model: ModelId) -> Manifest:
    """Return the manifest that an index describes, every statement of it checked.

    Checked are types and ranges, that tensors of known dtypes lie within the buffer without overlapping
    (tied names share one place), that the shards of each rank tile its buffer, and the index's own checksum.
    Whether the data files are there and long enough is for the reader to see.

    Raises:
        ShardCorrupt: the text is not an index of this version, or contradicts itself.
        UnsafeFile: a file name could lead out of the directory.
    """
    index = parse_object(text, path)
    if index.text("format") != FORMAT:
        raise index.wrong(f"its format is not {FORMAT!r}")
    if (version := index.size("version")) != VERSION:
        raise index.wrong(f"its version is {version}, this release reads version {VERSION}")
    body = index.record("manifest")
    manifest = _manifest(body, path, model)
    if not _is_sound(text, index.text("checksum"), body.raw):
        raise index.wrong("its checksum does not match")
    return manifest


def _is_sound(text: bytes, checksum: str, body: object) -> bool:
    """Whether the checksum is that of the manifest, which we write last and in the form that is summed."""
    start = text.find(_MANIFEST)
    if start >= 0 and checksum == _checksum_of(memoryview(text)[start + len(_MANIFEST) : -1]):
        return True
    return checksum == _checksum_of(_summed_form(body))


def _manifest(body: Fields, path: Path | str, model: ModelId) -> Manifest:
    manifest = Manifest(
        model=model,
        shards=tuple(_shard(entry, path, model) for entry in body.records("shards")),
        buffer_bytes=body.size("buffer_bytes"),
        tensors=tuple(_usual_tensor(entry.raw) or _tensor(entry) for entry in body.records("tensors")),
        world_size=body.size("world_size", least=1),
        alignment_bytes=body.size("alignment_bytes", least=512),
        architecture=body.text("architecture"),
        config=body.text("config"),
        eos_token_ids=body.sizes("eos_token_ids"),
        max_context_tokens=body.size("max_context_tokens", least=1),
        kv_bytes_per_token=body.size("kv_bytes_per_token"),
        quantization=body.text("quantization"),
        unquantized_dtype=body.text("unquantized_dtype"),
    )
    for check in (_check_tensors, _check_alignment, _check_tiling, _check_files):
        if complaint := check(manifest):
            raise body.wrong(complaint)
    return manifest


def _usual_tensor(raw: dict[str, Any]) -> TensorSpec | None:
    """What nearly every tensor is, sound and row-major, read in a fraction of the time; `None` for `_tensor`.

    Accepts nothing that `_tensor` would not, and leaves the rest, and every error, to it.
    """
    try:
        name, dtype, shape, offset, size, stride, checksum, rank = _TENSOR_FIELDS(raw)
        item_bytes = DTYPE_BYTES[dtype]
    except (KeyError, TypeError):
        return None
    # `type`, because a bool is an int to `isinstance`.
    if not (
        type(name) is type(checksum) is str
        and type(shape) is type(stride) is list
        and type(offset) is type(size) is type(rank) is int
        and len(shape) == len(stride) <= _MOST_DIMENSIONS
    ):
        return None
    count = 1
    for length, step in zip(reversed(shape), reversed(stride), strict=True):
        if type(length) is not int or type(step) is not int or step != count or length < 1:
            return None
        count *= length
    if not (count * item_bytes == size < LARGEST and 0 <= offset < LARGEST and 0 <= rank < LARGEST):
        return None
    if offset % item_bytes or not _CHECKSUM.fullmatch(checksum):
        return None
    return TensorSpec(
        name=name,
        dtype=dtype,
        shape=tuple(shape),
        offset_bytes=offset,
        size_bytes=size,
        stride=tuple(stride),
        checksum=checksum,
        rank=rank,
    )


def _tensor(entry: Fields) -> TensorSpec:
    tensor = TensorSpec(
        name=entry.text("name"),
        dtype=entry.text("dtype"),
        shape=entry.sizes("shape"),
        offset_bytes=entry.size("offset_bytes"),
        size_bytes=entry.size("size_bytes"),
        stride=entry.sizes("stride"),
        checksum=entry.text("checksum"),
        rank=entry.size("rank"),
    )
    item_bytes = DTYPE_BYTES.get(tensor.dtype)
    if item_bytes is None:
        raise entry.wrong(f"tensor {tensor.name!r} has the unknown dtype {tensor.dtype!r}")
    if len(tensor.shape) > _MOST_DIMENSIONS or tensor.size_bytes != math.prod(tensor.shape) * item_bytes:
        raise entry.wrong(f"the size of tensor {tensor.name!r} is not that of its shape")
    if tensor.offset_bytes % item_bytes:
        raise entry.wrong(f"tensor {tensor.name!r} does not begin on a multiple of its item size")
    if not _strides_stay_inside(tensor):
        raise entry.wrong(f"the stride of tensor {tensor.name!r} leads out of it")
    check_checksum(entry, tensor.checksum)
    return tensor


def _strides_stay_inside(tensor: TensorSpec) -> bool:
    """Whether every element that shape and stride name is one of the tensor's own."""
    if len(tensor.stride) != len(tensor.shape):
        return False
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride, strict=True))
    return not tensor.size_bytes or last < math.prod(tensor.shape)


def check_checksum(entry: Fields, checksum: str) -> None:
    """Raise `ShardCorrupt` unless the text is a checksum as `Checksum` writes it."""
    if not _CHECKSUM.fullmatch(checksum):
        raise entry.wrong(f"the checksum {checksum[:40]!r} is of no known kind")


def _shard(entry: Fields, path: Path | str, model: ModelId) -> Shard:
    shard = Shard(
        model=model,
        rank=entry.size("rank"),
        file=entry.text("file"),
        file_offset_bytes=entry.size("file_offset_bytes"),
        buffer_offset_bytes=entry.size("buffer_offset_bytes"),
        size_bytes=entry.size("size_bytes", least=1),
        checksum=entry.text("checksum"),
    )
    check_file_name(shard.file, path)
    check_checksum(entry, shard.checksum)
    return shard


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
    filled = [tensor for tensor in tensors if tensor.size_bytes]
    places = sorted({(tensor.offset_bytes, tensor.size_bytes) for tensor in filled})
    if places and sum(places[-1]) > buffer_bytes:
        return "a tensor lies outside the buffer"
    if any(start + size > other for (start, size), (other, _) in pairwise(places)):
        return "two tensors overlap"
    if len({(tensor.offset_bytes, tensor.checksum) for tensor in filled}) != len(places):
        return "two names of one tensor have different checksums"
    return None


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
