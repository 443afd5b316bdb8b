"""Which rows of a step go through which ranks: made on the host, and sent to the device in one small copy.

Rows are sorted by adapter and cut into tiles, each of one adapter; a tile's ranks are cut into items of a few
pages. So an adapter costs its own rank, not that of the largest beside it, and a row without one costs
nothing. That is the segmented gather of Chen et al., Punica, arXiv:2310.18547, section 4, over ranks that are
paged one by one as in Sheng et al., S-LoRA, arXiv:2311.03285, section 5.

Nobody waits for the device: the numbers go there from pinned memory, behind what it is doing.
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
_FIELDS = 5  # of an item, and of a tile


@dataclass(frozen=True, slots=True)
class RankPlace:
    """Where an adapter lies in the pools of all layers.

    Attributes:
        pages: Of `PAGE_RANKS` ranks each, in order; they need not be neighbours.
        scale: The factor of what is added.
    """

    pages: tuple[int, ...]
    scale: float = 1.0


@dataclass(frozen=True, slots=True)
class Segment:
    """The sorted positions `first` to `last`, all of one adapter."""

    first: int
    last: int
    place: RankPlace


@dataclass(frozen=True, slots=True)
class Capacity:
    """What a plan has room for, so that plans of one capacity look alike to a captured graph.

    Attributes:
        rows: With an adapter.
        tiles: Of them.
        items: Of those tiles.
        pages: Of all adapters that are used.
    """

    rows: int
    tiles: int
    items: int
    pages: int

    @classmethod
    def of(cls, rows: int, adapters: int, pages: int, tile: Tile) -> Capacity:
        """What is enough for any mix of so many rows and adapters of at most `pages` pages each."""
        tiles = min(rows, -(-rows // tile.rows) + adapters)
        return cls(rows, tiles, tiles * -(-pages // tile.pages), adapters * pages)


@dataclass(frozen=True, slots=True, eq=False)
class SegmentPlan:
    """The work of one step, the same for every projection that gets its rows.

    Attributes:
        work: int32, on the device: items, tiles, rows, then pages. Of two plans of one `capacity` the later
            one's may be copied into the earlier one's, and a graph captured with that replayed.
        capacity: What there is of each, what only fills included.
        tile: How it was cut.
        width: Ranks of the widest adapter, whole pages.
        segments: The same on the host; the rows of each are `rows` from `first` to `last`.
        rows: On the host, by sorted position.
    """

    work: Tensor
    capacity: Capacity
    tile: Tile
    width: int
    segments: tuple[Segment, ...]
    rows: tuple[int, ...]

    @property
    def item_at(self) -> int:
        """Where the items begin in `work`."""
        return 0

    @property
    def tile_at(self) -> int:
        """Where the tiles begin."""
        return self.capacity.items * _FIELDS

    @property
    def row_at(self) -> int:
        """Where the rows begin."""
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
    """Plan a step of which row *i* has the adapter in slot `slots[i]`, or none if that is -1 or empty.

    Args:
        slots: One for each row.
        places: By slot; `None` for an empty one.
        tile: How to cut the work; the default for few rows if not given.
        device: Where the kernels run.
        capacity: What the plan is filled up to; just what is needed if not given.
        width: Ranks to provide for at least, for graphs that serve other mixes too.

    Raises:
        ConfigError: a slot that there is not, or a capacity that is too small.
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
    """Plan a step by the rows of each adapter, no row twice; otherwise as `make_plan`."""
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
    """The third number says where pages stand: so far among the pages, now in all of the work."""
    return (record[0], record[1], record[2] + pages_at, record[3], record[4])


def _filled(records: list[tuple[int, int, int, int, int]], count: int) -> list[int]:
    return [number for record in records for number in record] + [0] * ((count - len(records)) * _FIELDS)


def _bits(scale: float) -> int:
    """The bits of a fp32 number, read as a whole one."""
    return int(struct.unpack("<i", struct.pack("<f", scale))[0])


def _sent(numbers: list[int], device: torch.device) -> Tensor:
    """The numbers on the device, in the order of its stream; the host does not wait for them."""
    work = torch.tensor(numbers, dtype=torch.int32)
    return work.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else work.to(device)
