"""The facts of a Hugging Face model directory, read without running any of its code or a tensor library."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, cast

from hotswap.backends.fields import Fields, parse_object
from hotswap.backends.stores.gguf import gguf_files, parts_of
from hotswap.backends.stores.layout import INDEX_NAME, item_bits
from hotswap.backends.stores.text_files import read_text_files
from hotswap.errors import ShardCorrupt, ShardMissing, StoreError, UnsafeFile

__all__ = [
    "FETCH_AGAIN",
    "MOST_HEADER_BYTES",
    "Checkpoint",
    "StoredTensor",
    "check_no_pickles",
    "has_checkpoint",
    "not_finite",
    "read_checkpoint",
    "read_header",
    "read_tensors",
    "reading_source",
    "weight_files",
]

_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl", "*.pickle")
MOST_HEADER_BYTES: Final = 100_000_000  # the format's own limit
FETCH_AGAIN: Final = "Fetch the checkpoint again."
_WHOLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_LFS_POINTER: Final = b"version https://git-lfs"

# The names of torch, where it has the dtype.
_DTYPES: Final = {
    "BOOL": "bool",
    **{
        f"{kind}{bits}": f"{word}{bits}"
        for kind, word in (("I", "int"), ("U", "uint"))
        for bits in (8, 16, 32, 64)
    },
    **{f"F{bits}": f"float{bits}" for bits in (16, 32, 64)},
    "BF16": "bfloat16",
    "C64": "complex64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2": "float8_e5m2",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
    "F6_E2M3": "float6_e2m3fn",
    "F6_E3M2": "float6_e3m2fn",
    "F4": "float4_e2m1fn_x2",
}
_PAIRS: Final = "F4"  # its shapes count single values, those of torch pairs of them


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """A tensor in a safetensors file: its bytes are `size_bytes` from `offset_bytes` on of the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    path: Path
    offset_bytes: int
    size_bytes: int


@contextmanager
def reading_source(source: Path) -> Generator[None]:
    """Turn an `OSError` of reading a checkpoint into a `StoreError` that names the file."""
    try:
        yield
    except OSError as exc:
        raise StoreError(
            f"The checkpoint at {str(source)!r} cannot be read: {exc.strerror or exc}, of "
            f"{str(exc.filename or source)!r}. Check its permissions, and its disk."
        ) from exc


def not_finite(name: str, where: Path | str, what: str, place: Sequence[int], dtype: str) -> ShardCorrupt:
    """Return the error for a tensor that is `what` at a place, `"NaN"` or `"infinite"`."""
    return ShardCorrupt(
        f"Tensor {name!r} of {str(where)!r} is {what} at {list(place)} in {dtype}, so the model could not "
        "answer. Fetch the checkpoint again, or one that is whole in that dtype."
    )


def read_tensors(source: Path) -> list[StoredTensor]:
    """Return the tensors of a checkpoint, in the order of their bytes. Blocking.

    A tensor that several files have is the one of the file that the weight index says.

    Raises:
        ShardMissing: there are none, or a file has not a tensor that the index says it has.
        ShardCorrupt: a file is truncated or no safetensors file, has a dtype that is not known, or a tensor
            that lies outside it or on another; or two files have a tensor of one name, without an index.
        UnsafeFile: as `read_checkpoint`.
    """
    files, placed = weight_files(source), _placed(source)
    found = [
        tensor
        for path in files
        for tensor in read_header(path)
        if placed.get(tensor.name, path.name) == path.name
    ]
    names: dict[str, Path] = {}
    for tensor in found:
        if tensor.name in names:
            raise ShardCorrupt(
                f"{str(tensor.path)!r} and {names[tensor.name].name!r} both have the tensor {tensor.name!r}, "
                f"and no index says which counts. {FETCH_AGAIN}"
            )
        names[tensor.name] = tensor.path
    if lacking := next((name for name in placed if name not in names), None):
        raise ShardMissing(
            f"{str(source / placed[lacking])!r} has no tensor {lacking[:200]!r}, which the weight index says "
            f"it has. {FETCH_AGAIN} Or, if the model needs none, take its line out of {_INDEX!r}."
        )
    if not found:
        raise ShardMissing(f"There is no checkpoint at {str(source)!r}: its files have no tensors.")
    return found


