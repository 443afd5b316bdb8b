"""Pools of KV blocks to be moved, full of bytes of all kinds."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["CACHES", "make_pools", "same"]

# Shapes of a block in each pool: alike, of several widths, larger than a chunk, and of odd numbers of bytes.
CACHES: dict[str, tuple[tuple[int, ...], ...]] = {
    "alike": ((2, 16, 64),) * 6,
    "several": ((2, 16, 64), (1, 16, 32), (2, 16, 128)),
    "large": ((9, 32, 64),) * 2,
    "odd": ((3, 5, 7), (1, 1, 1), (2, 3, 1)),
    "eight bytes": ((1, 4), (2, 8)),
}


def make_pools(cache: str, dtype: torch.dtype, num_blocks: int = 20) -> list[Tensor]:
    """Bytes of all kinds, NaNs among them."""
    generator = torch.Generator().manual_seed(1)
    return [
        torch.randint(0, 256, (num_blocks, size[0] * dtype.itemsize), generator=generator, dtype=torch.uint8)
        .view(dtype)
        .view(num_blocks, *shape)
        for shape in CACHES[cache]
        for size in [(torch.Size(shape).numel(),)]
    ]


def same(left: Tensor, right: Tensor) -> bool:
    """Whether they have the same bits."""
    return torch.equal(left.view(torch.uint8), right.view(torch.uint8))
