"""The tile of `segmented_lora`: from a table of measurements, or from a heuristic.

A step has one tile, because all projections share its plan. The tile depends on the number of rows with an
adapter only, so there are as many compiled kernels as tiles in the table, and a new mix of adapters compiles
nothing.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, cast

import torch

from hotswap.kernels import tables
from hotswap.kernels.targets import Device, device_of

__all__ = ["KIND", "TABLE", "Tile", "heuristic", "tile_for", "tiles_of"]

TABLE: Final = Path(__file__).with_name("table.json")
KIND: Final = "16 bits"
# Rows with adapters up to which a step is mostly decodes, which are bound by reading adapters.
_MOST_DECODES: Final = 256


@dataclass(frozen=True, slots=True)
class Tile:
    """A tile configuration.

    Attributes:
        rows: Rows of a tile, a power of two from 16 on.
        pages: Pages of ranks per program and step: 1, 2 or 4.
        depth: Input columns per loop step; half as many for fp32.
        columns: Output columns per program: 32, 64 or 128.
        part: Input columns per program, a multiple of `depth`; 0 for all.
        warps: Warps of a program.
        stages: Pipeline stages of the loads of the input and of A.
    """

    rows: int = 16
    pages: int = 1
    depth: int = 128
    columns: int = 128
    part: int = 1024
    warps: int = 4
    stages: int = 4

    @property
    def choice(self) -> tables.Choice:
        """The entry of this tile in a table."""
        return cast("tables.Choice", asdict(self))


def tile_for(rows: int, width_in: int, device: torch.device | Device) -> Tile:
    """Return the tile of a step in which `rows` rows have an adapter.

    Args:
        rows: Rows with an adapter.
        width_in: Columns of the projections' input, such as the model's hidden size.
        device: Where the kernels run.
    """
    on = device if isinstance(device, Device) else device_of(device)
    target = on.target.name if on.target else ""
    found = tables.load(TABLE).find(on.name, target, KIND, (width_in,), rows)
    return heuristic(rows, on) if found is None else _tile(found)


def heuristic(rows: int, device: Device) -> Tile:
    """Return the tile of a step on a device that is not in the table.

    Decodes are bound by reading adapters: small tiles and many parts keep many loads in progress. Prefills
    are bound by computing: larger tiles, and one part, which saves the sums over parts.
    """
    stages = 2 if device.target and device.target.is_amd else 4
    if rows <= _MOST_DECODES:
        return Tile(stages=stages)
    return Tile(rows=64, pages=4, depth=64, part=0, warps=8, stages=min(3, stages))


def tiles_of(width_in: int, device: torch.device | Device) -> tuple[Tile, ...]:
    """Return all tiles that `tile_for` can choose on a device, to compile their kernels ahead of time."""
    on = device if isinstance(device, Device) else device_of(device)
    points = {_MOST_DECODES, _MOST_DECODES + 1}
    points |= {record.rows for _, record in tables.load(TABLE).records()}
    points |= {max(points) + 1}
    return tuple(dict.fromkeys(tile_for(rows, width_in, on) for rows in sorted(points)))


def _tile(choice: tables.Choice) -> Tile:
    return Tile(**cast("dict[str, Any]", dict(choice)))
