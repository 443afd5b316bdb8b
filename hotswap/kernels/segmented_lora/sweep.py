"""Looks for the best way to cut a step, by trying; offline, with the clock of whoever runs it."""

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
# A choice must be better by so much, so that noise does not move it.
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
    """Return the best tile that a walk along one setting after the other finds, with what it took.

    Args:
        width_in: Columns of the input.
        rows: With an adapter.
        start: Where the walk begins, so that the result is no worse.
        measure: Microseconds of a step cut so; infinite if it cannot be run.
        has_time: Asked before each measurement but the first.
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
    """Every tile that differs in one setting and can be run."""
    for name, choices in _CHOICES.items():
        for choice in choices:
            other = replace(tile, **{name: choice})
            if other != tile and other.part % other.depth == 0:
                yield other
