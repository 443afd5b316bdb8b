"""Pools of KV blocks with random bytes, for tests."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["CACHES", "make_pools", "same"]

# Block shapes of the pools: equal, of several widths, larger than a chunk, and with odd numbers of bytes.
CACHES: dict[str, tuple[tuple[int, ...], ...]] = {
    "equal": ((2, 16, 64),) * 6,
    "several": ((2, 16, 64), (1, 16, 32), (2, 16, 128)),
    "large": ((9, 32, 64),) * 2,
    "odd": ((3, 5, 7), (1, 1, 1), (2, 3, 1)),
    "eight bytes": ((1, 4), (2, 8)),
}


def make_pools(cache: str, dtype: torch.dtype, num_blocks: int = 20) -> list[Tensor]:
    """Pools of random bytes, including NaNs."""
    generator = torch.Generator().manual_seed(1)
    return [
        torch.randint(0, 256, (num_blocks, size[0] * dtype.itemsize), generator=generator, dtype=torch.uint8)
        .view(dtype)
        .view(num_blocks, *shape)
        for shape in CACHES[cache]
        for size in [(torch.Size(shape).numel(),)]
    ]


def same(left: Tensor, right: Tensor) -> bool:
    """Whether two tensors have the same bits."""
    return torch.equal(left.view(torch.uint8), right.view(torch.uint8))
