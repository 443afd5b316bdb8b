"""Keys and values of a step's rows, copied to their places in the blocks; compiled by numba."""

# mypy: ignore-errors
# pyright: basic
from __future__ import annotations

from collections.abc import Callable
from functools import cache

from numba import types

from hotswap.kernels.compiling import compiled
from hotswap.kernels.lanes import address

__all__ = ["build"]

_places = address(types.int64)


@cache
def build(item_bytes: int) -> Callable[..., None]:
    """Return what copies `[heads, T, dim]` to `[blocks, heads, block_tokens, dim]`, compiled, by item size.

    Its arguments are the address of the rows and how far apart heads and rows lie, the address of the pool
    and its sizes, those of the blocks and slots (int64), and the number of rows.
    """
    elements = address({2: types.uint16, 4: types.uint32}[item_bytes])

    def append(rows, head_stride, row_stride, pool, kv_heads, block_tokens, dim, blocks, offsets, num_rows):
        source, target, block_of, slot_of = elements(rows), elements(pool), _places(blocks), _places(offsets)
        for row in range(num_rows):
            for head in range(kv_heads):
                first = row * row_stride + head * head_stride
                place = ((block_of[row] * kv_heads + head) * block_tokens + slot_of[row]) * dim
                for at in range(dim):
                    target[place + at] = source[first + at]

    signature = types.void(*[types.int64] * 10)
    return compiled(append, signature, f"append-{item_bytes}", nogil=True, error_model="numpy")
