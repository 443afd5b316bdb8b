"""Small checkpoints of every kind, written byte by byte, without tensor libraries."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

CONFIG = {"architectures": ["LlamaForCausalLM"], "max_position_embeddings": 64, "eos_token_id": 2}

# safetensors' dtypes with the bits of a value.
DTYPES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 16),
    **dict.fromkeys(("I32", "U32", "F32"), 32),
    **dict.fromkeys(("I64", "U64", "F64", "C64"), 64),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    "F4": 4,
}

Tensors = Mapping[str, tuple[str, tuple[int, ...]]]


def data_of(name: str, size: int) -> bytes:
    """Bytes that are other for every name, and finite numbers in every dtype."""
    return bytes((at * 7 + sum(name.encode())) % 113 for at in range(size))


def size_of(dtype: str, shape: Sequence[int]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count * DTYPES[dtype] // 8


def write_safetensors(path: Path, tensors: Tensors) -> None:
    """Write a file with the tensors by name, dtype and shape, without padding between them."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data = b""
    for name, (dtype, shape) in tensors.items():
        part = data_of(name, size_of(dtype, shape))
        header[name] = {
            "dtype": dtype,
            "shape": list(shape),
            "data_offsets": [len(data), len(data) + len(part)],
        }
        data += part
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def write_checkpoint(directory: Path, tensors: Tensors, **config: Any) -> Path:
    """Write a directory of one file."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps({**CONFIG, **config}))
    write_safetensors(directory / "model.safetensors", tensors)
    return directory


# ------------------------------------------------------------------------------------------------- GGUF

_KINDS = {bool: (7, "<?"), int: (4, "<I"), float: (6, "<f")}


def _text(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def _value(value: Any) -> bytes:
    if isinstance(value, str):
        return struct.pack("<I", 8) + _text(value)
    if isinstance(value, list):
        return _list(value)  # pyright: ignore[reportUnknownArgumentType]
    kind, form = _KINDS[type(value)]
    return struct.pack("<I", kind) + struct.pack(form, value)


def _list(values: list[Any]) -> bytes:
    kind = struct.pack("<I", 8) if isinstance(values[0], str) else struct.pack("<I", 4)
    items = (_text(item) if isinstance(item, str) else struct.pack("<I", item) for item in values)
    return struct.pack("<I", 9) + kind + struct.pack("<Q", len(values)) + b"".join(items)


FIELDS: dict[str, Any] = {
    "general.architecture": "llama",
    "llama.context_length": 128,
    "llama.block_count": 2,
    "llama.embedding_length": 64,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "tokenizer.ggml.tokens": ["a", "b", "</s>"],
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.chat_template": "{{ messages }}",
}


def gguf_bytes(fields: Mapping[str, Any] = FIELDS, *, size: int = 1000, version: int = 3) -> bytes:
    """A GGUF file of one tensor of `size` bytes."""
    head = b"GGUF" + struct.pack("<IQQ", version, 1, len(fields))
    for name, value in fields.items():
        head += _text(name) + _value(value)
    head += _text("token_embd.weight") + struct.pack("<IQIQ", 1, size, 24, 0)
    head += bytes(-len(head) % 32)
    return head + data_of("token_embd.weight", size)
