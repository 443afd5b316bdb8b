"""What `kv_blocks` moves, said as plainly as can be: block after block, tensor after tensor."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["gather_reference", "scatter_reference"]


def gather_reference(pools: Sequence[Tensor], blocks: Sequence[int], staging: Tensor) -> Tensor:
    """Return `staging`, uint8 `[blocks, bytes]`, with the blocks' bytes of every pool, side by side."""
    rows = staging.clone()
    for row, block in zip(rows, blocks, strict=True):
        if block >= 0:
            row.copy_(torch.cat([pool[block].reshape(-1).view(torch.uint8) for pool in pools]))
    return rows


def scatter_reference(pools: Sequence[Tensor], blocks: Sequence[int], staging: Tensor) -> list[Tensor]:
    """Return the pools with the blocks filled from rows of `staging`; the inverse of the other."""
    filled = [pool.clone() for pool in pools]
    for row, block in zip(staging, blocks, strict=True):
        at = 0
        for pool in filled:
            size = pool[0].numel() * pool.itemsize
            if block >= 0:
                pool[block] = row[at : at + size].clone().view(pool.dtype).view(pool.shape[1:])
            at += size
    return filled
