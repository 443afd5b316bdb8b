"""LoRA for batches in which each row may have another adapter: two kernel launches per projection.

`plan` is built on the host and assigns rows to ranks, `tiles` chooses the tile, `pool` is the paged memory of
ranks, `launch` runs the Triton kernels (or the same plan in torch), and `reference` is the definition in
float64 that the tests compare with.
"""

from __future__ import annotations

from hotswap.kernels.segmented_lora.launch import expand, has_kernels, segmented_lora, shrink
from hotswap.kernels.segmented_lora.plan import (
    PAGE_RANKS,
    Capacity,
    RankPlace,
    SegmentPlan,
    make_plan,
    plan_rows,
)
from hotswap.kernels.segmented_lora.pool import PageAllocator, RankPool
from hotswap.kernels.segmented_lora.tiles import Tile, tile_for, tiles_of

__all__ = [
    "PAGE_RANKS",
    "Capacity",
    "PageAllocator",
    "RankPlace",
    "RankPool",
    "SegmentPlan",
    "Tile",
    "expand",
    "has_kernels",
    "make_plan",
    "plan_rows",
    "segmented_lora",
    "shrink",
    "tile_for",
    "tiles_of",
]
