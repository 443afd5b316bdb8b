"""The programs of `segmented_lora`: all tiles that the heuristic or a table can choose, in both dtypes."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from hotswap.kernels.segmented_lora import RankPlace, RankPool, Tile, make_plan, tiles_of
from hotswap.kernels.segmented_lora.launch import expand_call, shrink_call
from hotswap.kernels.segmented_lora.tiles import heuristic
from hotswap.kernels.targets import Device, Target
from tests.kernels.gate.build import Limits, Program
from tests.kernels.launches import program_of

WIDTH = 4096
_PLACES = (RankPlace((0, 2)), RankPlace((1,)))


def programs(target: Target) -> Iterable[Program]:
    """Return the programs of adapters on a target; none for targets without tensor cores."""
    if not target.mma:
        return
    device = Device("any", target, 100)
    for tile in tiles_of(WIDTH, device):
        is_measured = tile not in (heuristic(1, device), heuristic(4096, device))
        for dtype in (torch.bfloat16, torch.float16):
            yield from _pair(tile, target, dtype, per_weight=None if is_measured else 6.0)


def _pair(tile: Tile, target: Target, dtype: torch.dtype, per_weight: float | None) -> Iterable[Program]:
    pool = RankPool(3, WIDTH, (256, 128), dtype=dtype)
    plan = make_plan([0, 1, -1], _PLACES, tile=tile)
    x, out = torch.zeros(3, WIDTH, dtype=dtype), torch.zeros(3, 384, dtype=dtype)
    h = torch.zeros(4, 2, 2, plan.width)
    name = f"{tile.rows}x{tile.pages} pages, {dtype}"
    lanes = target.warp_lanes * tile.warps
    # An element of A has two bytes, which are copied and multiplied without conversion.
    call = shrink_call(h, x, pool, plan)
    weights = call.constants["BLOCK_K"] * tile.pages * 16 / lanes
    wide = tile.rows >= 64 and bool(target.wide_mma)
    limits = Limits(registers=128, copies=True, wide_mma=wide, per_weight=per_weight)
    yield program_of(f"shrink {name}", call, weights=weights, limits=limits)
    call = expand_call(out, h, pool, plan)
    # On AMD a row of a result is spread over many lanes, and Triton stores it without wide stores.
    limits = Limits(registers=160, wide=not target.is_amd, copies=target.is_amd, wide_mma=wide)
    yield program_of(f"expand {name}", call, limits=limits)
