"""The plan of a step: which rows use which ranks. Built on the host and sent to the device in one small copy.

Rows are sorted by adapter and split into tiles of one adapter each; a tile's ranks are split into items of a
few pages. So the cost of an adapter depends on its own rank, not on the largest rank of the batch, and rows
without adapter cost nothing. This is the segmented gather of Chen et al., Punica, arXiv:2310.18547,
section 4, over paged ranks as in Sheng et al., S-LoRA, arXiv:2311.03285, section 5.

The copy is asynchronous, from pinned memory: the host does not wait for the device.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hotswap.errors import ConfigError
from hotswap.kernels.segmented_lora.tiles import Tile

__all__ = ["PAGE_RANKS", "Capacity", "RankPlace", "Segment", "SegmentPlan", "make_plan", "plan_rows"]

PAGE_RANKS = 16
_FIELDS = 5  # int32 of an item or a tile


@dataclass(frozen=True, slots=True)
class RankPlace:
    """The location of an adapter in the pools of all layers.

    Attributes:
        pages: Page numbers, in order, `PAGE_RANKS` ranks each; not necessarily adjacent.
        scale: The factor of the update.
    """

    pages: tuple[int, ...]
    scale: float = 1.0


@dataclass(frozen=True, slots=True)
class Segment:
    """A range of sorted positions, `first` to `last`, with one adapter."""

    first: int
    last: int
    place: RankPlace


@dataclass(frozen=True, slots=True)
class Capacity:
    """The sizes of a plan. Plans of equal capacity can be used with one captured CUDA graph.

    Attributes:
        rows: Rows with an adapter.
        tiles: Tiles of these rows.
        items: Items of these tiles.
        pages: Pages of all adapters in use.
    """

    rows: int
    tiles: int
    items: int
    pages: int

    @classmethod
    def of(cls, rows: int, adapters: int, pages: int, tile: Tile) -> Capacity:
        """Return a capacity for any mix of `rows` rows and `adapters` adapters of up to `pages` pages."""
        tiles = min(rows, -(-rows // tile.rows) + adapters)
        return cls(rows, tiles, tiles * -(-pages // tile.pages), adapters * pages)


@dataclass(frozen=True, slots=True, eq=False)
class SegmentPlan:
    """The work of one step, shared by all projections with the same rows.

    Attributes:
        work: int32, on the device: items, tiles, rows, then pages. To replay a captured graph with another
            plan of the same `capacity`, copy its `work` into that of the captured plan.
        capacity: The sizes, with padding.
        tile: The tile configuration.
        width: Ranks of the widest adapter, in whole pages.
        segments: The segments on the host; the rows of each are `rows[first:last]`.
        rows: Row numbers on the host, by sorted position.
    """

    work: Tensor
    capacity: Capacity
    tile: Tile
    width: int
    segments: tuple[Segment, ...]
    rows: tuple[int, ...]

    @property
    def item_at(self) -> int:
        """Offset of the items in `work`."""
        return 0

    @property
    def tile_at(self) -> int:
        """Offset of the tiles in `work`."""
        return self.capacity.items * _FIELDS

    @property
    def row_at(self) -> int:
        """Offset of the rows in `work`."""
        return self.tile_at + self.capacity.tiles * _FIELDS


def make_plan(
    slots: Sequence[int],
    places: Sequence[RankPlace | None],
    *,
    tile: Tile | None = None,
    device: torch.device | str = "cpu",
    capacity: Capacity | None = None,
    width: int = 0,
) -> SegmentPlan:
    """Plan a step in which row *i* has the adapter in slot `slots[i]`, or none if that is -1 or empty.

    Args:
        slots: A slot number for each row.
        places: Adapter locations by slot; `None` for an empty slot.
        tile: The tile configuration; the default suits few rows.
        device: Where the kernels run.
        capacity: Sizes to pad the plan to; by default no padding.
        width: Minimum number of ranks, for graphs that are replayed with other mixes.

    Raises:
        ConfigError: a slot number is out of range, or the capacity is too small.
    """
    rows_of: dict[RankPlace, list[int]] = {}
    for row, slot in enumerate(slots):
        if not -1 <= slot < len(places):
            raise ConfigError(
                f"Row {row} names slot {slot} of {len(places)}; give -1 for a row without adapter."
            )
        place = places[slot] if slot >= 0 else None
        if place is not None:
            rows_of.setdefault(place, []).append(row)
    return plan_rows(rows_of, tile=tile, device=device, capacity=capacity, width=width)


def plan_rows(
    rows_of: Mapping[RankPlace, Sequence[int]],
    *,
    tile: Tile | None = None,
    device: torch.device | str = "cpu",
    capacity: Capacity | None = None,
    width: int = 0,
) -> SegmentPlan:
    """Plan a step from the rows of each adapter, each row once at most; otherwise like `make_plan`."""
    cut = tile or Tile()
    rows: list[int] = []
    pages: list[int] = []
    tiles: list[tuple[int, int, int, int, int]] = []
    items: list[tuple[int, int, int, int, int]] = []
    segments: list[Segment] = []
    for place, its_rows in rows_of.items():
        if not its_rows or not place.pages:
            continue
        first, num_pages = len(rows), len(place.pages)
        rows += its_rows
        segments.append(Segment(first, len(rows), place))
        scale = _bits(place.scale)
        for at in range(first, len(rows), cut.rows):
            count = min(cut.rows, len(rows) - at)
            tiles.append((at, count, len(pages), num_pages, scale))
            items += [
                (at, count, len(pages) + page, min(cut.pages, num_pages - page), page * PAGE_RANKS)
                for page in range(0, num_pages, cut.pages)
            ]
        pages += place.pages
    need = Capacity(len(rows), len(tiles), len(items), len(pages))
    room = _room(need, capacity)
    pages_at = (room.items + room.tiles) * _FIELDS + room.rows
    numbers = [
        *_filled([_moved(item, pages_at) for item in items], room.items),
        *_filled([_moved(tile, pages_at) for tile in tiles], room.tiles),
        *rows,
        *[0] * (room.rows - len(rows)),
        *pages,
        *[0] * (room.pages - len(pages)),
    ]
    widest = max((len(segment.place.pages) for segment in segments), default=0) * PAGE_RANKS
    return SegmentPlan(
        work=_sent(numbers, torch.device(device)),
        capacity=room,
        tile=cut,
        width=max(width, widest),
        segments=tuple(segments),
        rows=tuple(rows),
    )


def _room(need: Capacity, capacity: Capacity | None) -> Capacity:
    if capacity is None:
        return need
    for name in ("rows", "tiles", "items", "pages"):
        wanted, there = getattr(need, name), getattr(capacity, name)
        if wanted > there:
            raise ConfigError(
                f"A plan needs {wanted} {name}, and its capacity has {there}; plan for more with Capacity.of."
            )
    return capacity


def _moved(record: tuple[int, int, int, int, int], pages_at: int) -> tuple[int, int, int, int, int]:
    """Change the page offset, the third field, from the start of the pages to the start of `work`."""
    return (record[0], record[1], record[2] + pages_at, record[3], record[4])


def _filled(records: list[tuple[int, int, int, int, int]], count: int) -> list[int]:
    return [number for record in records for number in record] + [0] * ((count - len(records)) * _FIELDS)


def _bits(scale: float) -> int:
    """Return the bits of a float32 as an integer."""
    return int(struct.unpack("<i", struct.pack("<f", scale))[0])


def _sent(numbers: list[int], device: torch.device) -> Tensor:
    """Copy the numbers to the device on its current stream, asynchronously."""
    work = torch.tensor(numbers, dtype=torch.int32)
    return work.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else work.to(device)
