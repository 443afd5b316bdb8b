"""Low-rank adapters of single requests, in a batch that mixes them: two launches for a whole projection.

`plan` says on the host which rows go through which ranks, `tiles` how the work is cut, `pool` holds the ranks
in pages, `launch` runs the kernels (or the same plan in torch, on a CPU), `reference` is the truth they are
tested against.
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
from hotswap.kernels.segmented_lora.pool import PageBooks, RankPool
from hotswap.kernels.segmented_lora.tiles import Tile, tile_for, tiles_of

__all__ = [
    "PAGE_RANKS",
    "Capacity",
    "PageBooks",
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
