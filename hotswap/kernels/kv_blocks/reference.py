"""Reference implementation of `kv_blocks`: plain copies, block by block and pool by pool."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["gather_reference", "scatter_reference"]


def gather_reference(pools: Sequence[Tensor], blocks: Sequence[int], staging: Tensor) -> Tensor:
    """Return `staging`, uint8 `[blocks, bytes]`, with the bytes of each block from all pools in a row."""
    rows = staging.clone()
    for row, block in zip(rows, blocks, strict=True):
        if block >= 0:
            row.copy_(torch.cat([pool[block].reshape(-1).view(torch.uint8) for pool in pools]))
    return rows


def scatter_reference(pools: Sequence[Tensor], blocks: Sequence[int], staging: Tensor) -> list[Tensor]:
    """Return the pools with blocks filled from the rows of `staging`; the inverse of `gather_reference`."""
    filled = [pool.clone() for pool in pools]
    for row, block in zip(staging, blocks, strict=True):
        at = 0
        for pool in filled:
            size = pool[0].numel() * pool.itemsize
            if block >= 0:
                pool[block] = row[at : at + size].clone().view(pool.dtype).view(pool.shape[1:])
            at += size
    return filled
