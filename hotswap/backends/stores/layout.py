"""The layout of a model on disk: an index (`index`), and aligned data files of each rank's flat buffer.

    <root>/<model>/index.json              format and version, config, tensors, shards, a checksum over it all
    <root>/<model>/rank-0-of-1.000.bin     the first bytes of rank 0's buffer; a multiple of 4096 long
    <root>/<model>/rank-0-of-1.001.bin     the next, where the buffer is longer than one file may be
    <root>/<model>/model.gguf              instead, a GGUF file as it is, with zeros up to a multiple of 4096
    <root>/<model>/tokenizer.json ...      copied from the checkpoint (`text_files`)
    <root>/<model>/source.json             what the checkpoint's files were (`fingerprint`)

`<model>` is the model's id, as `hotswap.model_id` writes it. The index alone tells the place of every byte,
so a model is read in large aligned pieces, not tensor by tensor.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from hotswap.backends.crc import crc32
from hotswap.errors import UnsafeFile
from hotswap.model_id import directory_name, model_id_of
from hotswap.request import ModelId

__all__ = [
    "ALIGNMENT_BYTES",
    "CHECKPOINT_FILES",
    "DTYPE_BYTES",
    "INDEX_NAME",
    "MORE_TEMPLATES",
    "SIDE_FILES",
    "SOURCE_NAME",
    "STORED_FILES",
    "Checksum",
    "align",
    "check_file_name",
    "data_file_name",
    "is_checksum",
    "is_data_file",
    "item_bits",
    "model_directory",
    "model_in",
    "model_name",
]

INDEX_NAME: Final = "index.json"
MORE_TEMPLATES: Final = "additional_chat_templates.json"
SIDE_FILES: Final = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "generation_config.json",
    "chat_template.jinja",
    MORE_TEMPLATES,
)
CHECKPOINT_FILES: Final = (  # what engines that read a checkpoint as it is may ask for beside these
    "hf_quant_config.json",
    "quantize_config.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "preprocessor_config.json",
    "processor_config.json",
)
SOURCE_NAME: Final = "source.json"  # what the checkpoint was, see `fingerprint`
# That go along when a model goes to another tier.
STORED_FILES: Final = (*SIDE_FILES, *CHECKPOINT_FILES, SOURCE_NAME)
ALIGNMENT_BYTES: Final = 4096

DTYPE_BYTES: Final = {
    **dict.fromkeys(("bool", "int8", "uint8", "float4_e2m1fn_x2"), 1),
    **dict.fromkeys((f"float8_{kind}" for kind in ("e4m3fn", "e4m3fnuz", "e5m2", "e5m2fnuz", "e8m0fnu")), 1),
    **dict.fromkeys(("bfloat16", "float16", "int16", "uint16"), 2),
    **dict.fromkeys(("float32", "int32", "uint32"), 4),
    **dict.fromkeys(("complex64", "float64", "int64", "uint64"), 8),
    "complex128": 16,
}
_PACKED_BITS: Final = {"float6_e2m3fn": 6, "float6_e3m2fn": 6}  # of safetensors; torch has none of them

_PLAIN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,199}")
_CHECKSUM = re.compile(r"crc32:[0-9a-f]{8}")


class Checksum:
    """A running CRC-32 of the bytes fed so far; `so_far`, the text of another one, continues that.

    CRC-32 runs at gigabytes a second with the standard library alone (several times faster than BLAKE2 or SHA
    on the processors we measured) and near memory speed with `isal`, releases the interpreter lock, and finds
    the damage of disks: flipped bits, truncation, a file of another model. It is no defence against an
    attacker who can write to the store.
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


def item_bits(dtype: str) -> int:
    """Return the bits of one element; 0 of a dtype that is not known."""
    return 8 * DTYPE_BYTES[dtype] if dtype in DTYPE_BYTES else _PACKED_BITS.get(dtype, 0)


def is_data_file(name: str) -> bool:
    """Whether a file of a model's directory has weights, by its name."""
    return name.endswith((".bin", ".gguf"))


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


def model_name(model: ModelId, where: Path | str) -> str:
    """Return the name of a model's directory; see `hotswap.model_id`.

    Raises:
        UnsafeFile: it is no id that a `Model` can have.
    """
    try:
        return directory_name(model)
    except ValueError as exc:
        raise UnsafeFile(
            f"A model in {str(where)!r} cannot be called {str(model)[:200]!r}: that {exc}."
        ) from None


def model_directory(root: Path, model: ModelId) -> Path:
    """Return the directory of a model; raises as `model_name`."""
    return root / model_name(model, root)


def model_in(directory: str) -> ModelId | None:
    """Return the id of the model whose directory has this name; `None` if no model's has."""
    model = model_id_of(directory)
    return None if model is None else ModelId(model)


def is_checksum(text: str) -> bool:
    """Whether the text is a checksum as `Checksum` writes it."""
    return _CHECKSUM.fullmatch(text) is not None
