"""How the work of `segmented_lora` is cut: by a table of what was measured, or a rule of thumb.

One choice serves a whole step, since all projections share its plan. It goes by the number of rows that have
an adapter alone, so there are as many kernels as the table has entries, and a new mix of adapters needs none.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, cast

import torch

from hotswap.kernels import tables
from hotswap.kernels.targets import Device, device_of

__all__ = ["KIND", "TABLE", "Tile", "rule_of_thumb", "tile_for", "tiles_of"]

TABLE: Final = Path(__file__).with_name("table.json")
KIND: Final = "16 bits"
# Rows of adapters up to which most tiles are one request's decode, and bytes of adapters all that counts.
_MOST_DECODES: Final = 256


@dataclass(frozen=True, slots=True)
class Tile:
    """How the work is cut.

    Attributes:
        rows: Of a tile, a power of two from 16 on.
        pages: Of ranks that one program takes at once: 1, 2 or 4.
        depth: Columns of the input that one program takes at once; half as many of fp32.
        columns: Of the output that one program computes: 32, 64 or 128.
        part: Columns of the input that one program takes in all, a multiple of `depth`; 0 for all of them.
        warps: Of each program.
        stages: Loads of the input and of A that are under way beside the products.
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
        """As tables have it."""
        return cast("tables.Choice", asdict(self))


def tile_for(rows: int, width_in: int, device: torch.device | Device) -> Tile:
    """Return how to cut a step of which so many rows have adapters.

    Args:
        rows: With an adapter.
        width_in: Columns of the projections' input, such as the model's hidden size.
        device: Where the kernels run.
    """
    on = device if isinstance(device, Device) else device_of(device)
    target = on.target.name if on.target else ""
    found = tables.load(TABLE).find(on.name, target, KIND, (width_in,), rows)
    return rule_of_thumb(rows, on) if found is None else _tile(found)


def rule_of_thumb(rows: int, device: Device) -> Tile:
    """Return how to cut a step on a device that the table knows nothing of.

    Decodes read every adapter once and compute little: small tiles, and many parts, so that many loads are
    under way. Prefills compute: larger tiles, and no parts, which the second kernel would have to add up.
    """
    stages = 2 if device.target and device.target.is_amd else 4
    if rows <= _MOST_DECODES:
        return Tile(stages=stages)
    return Tile(rows=64, pages=4, depth=64, part=0, warps=8, stages=min(3, stages))


def tiles_of(width_in: int, device: torch.device | Device) -> tuple[Tile, ...]:
    """Return every tile that steps may have there, for whoever builds kernels ahead."""
    on = device if isinstance(device, Device) else device_of(device)
    points = {_MOST_DECODES, _MOST_DECODES + 1}
    points |= {record.rows for _, record in tables.load(TABLE).records()}
    points |= {max(points) + 1}
    return tuple(dict.fromkeys(tile_for(rows, width_in, on) for rows in sorted(points)))


def _tile(choice: tables.Choice) -> Tile:
    return Tile(**cast("dict[str, Any]", dict(choice)))