def read_header(path: Path) -> list[StoredTensor]:
    """Return the tensors of one file; raises as `read_tensors`."""
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(len(_LFS_POINTER))
        if start == _LFS_POINTER:
            raise ShardCorrupt(
                f"{str(path)!r} is a pointer of Git LFS, not the file itself. Run `git lfs pull` in its "
                "directory."
            )
        length = int.from_bytes(start[:8], "little")
        if not 2 <= length <= min(size - 8, MOST_HEADER_BYTES):
            raise ShardCorrupt(f"{str(path)!r} is no safetensors file, or truncated. {FETCH_AGAIN}")
        file.seek(8)
        header = parse_object(file.read(length), path, remedy=FETCH_AGAIN)
    tensors = sorted(_tensors(header, path, 8 + length), key=lambda tensor: tensor.offset_bytes)
    end = 8 + length
    for tensor in tensors:
        if tensor.offset_bytes < end:
            raise header.wrong(f"the bytes of the tensor {tensor.name!r} are those of another too")
        end = tensor.offset_bytes + tensor.size_bytes
    if size != end:
        raise ShardCorrupt(f"{str(path)!r} has {size} bytes, its header says {end}. {FETCH_AGAIN}")
    return tensors


def _tensors(header: Fields, path: Path, start: int) -> Iterator[StoredTensor]:
    for name in header.raw:
        if name == "__metadata__":
            continue
        entry = header.record(name)
        dtype, shape, offsets = entry.text("dtype"), entry.sizes("shape"), entry.sizes("data_offsets")
        if dtype not in _DTYPES:
            raise header.wrong(f"the tensor {name!r} has the unknown dtype {dtype[:40]!r}")
        if dtype == _PAIRS:
            shape = _in_pairs(header, name, shape)
        size_bytes, odd = divmod(math.prod(shape) * item_bits(_DTYPES[dtype]), 8)
        if odd or len(offsets) != 2 or offsets[1] - offsets[0] != size_bytes:
            raise header.wrong(f"the bytes of the tensor {name!r} are not those of its shape")
        yield StoredTensor(
            name=name,
            dtype=_DTYPES[dtype],
            shape=shape,
            path=path,
            offset_bytes=start + offsets[0],
            size_bytes=size_bytes,
        )


