"""The kernel of `append`: copies keys or values of new tokens to their slots in KV blocks, by numba."""

# mypy: ignore-errors
# pyright: basic
from __future__ import annotations

from collections.abc import Callable
from functools import cache

from numba import types

from hotswap.kernels.compiling import compiled
from hotswap.kernels.simd import pointer_to

__all__ = ["build"]

_places = pointer_to(types.int64)


@cache
def build(item_bytes: int) -> Callable[..., None]:
    """Return the compiled copy of `[heads, T, dim]` to `[blocks, heads, block_tokens, dim]`, by item size.

    Its arguments: the address of the rows and the strides of heads and rows, the address and the sizes of the
    pool, the addresses of block and slot numbers (int64), and the number of rows.
    """
    elements = pointer_to({2: types.uint16, 4: types.uint32}[item_bytes])

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
