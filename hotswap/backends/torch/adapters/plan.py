"""Which rows of a step go through which ranks of the pool, so that few products do all adapters.

On a GPU they go through kernels, which take each adapter by itself (`hotswap.kernels.segmented_lora`).

On a CPU the adapters of a layer lie one under the other in one matrix (`tiled`). Rows are cut into tiles of
eight. A tile of one adapter goes through its ranks; a tile of several goes through the whole range of their
ranks, and what a row has no part in is set to zero between the two products, before it could be added to
anything. That spares the batch of decodes, in which every request may have another adapter, a product for
each of them.

Bits do not depend on who shares the step: on a CPU both products are those of linear layers, which round a
row alike for any number of rows from two on, wherever its ranks lie, and zeros add nothing. (MKL's do so for
eight rows on some processors and on others not at all.) Grouping rows by adapter is that of SGMV in Chen
et al., Punica, arXiv:2310.18547, section 4.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from hotswap.kernels.segmented_lora import RankPlace, RankPool, SegmentPlan, plan_rows, shrink, tile_for

__all__ = [
    "TILE_ROWS",
    "Adaptation",
    "PagedPlan",
    "Place",
    "Plan",
    "RankPages",
    "RankRange",
    "Run",
    "StepPlan",
    "adaptation",
]

TILE_ROWS = 8
# Ranks that a tile of several adapters spans at most: more would be multiplied in vain.
_MOST_RANKS = 96
# Ranks of others between two adapters of a tile.
_MOST_GAP = 16


class Place(Protocol):
    """Where an adapter lies in the pool of its engine.

    `serial` is given to no other adapter of the process, also not to the same one when it comes again: what
    was computed with an adapter belongs to it.
    """

    @property
    def serial(self) -> int:
        """Stands for the adapter."""
        ...


@dataclass(frozen=True, slots=True)
class RankRange:
    """The place of one adapter in a pool of tiles: rank rows `first` to `last`."""

    first: int
    last: int
    serial: int


@dataclass(frozen=True, slots=True)
class RankPages:
    """The place of one adapter in a pool of pages; `width_in` is the widest input of its layers."""

    pages: tuple[int, ...]
    serial: int
    width_in: int


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """Tiles that go through the ranks `first` to `last`.

    Attributes:
        rows: Where the tiles lie among the gathered rows.
        num_tiles: How many there are.
        blocked: `[8, last - first]`, true where a row has no part in a rank; `None` if all have in all.
    """

    first: int
    last: int
    rows: slice
    num_tiles: int
    blocked: Tensor | None


@dataclass(slots=True, eq=False)
class Plan:
    """The rows with adapters, of all that a layer gets.

    Attributes:
        gathered: `[tiles * 8]`, which rows, tile after tile; where a tile is not full its first row again.
        rows: Which rows get something added.
        found: Where these are among the gathered; `None` if they are the same.
        runs: What is to be multiplied.
    """

    gathered: Tensor
    rows: Tensor
    found: Tensor | None
    runs: tuple[Run, ...]
    _input: Tensor | None = field(default=None, repr=False)
    _tiles: Tensor | None = field(default=None, repr=False)

    def tiles(self, hidden: Tensor) -> Tensor:
        """`[tiles * 8, in]` of a layer's input; layers with the same, as queries and keys, gather once."""
        if self._tiles is None or self._input is not hidden:
            self._tiles = hidden.reshape(-1, hidden.shape[-1]).index_select(0, self.gathered)
            self._input = hidden
        return self._tiles

    def add(self, out: Tensor, change: Tensor) -> None:
        """Add what the tiles got, `[tiles * 8, out]`, to a layer's output in place."""
        if self.found is not None:
            change = change.index_select(0, self.found)
        out.view(-1, out.shape[-1]).index_add_(0, self.rows, change)


@dataclass(slots=True, eq=False)
class PagedPlan:
    """The rows with adapters, as the kernels take them.

    Attributes:
        segments: What is to be multiplied.
        serials: Of the adapters.
    """

    segments: SegmentPlan
    serials: frozenset[int]
    _pool: RankPool | None = field(default=None, repr=False)
    _input: Tensor | None = field(default=None, repr=False)
    _ranks: Tensor | None = field(default=None, repr=False)

    def ranks(self, hidden: Tensor, pool: RankPool) -> Tensor:
        """What a pool makes of a layer's input; layers that share both, as queries and keys, do it once."""
        if self._ranks is None or self._input is not hidden or self._pool is not pool:
            self._ranks = shrink(hidden.reshape(-1, hidden.shape[-1]), pool, self.segments)
            self._input, self._pool = hidden, pool
        return self._ranks


