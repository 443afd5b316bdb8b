"""The tensors of safetensors files, told by their headers alone; no tensor library is needed."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from hotswap.backends.stores.fields import Fields, parse_object
from hotswap.backends.stores.layout import item_bits
from hotswap.errors import ShardCorrupt

__all__ = ["FETCH_AGAIN", "MOST_HEADER_BYTES", "StoredTensor", "read_header", "read_tensors"]

MOST_HEADER_BYTES: Final = 100_000_000  # the format's own limit
FETCH_AGAIN: Final = "Fetch the checkpoint again."

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


def read_tensors(paths: Iterable[Path]) -> list[StoredTensor]:
    """Return the tensors of files, in the order of their bytes. Blocking.

    Raises:
        ShardCorrupt: a file is truncated or no safetensors file, has a dtype that is not known, or a tensor
            that lies outside it or on another; or two files have a tensor of one name.
    """
    found = [tensor for path in paths for tensor in read_header(path)]
    names: dict[str, Path] = {}
    for tensor in found:
        if tensor.name in names:
            raise ShardCorrupt(
                f"{str(tensor.path)!r} and {names[tensor.name].name!r} both have the tensor {tensor.name!r}, "
                f"and no index says which counts. {FETCH_AGAIN}"
            )
        names[tensor.name] = tensor.path
    return found


def read_header(path: Path) -> list[StoredTensor]:
    """Return the tensors of one file; raises as `read_tensors`."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 2 <= length <= min(size - 8, MOST_HEADER_BYTES):
            raise ShardCorrupt(f"{str(path)!r} is no safetensors file, or truncated. {FETCH_AGAIN}")
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
