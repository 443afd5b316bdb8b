"""The programs of `fp8_gemm`: all tiles that the heuristic or a table can choose, as they are launched."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from typing import Any

import triton.language as tl

from hotswap.kernels.fp8_gemm.kernel import dequantize_kernel, fp8_gemm_kernel
from hotswap.kernels.fp8_gemm.tiles import ROWS, TABLE, Tile, heuristic
from hotswap.kernels.tables import load
from hotswap.kernels.targets import Target
from tests.kernels.gate.build import Limits, Program

# Weight shapes from tiny models to the largest layers, and devices with few and with many units.
SHAPES = [(n, k) for n in (64, 1280, 4096, 8192, 28672, 57344) for k in (64, 1024, 4096, 28672)]
UNITS = (20, 60, 132, 304)
# ptxas spills addresses before the loop and reloads them after it, so that more programs fit on a unit.
_MOST_SPILLED = 55
# They have all kinds of matrix products: those of single warps, which the small tiles of sm_90 use, and those
# of warp groups, of two kinds. The other NVIDIA targets have the first kind alone, and less shared memory.
_THOROUGH = {"sm_90", "sm_100"}
_DTYPES = {"bf16": tl.bfloat16, "fp16": tl.float16}


def programs(target: Target) -> Iterable[Program]:
    """Return the programs of a model with FP8 weights on a target.

    There are four programs for each tile of the heuristic, which cover all pairs of: groups or channels,
    split K or not, even sizes without a bias or ragged sizes with a bias. fp16 differs by its conversion
    only. On targets whose kind of products another has too, two of the four stand for all. A tile that was
    measured has run on its device: of those, the largest is compiled once for each number of warps and each
    order of the operands.
    """
    for tile in largest(measured(target) - by_rule(target)):
        yield fused(tile, target, "bf16", 128, split=True)
    for tile in sorted(by_rule(target), key=repr):
        yield fused(tile, target, "bf16", 128, split=True)
        yield fused(tile, target, "bf16", None, split=True, ragged=True)
        if target.name in _THOROUGH or target.is_amd:
            yield fused(tile, target, "bf16", 128, split=False, ragged=True)
            yield fused(tile, target, "fp16", None, split=False)
    for dtype in _DTYPES:
        yield dequantize(dtype)


def largest(tiles: set[Tile]) -> list[Tile]:
    """Return the tiles that need most shared memory, of each number of warps and order of the operands."""
    found: dict[tuple[int, bool], Tile] = {}
    for tile in sorted(tiles, key=lambda tile: (_size(tile), repr(tile))):
        found[tile.warps, tile.weights_left] = tile
    return list(found.values())


def _size(tile: Tile) -> int:
    """Shared memory of a tile, in proportion: inputs have twice the bytes of weights."""
    return tile.stages * tile.block_k * (2 * tile.block_m + tile.block_n)


def tiles(target: Target) -> set[Tile]:
    """Return all tiles that can be chosen; the number of parts does not change the program."""
    return by_rule(target) | measured(target)


@cache
def by_rule(target: Target) -> set[Tile]:
    """Return the tiles of the heuristic."""
    chosen = (heuristic(rows, shape, target, units) for rows in ROWS for shape in SHAPES for units in UNITS)
    return {replace(tile, parts=1) for tile in chosen if tile.path == "fused"}


@cache
def measured(target: Target) -> set[Tile]:
    """Return the tiles of the table, the fastest ones measured on a device."""
    chosen = (Tile.of(record.choice) for name, record in load(TABLE).records() if name == target.name)
    return {replace(tile, parts=1) for tile in chosen if tile.path == "fused"}


def fused(
    tile: Tile, target: Target, dtype: str, group: int | None, *, split: bool, ragged: bool = False
) -> Program:
    """Return a fused product; a ragged one has a bias, and sizes that are not multiples of the tile."""
    constants: dict[str, Any] = {
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "BLOCK_K": tile.block_k,
        "GROUP": group or 0,
        "SPLIT": split,
        "WEIGHTS_LEFT": tile.weights_left,
        "REBIAS": dtype == "bf16" or target.flushes_subnormals,
        "HAS_BIAS": ragged,
        "EVEN_N": not ragged,
        "EVEN_K": not ragged,
        "STAGES": tile.stages,
        "DTYPE": _DTYPES[dtype],
    }
    is_measured = tile in measured(target) - by_rule(target)
    halves = dict.fromkeys(("x_ptr", "b_ptr", "y_ptr"), f"*{dtype}")
    floats = dict.fromkeys(("s_ptr", "part_ptr"), "*fp32")
    words = dict.fromkeys(("w_ptr", "count_ptr"), "*i32")
    numbers = dict.fromkeys(("M", "N", "K", "x_row", "w_row", "s_row", "y_row"), "i32")
    aligned = {*halves, *floats, *words, "K", "x_row", "w_row"} | (set() if ragged else {"N", "y_row"})
    return Program(
        name=f"{tile.block_m}x{tile.block_n}x{tile.block_k} {dtype} {group=} {split=} {ragged=}",
        kernel=fp8_gemm_kernel,
        arguments={**halves, **floats, **words, **numbers},
        constants=constants,
        aligned=frozenset(aligned),
        num_warps=tile.warps,
        num_stages=tile.stages,
        weights=tile.block_n * tile.block_k / (target.warp_lanes * tile.warps),
        limits=Limits(
            copies=True,
            per_weight=None if is_measured else _budget(tile, channel=group is None, ragged=ragged),
            wide_mma=tile.weights_left,
            spilled=None if is_measured else _MOST_SPILLED,
        ),
    )


def _budget(tile: Tile, *, channel: bool, ragged: bool) -> float | None:
    """Return the allowed instructions per weight, 10% above the measured count; `None` for no limit.

    The conversion takes about four. The rest grows with the rows per tile, except with warp-group
    instructions, which take many rows. There, loops of ragged products with one scale per row are unrolled,
    so their length has no meaning.
    """
    if tile.weights_left:
        return None if channel and ragged else 6.9
    return {16: 5.2, 32: 6.8, 64: 11.7, 128: 24.4}[tile.block_m]


def dequantize(dtype: str) -> Program:
    """Return the dequantization of weights."""
    return Program(
        name=f"dequantize {dtype}",
        kernel=dequantize_kernel,
        arguments={
            "w_ptr": "*i32",
            "s_ptr": "*fp32",
            "y_ptr": f"*{dtype}",
            **dict.fromkeys(("N", "K", "w_row", "s_row", "y_row"), "i32"),
        },
        constants={"BLOCK_N": 32, "BLOCK_K": 128, "GROUP": 128, "DTYPE": _DTYPES[dtype]},
        aligned=frozenset({"w_ptr", "s_ptr", "y_ptr", "K", "w_row", "y_row"}),
        limits=Limits(registers=128, mma=False, wide=True),
    )
