"""The offline search for the fastest tile of each product, on the device that the table is for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from hotswap.errors import ConfigError
from hotswap.kernels.fp8_gemm.tiles import DENSE, TABLE, Tile, heuristic, kind_of
from hotswap.kernels.tables import Record, write
from hotswap.kernels.targets import Device, Target

__all__ = ["Measure", "Point", "neighbours", "search", "sweep"]

# A tile is better if its time is below this share of the best so far; the margin is the noise of timings.
_BETTER: Final = 0.985
_MOST_STAGES: Final = 7
_MOST_PARTS: Final = 16
# Registers hold the sums of a tile and the unscaled sums of the current step.
_LARGEST: Final = 128 * 128


@dataclass(frozen=True, slots=True)
class Point:
    """A product to tune: `rows` by a weight `(N, K)`, in a dtype, with groups along K, or `None`."""

    rows: int
    shape: tuple[int, int]
    dtype: str = "bfloat16"
    group: int | None = 128


# Returns the microseconds of a product with a tile; infinite if it cannot be launched.
Measure = Callable[[Point, Tile], float]


def neighbours(tile: Tile, point: Point, target: Target) -> Iterator[Tile]:
    """Yield the tiles that differ in one setting and fit the target."""
    tall = (16, 32, 64, 128)
    others = [
        *(replace(tile, parts=parts) for parts in (tile.parts - 1, tile.parts + 1, 2 * tile.parts)),
        *(replace(tile, block_n=block) for block in (32, 64, 128, 256)),
        *(replace(tile, stages=stages) for stages in (tile.stages - 1, tile.stages + 1)),
        *(replace(tile, warps=warps) for warps in (4, 8)),
        *(replace(tile, block_k=block) for block in (64, 128)),
        *(replace(tile, block_m=block) for block in tall if block < 4 * max(16, point.rows)),
    ]
    if target.wide_mma:
        others.append(replace(tile, weights_left=not tile.weights_left))
    yield from (other for other in others if other != tile and _is_possible(other, point, target))


def search(point: Point, device: Device, measure: Measure, *, most_rounds: int = 2) -> tuple[Tile, float]:
    """Return the best tile of a local search from the heuristic's tile, and its time in microseconds.

    The dense path is measured too. Takes a few dozen measurements; the result is a local optimum.

    Raises:
        ConfigError: kernels do not run on the device.
    """
    target = device.target
    if target is None or not target.mma:
        raise ConfigError(f"There is nothing to sweep on {device.name!r}: the kernel does not run there.")
    known: dict[Tile, float] = {}

    def time(tile: Tile) -> float:
        if tile not in known:
            known[tile] = measure(point, tile)
        return known[tile]

    first = heuristic(min(point.rows, 256), point.shape, target, device.num_units).fitted(point.group)
    best = first
    for _ in range(most_rounds):
        start = best
        for tile in list(neighbours(start, point, target)):
            if time(tile) < _BETTER * time(best):
                best = tile
        if best == start:
            break
    if time(DENSE) < time(best):
        best = DENSE
    return best, time(best)


def sweep(
    points: Iterable[Point],
    device: Device,
    measure: Measure,
    *,
    others: Callable[[Point], Mapping[str, float]] = lambda point: {},
    about: Mapping[str, Any] | None = None,
    path: Path = TABLE,
) -> None:
    """Search for the best tile of each point, and write the table of a device.

    Args:
        points: The products to tune.
        device: The device on which `measure` runs.
        measure: Returns the time of a product.
        others: Returns further values of a point, such as the microseconds of a baseline.
        about: Further facts, such as versions and bandwidth ceilings.
        path: The table file.
    """
    records: list[Record] = []
    for point in points:
        tile, microseconds = search(point, device, measure)
        figures = {"us": microseconds, **others(point)}
        records.append(
            Record(kind_of(point.dtype, point.group), point.shape, point.rows, tile.choice, figures)
        )
    assert device.target is not None, "the search raises without a target"
    write(path, device.name, device.target.name, {"num_units": device.num_units, **(about or {})}, records)


def _is_possible(tile: Tile, point: Point, target: Target) -> bool:
    steps = -(-point.shape[1] // tile.block_k)
    return (
        1 <= tile.parts <= min(_MOST_PARTS, steps)
        and 2 <= tile.stages <= _MOST_STAGES
        and tile.block_m * tile.block_n <= _LARGEST
        and tile.shared_bytes <= target.shared_bytes
        and (point.group is None or point.group % tile.block_k == 0)
        and (not tile.weights_left or tile.block_n >= 64)
    )
