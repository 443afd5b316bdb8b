"""Importing a checkpoint as it is: its tensors, or its GGUF files, are copied byte for byte.

Neither torch nor transformers is needed. The data files are those of every model in a store: aligned, with a
checksum, read by the same readers. Floating-point tensors are looked through for NaN as their bytes pass.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
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
# Without which a quantised module cannot be computed; scales of activations may be missing. The zero points
# of compressed-tensors are of asymmetric modules, and may be left over in symmetric ones.
_ZERO_POINT: Final = "weight_zero_point"
_QUANTISED_PARTS: Final = frozenset(
    (
        *("weight", "weight_packed", "weight_scale", "weight_scale_2", "weight_scale_inv", "weight_shape"),
        *("qweight", "qzeros", "scales", "g_idx", "SCB"),
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
    _check_quantised_modules(source, tensors, checkpoint.config)
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


def _check_quantised_modules(source: Path, tensors: Sequence[StoredTensor], config: str) -> None:
    """Refuse a quantised module without a tensor that the same module of another layer has.

    An engine that joins modules, as vLLM does, would not notice, and compute with what lies in memory.
    Of zero points this is known only where the config has all modules asymmetric.

    Raises:
        ShardMissing: naming the tensor.
    """
    zero_points: frozenset[str] = frozenset((_ZERO_POINT,)) if _is_asymmetric(config) else frozenset()
    parts = _QUANTISED_PARTS | zero_points
    modules: dict[str, set[tuple[str, str]]] = {}
    for tensor in tensors:
        module, _, part = tensor.name.rpartition(".")
        if part in parts:
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


def _is_asymmetric(config: str) -> bool:
    """Whether a config quantises every module with zero points, as compressed-tensors tells it."""
    parsed = cast("object", json.loads(config))
    sections = (_entry(parsed, name) for name in ("quantization_config", "compression_config"))
    groups = [_entry(section, "config_groups") for section in sections]
    weights = [
        _entry(group, "weights")
        for each in groups
        if isinstance(each, dict)
        for group in cast("dict[str, object]", each).values()
    ]
    return bool(weights) and all(_entry(each, "symmetric") is False for each in weights)


def _entry(value: object, name: str) -> object:
    """Return an entry of an object of JSON, `None` if there is none or it is no object."""
    return cast("dict[str, object]", value).get(name) if isinstance(value, dict) else None


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
    """The bits of a number that are set where it is infinite or NaN: of its last byte and the one before.

    It is NaN if another bit is set, but for the sign, or if the format has no infinity.
    """

    item_bytes: int
    last: int
    before: int = 0
    has_infinity: bool = True


_FLOATS: Final = {
    "float64": _Floats(8, 0x7F, 0xF0),
    "float32": _Floats(4, 0x7F, 0x80),
    "bfloat16": _Floats(2, 0x7F, 0x80),
    "float16": _Floats(2, 0x7C),
    "float8_e4m3fn": _Floats(1, 0x7F, has_infinity=False),
    "float8_e5m2": _Floats(1, 0x7C),
    "float8_e8m0fnu": _Floats(1, 0xFF, has_infinity=False),
}
_NOT_SIGN: Final = 0x7F


def _check_finite(tensor: StoredTensor, start: int, buffer: bytearray, count: int) -> None:
    """Check the first bytes of a buffer, which are those of a tensor from `start` on; 2 to 5 GB/s.

    NaN is refused everywhere, infinity in matrices called `weight`: masks may have it. What looks alike
    in its last byte, as the least finite number of a mask does, takes some more passes over the bytes.

    Raises:
        ShardCorrupt: naming the tensor, and the place of the first such number.
    """
    if (floats := _FLOATS.get(tensor.dtype)) is None:
        return
    size = floats.item_bytes
    last = buffer[size - 1 : count : size]
    if not any(byte in last for byte in range(256) if byte & floats.last == floats.last):
        return
    found = _marks(last, _all_of(floats.last))
    if floats.before:
        found &= _marks(buffer[size - 2 : count : size], _all_of(floats.before))
    if not found:
        return
    nan = found
    if floats.has_infinity:
        fraction = _marks(last, _any_of(_NOT_SIGN & ~floats.last))
        for at in range(size - 1):
            bits = ~floats.before & 0xFF if at == size - 2 else 0xFF
            fraction |= _marks(buffer[at:count:size], _any_of(bits))
        nan &= fraction
    is_matrix = len(tensor.shape) > 1 and tensor.name.endswith("weight")
    if refused := found if is_matrix else nan:
        first = refused & -refused
        place = _place(tensor.shape, start // size + (first.bit_length() - 1) // 8)
        raise not_finite(tensor.name, tensor.path, "NaN" if first & nan else "infinite", place, tensor.dtype)


def _marks(data: bytearray, table: bytes) -> int:
    """Return the bytes of `data` by a table, as one number with the first byte in its lowest bits."""
    return int.from_bytes(data.translate(table), "little")


@cache
def _all_of(bits: int) -> bytes:
    """A table with 1 for the bytes in which all of some bits are set."""
    return bytes(byte & bits == bits for byte in range(256))


@cache
def _any_of(bits: int) -> bytes:
    """A table with 1 for the bytes in which any of some bits is set."""
    return bytes(byte & bits != 0 for byte in range(256))


def _place(shape: Sequence[int], index: int) -> list[int]:
    """Return the indexes of a number in a tensor, from its index in the flat one."""
    place: list[int] = []
    for length in reversed(shape):
        index, at = divmod(index, length)
        place.insert(0, at)
    return place
