"""The offline search for the fastest tile; the caller measures the times."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

from hotswap.kernels.segmented_lora.tiles import KIND, Tile
from hotswap.kernels.tables import Record

__all__ = ["neighbours", "sweep"]

_CHOICES: dict[str, tuple[int, ...]] = {
    "part": (0, 256, 512, 1024, 2048, 4096),
    "columns": (32, 64, 128),
    "stages": (2, 3, 4, 5, 6),
    "rows": (16, 32, 64, 128),
    "pages": (1, 2, 4),
    "depth": (64, 128, 256),
    "warps": (2, 4, 8),
}
# A tile is better if its time is below this share of the best so far; the margin is the noise of timings.
_GAIN = 0.985
_MOST_ROUNDS = 2


def sweep(
    width_in: int,
    rows: int,
    start: Tile,
    measure: Callable[[Tile], float],
    *,
    has_time: Callable[[], bool] = lambda: True,
) -> Record:
    """Return the best tile of a local search that changes one setting at a time, with its time.

    Args:
        width_in: Width of the input.
        rows: Rows with an adapter.
        start: The first tile; the result is no slower.
        measure: Returns the microseconds of a step with a tile; infinite if it cannot be launched.
        has_time: Called before each measurement except the first; `False` ends the search.
    """
    seen = {start: measure(start)}
    best, rounds, moved = start, 0, True
    while moved and rounds < _MOST_ROUNDS:
        moved, rounds = False, rounds + 1
        for tile in neighbours(best):
            if tile in seen or not has_time():
                continue
            seen[tile] = measure(tile)
            if seen[tile] < _GAIN * seen[best]:
                best, moved = tile, True
    figures = {"us": seen[best], "start_us": seen[start], "tried": float(len(seen))}
    finite = {name: figure for name, figure in figures.items() if math.isfinite(figure)}
    return Record(KIND, (width_in,), rows, best.choice, finite)


def neighbours(tile: Tile) -> Iterator[Tile]:
    """Yield the valid tiles that differ in one setting."""
    for name, choices in _CHOICES.items():
        for choice in choices:
            other = replace(tile, **{name: choice})
            if other != tile and other.part % other.depth == 0:
                yield other
