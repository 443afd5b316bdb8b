"""Importing a checkpoint as it is: its tensors, or its GGUF files, are copied byte for byte.

Neither torch nor transformers is needed. The data files are those of every model in a store: aligned, with a
checksum, read by the same readers. Floating-point tensors are looked through for NaN as their bytes pass.
"""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, cast

from hotswap.backends.stores.checkpoint import (
    FETCH_AGAIN,
    Checkpoint,
    StoredTensor,
    not_finite,
    read_checkpoint,
    read_tensors,
    reading_source,
)
from hotswap.backends.stores.gguf import gguf_files, read_gguf
from hotswap.backends.stores.layout import ALIGNMENT_BYTES, align
from hotswap.backends.stores.text_files import read_checkpoint_files, read_text_files
from hotswap.backends.stores.writer import RankWriter
from hotswap.errors import ShardCorrupt, ShardMissing
from hotswap.model import Manifest, TensorSpec
from hotswap.request import ModelId

__all__ = ["AsIs", "plan_as_is"]

_TENSOR_ALIGNMENT: Final = 256  # that of CUDA allocations, as in the other layout
_PIECE_BYTES: Final = 8 << 20
# Without which a quantised module cannot be computed; scales of activations may be missing.
_QUANTISED_PARTS: Final = frozenset(
    (
        *("weight", "weight_packed", "weight_scale", "weight_scale_2", "weight_scale_inv", "weight_shape"),
        *("weight_zero_point", "qweight", "qzeros", "scales", "g_idx", "SCB"),
    )
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """Bytes of a file of the checkpoint, and their place in the buffer; a tensor's, but for GGUF files."""

    path: Path
    offset_bytes: int
    size_bytes: int
    buffer_offset_bytes: int
    tensor: StoredTensor | None = None

    def pieces(self, start: int, buffer: bytearray) -> Iterator[memoryview]:
        """Read the bytes from `start` on, which fill the buffer again and again. Blocking.

        Raises:
            ShardCorrupt: the file has become shorter, or the tensor has numbers that no weights are.
            StoreError: it cannot be read.
        """
        piece = memoryview(buffer)
        with reading_source(self.path), self.path.open("rb") as file:
            file.seek(self.offset_bytes + start)
            for at in range(start, self.size_bytes, len(piece)):
                count = file.readinto(piece[: self.size_bytes - at])
                if count < min(len(piece), self.size_bytes - at):
                    raise ShardCorrupt(f"{str(self.path)!r} is truncated. {FETCH_AGAIN}")
                if self.tensor is not None:
                    _check_finite(self.tensor, at, buffer, count)
                yield piece[:count]


@dataclass(frozen=True, slots=True, kw_only=True)
class AsIs:
    """The plan of a copy.

    `files` are the names and sizes of the data files where each is a file of the checkpoint.
    """

    manifest: Manifest
    extents: tuple[Extent, ...]
    side_files: dict[str, bytes]
    files: tuple[tuple[str, int], ...] = ()

    def copy(self, writer: RankWriter) -> None:
        """Fill the buffer; bytes that an earlier writer has finished are not read again. Blocking.

        Raises:
            ShardCorrupt: a file has become shorter since the plan was made, or a weight is not finite.
            StoreError: a file cannot be read.
        """
        buffer = bytearray(_PIECE_BYTES)
        for extent in self.extents:
            done = min(max(0, writer.finished_bytes - extent.buffer_offset_bytes), extent.size_bytes)
            if extent.size_bytes and done == extent.size_bytes:
                continue
            writer.skip_to(extent.buffer_offset_bytes + done)
            for piece in extent.pieces(done, buffer):
                writer.write(piece)


def plan_as_is(model: ModelId, source: Path) -> AsIs:
    """Return the plan of a copy of the checkpoint at `source`, a directory or a GGUF file. Blocking.

    Raises:
        ShardMissing, ShardCorrupt, UnsafeFile: as `read_checkpoint`, also where tensors overlap, or where a
            quantised module lacks a tensor.
        ConfigError: a directory has several GGUF models.
    """
    if files := gguf_files(source):
        return _plan_gguf(model, source if source.is_dir() else source.parent, files)
    return _plan_tensors(model, source, read_checkpoint(source))


def _plan_tensors(model: ModelId, source: Path, checkpoint: Checkpoint) -> AsIs:
    specs: list[TensorSpec] = []
    extents: list[Extent] = []
    end = 0
    tensors = read_tensors(source)
    _check_quantised_modules(source, tensors)
    for tensor in tensors:
        specs.append(
            TensorSpec(
                name=tensor.name,
                dtype=tensor.dtype,
                shape=tensor.shape,
                offset_bytes=end,
                size_bytes=tensor.size_bytes,
            )
        )
        extents.append(
            Extent(
                path=tensor.path,
                offset_bytes=tensor.offset_bytes,
                size_bytes=tensor.size_bytes,
                buffer_offset_bytes=end,
                tensor=tensor,
            )
        )
        end = align(end + tensor.size_bytes, _TENSOR_ALIGNMENT)
    manifest = Manifest(
        model=model,
        shards=(),
        buffer_bytes=end,
        tensors=tuple(specs),
        architecture=checkpoint.architecture,
        config=checkpoint.config,
        eos_token_ids=checkpoint.eos_token_ids,
        max_context_tokens=checkpoint.max_context_tokens,
        kv_bytes_per_token=checkpoint.kv_bytes_per_token(_kv_item_bytes(checkpoint.config)),
        layout="checkpoint",
    )
    side_files = {**checkpoint.side_files, **read_checkpoint_files(source)}
    return AsIs(manifest=manifest, extents=tuple(extents), side_files=side_files)


def _check_quantised_modules(source: Path, tensors: Sequence[StoredTensor]) -> None:
    """Refuse a quantised module without a tensor that the same module of another layer has.

    An engine that joins modules, as vLLM does, would not notice, and compute with what lies in memory.

    Raises:
        ShardMissing: naming the tensor.
    """
    modules: dict[str, set[tuple[str, str]]] = {}
    for tensor in tensors:
        module, _, part = tensor.name.rpartition(".")
        if part in _QUANTISED_PARTS:
            modules.setdefault(module, set()).add((part, tensor.dtype))
    alike: dict[str, list[str]] = {}
    for module in modules:
        alike.setdefault(re.sub(r"\d+", "#", module), []).append(module)
    for names in alike.values():
        fullest = max(names, key=lambda name: len(modules[name]))
        for name in names:
            if modules[name] < modules[fullest]:
                part, _ = min(modules[fullest] - modules[name])
                raise ShardMissing(
                    f"The checkpoint at {str(source)!r} has no tensor '{name}.{part}', though it has "
                    f"'{fullest}.{part}'. {FETCH_AGAIN}"
                )


def _kv_item_bytes(config: str) -> int:
    """The bytes of a number of keys and values, which are computed in the config's dtype."""
    parsed = json.loads(config)
    part = parsed.get("text_config")
    both = (parsed, cast("dict[str, object]", part) if isinstance(part, dict) else {})
    names = (str(one.get(name)) for one in both for name in ("dtype", "torch_dtype"))
    return 4 if any(name.removeprefix("torch.") == "float32" for name in names) else 2


def _plan_gguf(model: ModelId, directory: Path, files: Sequence[Path]) -> AsIs:
    facts = read_gguf(files)
    names = [
        f"model-{number:05d}-of-{len(files):05d}.gguf" if len(files) > 1 else "model.gguf"
        for number in range(1, len(files) + 1)
    ]
    extents: list[Extent] = []
    end = 0
    for path in files:
        size = path.stat().st_size
        extents.append(Extent(path=path, offset_bytes=0, size_bytes=size, buffer_offset_bytes=end))
        end += align(size, ALIGNMENT_BYTES)
    config = {
        "model_type": facts.architecture,
        **({"vocab_size": facts.vocabulary} if facts.vocabulary else {}),
        **({"max_position_embeddings": facts.max_context_tokens} if facts.max_context_tokens else {}),
    }
    side_files = read_text_files(directory)
    if facts.chat_template:
        side_files.setdefault("chat_template.jinja", facts.chat_template.encode())
    manifest = Manifest(
        model=model,
        shards=(),
        buffer_bytes=end,
        architecture=facts.architecture,
        config=json.dumps(config),
        eos_token_ids=facts.eos_token_ids,
        max_context_tokens=facts.max_context_tokens or 2**31,
        kv_bytes_per_token=facts.kv_bytes_per_token,
        layout="checkpoint",
    )
    return AsIs(
        manifest=manifest,
        extents=tuple(extents),
        side_files=side_files,
        files=tuple((name, align(extent.size_bytes)) for name, extent in zip(names, extents, strict=True)),
    )


# -------------------------------------------------------------------------------- numbers that are not finite


@dataclass(frozen=True, slots=True)
class _Floats:
    """The bits that are set in a number that is infinite or NaN, in its last byte and in the one before."""

    item_bytes: int
    last: int
    before: int = 0


_FLOATS: Final = {
    "float64": _Floats(8, 0x7F, 0xF0),
    "float32": _Floats(4, 0x7F, 0x80),
    "bfloat16": _Floats(2, 0x7F, 0x80),
    "float16": _Floats(2, 0x7C),
    "float8_e4m3fn": _Floats(1, 0x7F),
    "float8_e5m2": _Floats(1, 0x7C),
    "float8_e8m0fnu": _Floats(1, 0xFF),
}
_FORMATS: Final = {"float64": "<d", "float32": "<f", "float16": "<e"}


def _check_finite(tensor: StoredTensor, start: int, buffer: bytearray, count: int) -> None:
    """Check the first bytes of a buffer, which are those of a tensor from `start` on; 2 to 5 GB/s.

    NaN is refused everywhere, infinity in matrices called `weight`: masks may have it.

    Raises:
        ShardCorrupt: naming the tensor, and the place of the first such number.
    """
    if (floats := _FLOATS.get(tensor.dtype)) is None:
        return
    size = floats.item_bytes
    last = buffer[size - 1 : count : size]
    for byte in (byte for byte in range(256) if byte & floats.last == floats.last):
        at = last.find(byte)
        while at >= 0:  # of an 8-bit number `before` is 0
            if buffer[at * size + size - 2] & floats.before == floats.before:
                _check_number(tensor, start // size + at, bytes(buffer[at * size : (at + 1) * size]))
            at = last.find(byte, at + 1)


def _check_number(tensor: StoredTensor, index: int, number: bytes) -> None:
    """Raise `ShardCorrupt` if a number that is not finite may not be in its tensor."""
    if tensor.dtype == "bfloat16":
        is_nan = math.isnan(struct.unpack("<f", b"\0\0" + number)[0])
    elif (form := _FORMATS.get(tensor.dtype)) is not None:
        is_nan = math.isnan(struct.unpack(form, number)[0])
    else:
        is_nan = tensor.dtype != "float8_e5m2" or number[0] & 0x03 != 0
    is_matrix = len(tensor.shape) > 1 and tensor.name.endswith("weight")
    if not is_nan and not is_matrix:
        return
    place: list[int] = []
    for length in reversed(tensor.shape):
        index, at = divmod(index, length)
        place.insert(0, at)
    raise not_finite(tensor.name, tensor.path, "NaN" if is_nan else "infinite", place, tensor.dtype)