def _in_pairs(header: Fields, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    if not shape or shape[-1] % 2:
        raise header.wrong(f"the tensor {name!r} has an odd number of 4-bit values in a row")
    return (*shape[:-1], shape[-1] // 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """The facts of a checkpoint that engines and policies need, and its small files."""

    config: str
    architecture: str
    eos_token_ids: tuple[int, ...]
    max_context_tokens: int
    side_files: dict[str, bytes]

    def kv_bytes_per_token(self, dtype_bytes: int) -> int:
        """Keys and values of one token in all layers: `2 * layers * kv_heads * head_dim * dtype_bytes`.

        0 where the config does not tell, for instance with compressed keys and values (MLA).
        """
        config = _text_config(json.loads(self.config))
        layers = _first(config, "num_hidden_layers", "n_layer", "n_layers")
        heads = _first(config, "num_attention_heads", "n_head", "n_heads")
        width = _first(config, "hidden_size", "n_embd", "d_model")
        kv_heads = _first(config, "num_key_value_heads") or heads
        head_dim = _first(config, "head_dim") or (width // heads if heads else 0)
        return 0 if "kv_lora_rank" in config else 2 * layers * kv_heads * head_dim * dtype_bytes


def read_checkpoint(source: Path) -> Checkpoint:
    """Read a checkpoint's small files, and check the headers of its weight files.

    Raises:
        ShardMissing: there is no config, or no weights, or a part of them is missing.
        UnsafeFile: it holds pickled weights only, or its index names a file outside the directory.
        ShardCorrupt: a config is not JSON, a weight file is truncated or no safetensors, or a file of text is
            longer than any.
    """
    config = _json(source, "config.json")
    if config is None:
        raise ShardMissing(f"There is no checkpoint at {str(source)!r}: {_why_none(source)}.")
    for file in weight_files(source):
        read_header(file)
    text_config = _text_config(config.raw)
    architectures = config.get("architectures")
    names = cast("list[object]", architectures) if isinstance(architectures, list) else [""]
    architecture = names[0] if names and isinstance(names[0], str) and names[0].isprintable() else ""
    side_files = read_text_files(source)
    generation = _parsed(source / "generation_config.json", side_files.get("generation_config.json"))
    return Checkpoint(
        config=json.dumps(config.raw),
        architecture=architecture,
        # Either file may have an end token that the other lacks, as after a fine-tuning.
        eos_token_ids=tuple(dict.fromkeys((*_eos(generation), *_eos(text_config)))),
        max_context_tokens=_first(text_config, "max_position_embeddings", "n_positions", "n_ctx") or 2**31,
        side_files=side_files,
    )


def has_checkpoint(source: Path) -> bool:
    """Whether there is a checkpoint, whole or not, of either kind. Blocking."""
    return (source / "config.json").is_file() or bool(gguf_files(source))


def _why_none(source: Path) -> str:
    """Why there is no config, as the end of a sentence, with what to do instead."""
    if source.is_file():
        return "it is a file; give the directory that has it, or a GGUF file"
    if (source / INDEX_NAME).is_file():
        return "it is a model of a store; open that store, or give what it was imported from"
    if (source / "adapter_config.json").is_file():
        return "it has an adapter, not a model; register its base model, and the adapter as an `Adapter`"
    if re.match(r"(https?|hf):/", str(source)):
        return "it is a URL; give a path, or the name on the Hugging Face Hub, org/name"
    if not source.exists():
        home = "; '~' is not the home directory here" if str(source).startswith("~") else ""
        return f"there is nothing of this name{home}"
    if gguf_files(source):
        return "it has a GGUF model, which only `layout='checkpoint'` keeps, for engines of llama.cpp"
    return "it has no config.json"


def _json(source: Path, name: str) -> Fields | None:
    path = source / name
    return _parsed(path, path.read_bytes() if path.is_file() else None)


def _parsed(path: Path, text: bytes | None) -> Fields | None:
    return None if text is None else parse_object(text, path, remedy=FETCH_AGAIN)


def _text_config(config: dict[str, object]) -> dict[str, object]:
    """The config of the language model, where a config has several parts."""
    part = config.get("text_config")
    return cast("dict[str, object]", part) if isinstance(part, dict) else config


def _first(config: dict[str, object], *names: str) -> int:
    """The first of the fields that is a whole number over 0, else 0."""
    values = (config.get(name) for name in names)
    return next((value for value in values if type(value) is int and value > 0), 0)


def _eos(config: Fields | dict[str, object] | None) -> tuple[int, ...]:
    value = config.get("eos_token_id") if config is not None else None
    values = cast("list[object]", value) if isinstance(value, list) else [value]
    return tuple(token for token in values if type(token) is int and token >= 0)


def weight_files(source: Path) -> list[Path]:
    """Return the files that a checkpoint's weights are in, which exist; others beside them do not count.

    Raises:
        ShardMissing, UnsafeFile, ShardCorrupt: as `read_checkpoint`.
    """
    if ggufs := gguf_files(source):
        return list(ggufs)
    if (source / _WHOLE).is_file():  # as transformers, whatever else is there
        return [source / _WHOLE]
    if placed := _placed(source):
        return [_part(source, name) for name in sorted(set(placed.values()))]
    files = sorted(source.glob("*.safetensors"))
    if irregular := next((path for path in files if not path.is_file()), None):
        raise ShardMissing(f"{str(irregular)!r} is no file, or a link to nothing. {FETCH_AGAIN}")
    if files:
        return sorted({part for path in files for part in parts_of(path)})
    check_no_pickles(source)
    raise ShardMissing(f"There is no checkpoint at {str(source)!r}: it has no *.safetensors.")


def _placed(source: Path) -> dict[str, str]:
    """The file of each tensor, as the weight index says; empty where there is none that counts."""
    if (source / _WHOLE).is_file() or (index := _json(source, _INDEX)) is None:
        return {}
    return {name: str(file) for name, file in index.record("weight_map").raw.items()}


def check_no_pickles(directory: Path, names: Iterable[str] = _PICKLES) -> None:
    """Raise `UnsafeFile` if a directory without safetensors has one of these files, which are pickles."""
    pickles = sorted(path.name for name in names for path in directory.glob(name))
    if pickles:
        raise UnsafeFile(
            f"{str(directory / pickles[0])!r} is a pickle, which can run code when read, and there are "
            "no safetensors. Get the weights as safetensors, or convert them where you trust them."
        )


def _part(source: Path, name: str) -> Path:
    if name != os.path.basename(name) or not name.endswith(".safetensors"):
        raise UnsafeFile(
            f"The weight index in {str(source)!r} names {name[:200]!r}, which is no safetensors file of that "
            "directory. Do not use this checkpoint."
        )
    if not (source / name).is_file():
        raise ShardMissing(f"{str(source / name)!r} is missing, the weight index names it. {FETCH_AGAIN}")
    return source / name
