"""The facts of GGUF files, read from their headers; the format is described in ggml's `docs/gguf.md`.

A header comes from a stranger: every count and length is bounded before memory is taken for it.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from io import BufferedReader
from pathlib import Path
from typing import Final, TypeAlias

from hotswap.errors import ConfigError, ShardCorrupt, ShardMissing

__all__ = ["BLOCKS", "GgufFacts", "gguf_files", "parts_of", "read_gguf"]

_MAGIC: Final = b"GGUF"
_VERSIONS: Final = (2, 3)
_MOST_PAIRS: Final = 65_536
_MOST_TENSORS: Final = 1_000_000
_MOST_ITEMS: Final = 4_000_000  # of an array, such as a vocabulary
_MOST_TEXT_BYTES: Final = 16 << 20
_MOST_DEPTH: Final = 4  # of arrays in arrays
_MOST_DIMENSIONS: Final = 8
# The values and bytes of a block, by ggml's numbers of its kinds of tensors.
BLOCKS: Final = {
    **{0: (1, 4), 1: (1, 2), 24: (1, 1), 25: (1, 2), 26: (1, 4), 27: (1, 8), 28: (1, 8), 30: (1, 2)},
    **{2: (32, 18), 3: (32, 20), 6: (32, 22), 7: (32, 24), 8: (32, 34), 9: (32, 36), 39: (32, 17)},
    **{10: (256, 84), 11: (256, 110), 12: (256, 144), 13: (256, 176), 14: (256, 210), 15: (256, 292)},
    **{
        16: (256, 66),
        17: (256, 74),
        18: (256, 98),
        19: (256, 50),
        20: (32, 18),
        21: (256, 110),
        22: (256, 82),
    },
    **{23: (256, 136), 29: (256, 56), 34: (256, 54), 35: (256, 66), 40: (64, 36), 41: (128, 18)},
}
_FORMATS: Final = {
    0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d",
}  # fmt: skip
_TEXT, _ARRAY = 8, 9
_PART = re.compile(r"(?P<stem>.+)-\d{5}-of-(?P<count>\d{5})(?P<suffix>\.\w+)")
_FETCH_AGAIN = "Fetch it again."

_Value: TypeAlias = "int | float | bool | str | _Items"


@dataclass(frozen=True, slots=True)
class _Items:
    """An array: how many items it has, and those of them that are whole numbers, up to a few hundred."""

    count: int
    numbers: tuple[int, ...] = ()


_MOST_KEPT: Final = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufFacts:
    """What the header of a model's first file tells.

    Attributes:
        architecture: llama.cpp's name of it, for instance `"llama"`.
        max_context_tokens: The context it was trained with; `None` if the header does not tell.
        eos_token_ids: Tokens that end an answer.
        vocabulary: How many token ids it has; `None` if the header does not tell.
        kv_bytes_per_token: Keys and values of a token in all layers, in 16 bits; 0 if that is not known.
        chat_template: Its template for chats; empty without one.
    """

    architecture: str
    max_context_tokens: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    vocabulary: int | None = None
    kv_bytes_per_token: int = 0
    chat_template: str = ""


def gguf_files(source: Path) -> tuple[Path, ...]:
    """Return the GGUF files of the model at `source`, in order: a file, or a directory with one model.

    Of a model in parts, any part names it. Empty if there is none, or safetensors beside them.

    Raises:
        ConfigError: a directory has the files of several models.
        ShardMissing: a part is missing.
    """
    if source.is_file():
        return parts_of(source) if source.suffix.lower() == ".gguf" else ()
    found = source.glob("*.[gG][gG][uU][fF]")
    files = sorted(path for path in found if path.is_file() and not path.name.startswith("mmproj"))
    if not files or any(source.glob("*.safetensors")):
        return ()
    parts = parts_of(files[0])
    if others := [path.name for path in files if path not in parts]:
        raise ConfigError(
            f"{str(source)!r} has several GGUF models, {parts[0].name!r} and {others[0]!r} among them; give "
            "the path of one file."
        )
    return parts


def parts_of(path: Path) -> tuple[Path, ...]:
    """Return the files of the model that has this one, by their names: itself, if it is not cut in parts.

    Raises:
        ShardMissing: a part is missing.
    """
    if (found := _PART.fullmatch(path.name)) is None:
        return (path,)
    stem, count, suffix = found["stem"], found["count"], found["suffix"]
    names = [f"{stem}-{number:05d}-of-{count}{suffix}" for number in range(1, int(count) + 1)]
    missing = [name for name in names if not (path.parent / name).is_file()]
    if missing:
        raise ShardMissing(
            f"{str(path.parent / missing[0])!r} is missing, a part of its model. {_FETCH_AGAIN}"
        )
    return tuple(path.parent / name for name in names)


def read_gguf(files: Sequence[Path]) -> GgufFacts:
    """Read the headers of a model's files. Blocking.

    Raises:
        ShardCorrupt: a file is no GGUF file, is truncated, or its header cannot be used.
    """
    headers = [_read(path) for path in files]
    values = headers[0]
    architecture = values.get("general.architecture")
    if not isinstance(architecture, str) or not architecture:
        raise _wrong(files[0], "it names no architecture")
    tokens = values.get("tokenizer.ggml.tokens")
    vocabulary = _whole(values, f"{architecture}.vocab_size")
    return GgufFacts(
        architecture=architecture,
        max_context_tokens=_whole(values, f"{architecture}.context_length"),
        eos_token_ids=_ends(values),
        vocabulary=tokens.count if isinstance(tokens, _Items) and tokens.count else vocabulary,
        kv_bytes_per_token=_kv_bytes(values, architecture),
        chat_template=_text(values, "tokenizer.chat_template"),
    )


def _ends(values: dict[str, _Value]) -> tuple[int, ...]:
    names = (f"tokenizer.ggml.{kind}_token_id" for kind in ("eos", "eot", "eom"))
    found = (_whole(values, name, least=0) for name in names)
    return tuple(dict.fromkeys(token for token in found if token is not None))


def _kv_bytes(values: dict[str, _Value], architecture: str) -> int:
    layers, heads, width = (
        _whole(values, f"{architecture}.{name}")
        for name in ("block_count", "attention.head_count", "embedding_length")
    )
    if f"{architecture}.attention.kv_lora_rank" in values or not (layers and heads and width):
        return 0
    key = _whole(values, f"{architecture}.attention.key_length") or width // heads
    value = _whole(values, f"{architecture}.attention.value_length") or width // heads
    per_layer = values.get(f"{architecture}.attention.head_count_kv")
    if isinstance(per_layer, _Items):  # a number for each layer
        return 2 * sum(per_layer.numbers) * (key + value)
    kv_heads = _whole(values, f"{architecture}.attention.head_count_kv") or heads
    return 2 * layers * kv_heads * (key + value)


def _whole(values: dict[str, _Value], name: str, least: int = 1) -> int | None:
    value = values.get(name)
    return value if type(value) is int and least <= value < 2**31 else None


def _text(values: dict[str, _Value], name: str) -> str:
    value = values.get(name)
    return value if isinstance(value, str) else ""


# -------------------------------------------------------------------------------------------------- reading


def _read(path: Path) -> dict[str, _Value]:
    """The pairs of a header, which tensor descriptions follow."""
    with path.open("rb") as file:
        if file.read(4) != _MAGIC:
            raise _wrong(path, "it does not begin as GGUF files do")
        return _Reader(path, file).pairs()


@dataclass(slots=True)
class _Reader:
    """Reads the values of one header; whatever leads out of the file or its bounds is refused."""

    path: Path
    file: BufferedReader
    size_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        self.size_bytes = self.path.stat().st_size

    def pairs(self) -> dict[str, _Value]:
        version = self.number("<I")
        if version not in _VERSIONS:
            raise _wrong(self.path, f"it is of version {version} of the format, or of a big-endian machine")
        num_tensors, num_pairs = self.number("<Q"), self.number("<Q")
        if num_tensors > _MOST_TENSORS or num_pairs > _MOST_PAIRS:
            raise _wrong(self.path, f"it claims {num_tensors} tensors and {num_pairs} fields")
        values: dict[str, _Value] = {}
        for _ in range(num_pairs):
            name = self.text()
            values[name] = self.value(int(self.number("<I")), 0)
        self._check_tensors(int(num_tensors), values)
        return values

    def value(self, kind: int, depth: int) -> _Value:
        if kind == _TEXT:
            return self.text()
        if kind == _ARRAY:
            return self.items(depth + 1)
        if kind not in _FORMATS:
            raise _wrong(self.path, f"it has a field of the unknown type {kind}")
        return self.number(_FORMATS[kind])

    def items(self, depth: int) -> _Items:
        kind, count = int(self.number("<I")), int(self.number("<Q"))
        if depth > _MOST_DEPTH or count > _MOST_ITEMS:
            raise _wrong(self.path, f"it has an array of {count} items, {depth} deep")
        if kind == _TEXT:
            for _ in range(count):
                self.skip(self._length())
            return _Items(count)
        if kind in _FORMATS:
            form = _FORMATS[kind]
            data = self.bytes(count * struct.calcsize(form))
            kept = (item for (item,) in struct.iter_unpack(form, data[: _MOST_KEPT * struct.calcsize(form)]))
            return _Items(count, tuple(item for item in kept if type(item) is int))
        for _ in range(count):
            self.value(kind, depth)
        return _Items(count)

    def number(self, form: str) -> int:
        value: int = struct.unpack(form, self.bytes(struct.calcsize(form)))[0]
        return value

    def text(self) -> str:
        return self.bytes(self._length()).decode(errors="replace")

    def bytes(self, count: int) -> bytes:
        data = self.file.read(count)
        if len(data) != count:
            raise _wrong(self.path, "it is truncated")
        return data

    def skip(self, count: int) -> None:
        self.bytes(count)

    def _length(self) -> int:
        length = int(self.number("<Q"))
        if length > min(_MOST_TEXT_BYTES, self.size_bytes):
            raise _wrong(self.path, f"it has a text of {length} bytes")
        return length

    def _check_tensors(self, count: int, values: dict[str, _Value]) -> None:
        """Check that the tensors lie within the file."""
        end = 0
        for _ in range(count):
            self.text()
            dimensions = int(self.number("<I"))
            if dimensions > _MOST_DIMENSIONS:
                raise _wrong(self.path, f"it has a tensor of {dimensions} dimensions")
            num_values = math.prod(int(self.number("<Q")) for _ in range(dimensions))
            kind, start = int(self.number("<I")), int(self.number("<Q"))
            block, block_bytes = BLOCKS.get(kind, (1, 0))  # of a kind that is not known, where it begins
            end = max(end, start + -(-num_values // block) * block_bytes)
        unit = _whole(values, "general.alignment") or 32
        if -(-self.file.tell() // unit) * unit + end > self.size_bytes:
            raise _wrong(self.path, "it is truncated")


def _wrong(path: Path, why: str) -> ShardCorrupt:
    return ShardCorrupt(f"{str(path)!r} cannot be used: {why}. {_FETCH_AGAIN}")