StepPlan: TypeAlias = Plan | PagedPlan


@dataclass(frozen=True, slots=True, eq=False)
class Adaptation:
    """The plans of one step: for layers that get all its rows, and for the last, which gets some.

    Attributes:
        tokens: Of all rows.
        kept: Of those that sample; `None` if none of these has an adapter.
    """

    tokens: StepPlan
    kept: StepPlan | None


def adaptation(pieces: Iterable[tuple[Place, range, int | None]], device: torch.device) -> Adaptation | None:
    """Plan a step of which pieces have adapters: each with its rows, and its place if it samples."""
    tokens: dict[Place, list[int]] = {}
    kept: dict[Place, list[int]] = {}
    for ranks, rows, place in pieces:
        tokens.setdefault(ranks, []).extend(rows)
        if place is not None:
            kept.setdefault(ranks, []).append(place)
    if not tokens:
        return None
    return Adaptation(_plan(tokens, device), _plan(kept, device) if kept else None)


def _plan(rows_of: dict[Place, list[int]], device: torch.device) -> StepPlan:
    """Places of one pool are all of one kind."""
    paged = {place: rows for place, rows in rows_of.items() if isinstance(place, RankPages)}
    if paged:
        return _paged_plan(paged, device)
    return _tiled_plan(
        {place: rows for place, rows in rows_of.items() if isinstance(place, RankRange)}, device
    )


def _paged_plan(rows_of: dict[RankPages, list[int]], device: torch.device) -> PagedPlan:
    num_rows = sum(len(rows) for rows in rows_of.values())
    tile = tile_for(num_rows, max(place.width_in for place in rows_of), device)
    by_pages = {RankPlace(place.pages): rows for place, rows in rows_of.items()}
    segments = plan_rows(by_pages, tile=tile, device=device)
    return PagedPlan(segments, frozenset(place.serial for place in rows_of))


def _tiled_plan(rows_of: dict[RankRange, list[int]], device: torch.device) -> Plan:
    gathered: list[int] = []
    found: list[int] = []
    runs: list[Run] = []
    rests: list[tuple[RankRange, list[int]]] = []

    def lay(parts: Sequence[tuple[RankRange, Sequence[int]]]) -> None:
        start = len(gathered)
        gathered.extend(row for _, rows in parts for row in rows)
        found.extend(range(start, len(gathered)))
        gathered.extend([gathered[start]] * (-len(gathered) % TILE_ROWS))
        first, last = parts[0][0].first, parts[-1][0].last
        blocked = _blocked(parts, first, last, device) if len(parts) > 1 else None
        num_tiles = (len(gathered) - start) // TILE_ROWS
        runs.append(Run(first, last, slice(start, len(gathered)), num_tiles, blocked))

    for ranks in sorted(rows_of, key=lambda ranks: ranks.first):
        rows = rows_of[ranks]
        whole = len(rows) - len(rows) % TILE_ROWS
        if whole:
            lay([(ranks, rows[:whole])])
        if whole < len(rows):
            rests.append((ranks, rows[whole:]))
    for tile in _shared_tiles(rests):
        lay(tile)
    rows = [gathered[at] for at in found]
    return Plan(
        gathered=torch.tensor(gathered, device=device),
        rows=torch.tensor(rows, device=device),
        found=None if len(found) == len(gathered) else torch.tensor(found, device=device),
        runs=tuple(runs),
    )


def _shared_tiles(
    rests: Iterable[tuple[RankRange, list[int]]],
) -> list[list[tuple[RankRange, list[int]]]]:
    """Put neighbours of the pool into one tile while there is room and little lies between."""
    tiles: list[list[tuple[RankRange, list[int]]]] = []
    for ranks, rows in rests:
        tile = tiles[-1] if tiles else []
        joins = (
            bool(tile)
            and sum(len(held) for _, held in tile) + len(rows) <= TILE_ROWS
            and ranks.last - tile[0][0].first <= _MOST_RANKS
            and ranks.first - tile[-1][0].last <= _MOST_GAP
        )
        if joins:
            tile.append((ranks, rows))
        else:
            tiles.append([(ranks, rows)])
    return tiles


def _blocked(
    parts: Sequence[tuple[RankRange, Sequence[int]]], first: int, last: int, device: torch.device
) -> Tensor:
    blocked = torch.ones(TILE_ROWS, last - first, dtype=torch.bool)
    at = 0
    for ranks, rows in parts:
        blocked[at : at + len(rows), ranks.first - first : ranks.last - first] = False
        at += len(rows)
    return blocked.to(device)
