"""The tile of `paged_attention_gpu`: rows and keys of a program, by widths, dtype and target."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from hotswap.kernels.targets import Target

__all__ = ["MOST_SPLITS", "SPLIT", "Tile", "tile_for"]

SPLIT: Final = 256
"""Keys of a split of a row's keys; a multiple of the keys of every tile."""
MOST_SPLITS: Final = 64
"""The most splits of a row; rows with more keys have longer splits."""

_LEAST_ROWS: Final = 16  # of a matrix product
_PREFILL_ROWS: Final = 64
_MOST_SHARED_BYTES: Final = 100_000


@dataclass(frozen=True, slots=True)
class Tile:
    """A tile configuration.

    Attributes:
        rows: Query rows of one request in a program.
        block_m: Rows of its matrix products: query rows times the query heads of a KV head, a power of two.
        block_n: Keys of a step of the main loop.
        warps: Warps of a program.
        stages: Pipeline stages of the loads of keys and values.
    """

    rows: int
    block_m: int
    block_n: int
    warps: int
    stages: int


def tile_for(
    group: int, key_dim: int, value_dim: int, item_bytes: int, target: Target, *, single: bool
) -> Tile:
    """Return the tile for rows of one token (`single`) or of many.

    Args:
        group: Query heads of a KV head.
        key_dim: Width of a key.
        value_dim: Width of a value.
        item_bytes: Size of an element of the KV blocks.
        target: Where the kernel runs.
        single: Whether each tile has one row of its request.
    """
    width = _power_of_two(max(key_dim, value_dim))
    many, block_n = _PREFILL_ROWS, 64 if width <= (128 if single else 64) else 32
    if target.is_amd and width > 128:
        many = 32  # more rows spill registers
    if item_bytes > 2:  # products of fp32 take registers instead of tensor cores
        many, block_n = 32 if width <= 128 else 16, 32 if width <= 64 else 16
    rows = 1 if single else max(1, many // group)
    block_m = _power_of_two(rows * group)
    if block_m >= 128:
        block_n = min(block_n, 32)
    key_bytes = block_n * (_power_of_two(key_dim) + _power_of_two(value_dim)) * item_bytes
    query_bytes = block_m * _power_of_two(key_dim) * item_bytes
    room = min(_MOST_SHARED_BYTES, target.shared_bytes) - query_bytes
    buffers = room // key_bytes
    if block_m < 64 or not target.wide_mma:
        buffers += 1  # the stage that is computed lies in registers
    stages = 1 if target.is_amd else max(1, min(3, buffers))
    warps = 8 if block_m >= 128 or block_m * width >= 128 * 128 else 4
    return Tile(rows, block_m, block_n, warps, stages)


def _power_of_two(number: int) -> int:
    return max(_LEAST_ROWS, 1 << (number - 1).bit_length())
