"""Tiles: a few products for all adapters of a step, for devices where a launch costs more than the product.

Rows are grouped into tiles of eight. A tile of one adapter is multiplied by that adapter's ranks. A tile of
several adapters is multiplied by the whole range of their ranks, and the ranks of other rows' adapters are
set to zero between the two products. So a batch of decodes, in which every request may have another adapter,
does not take a product per request. Rows are grouped by adapter as in SGMV (Chen et al., Punica,
arXiv:2310.18547, section 4).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hotswap.backends.torch.adapters.slots import RankRange

__all__ = ["Run", "Tiles", "lay_tiles"]

_TILE_ROWS = 8
# The maximum range of ranks of a tile with several adapters; the ranks in between are wasted work.
_MOST_RANKS = 96
# The maximum gap between the ranges of two adapters of a tile.
_MOST_GAP = 16


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """Tiles that are multiplied by the ranks from `first` to before `last`.

    Attributes:
        first: The first rank.
        last: The rank after the last.
        rows: The slice of the gathered rows.
        blocked: `[8, last - first]`, true for ranks of other rows' adapters; `None` for a single adapter.
    """

    first: int
    last: int
    rows: slice
    blocked: Tensor | None


@dataclass(slots=True, eq=False)
class Tiles:
    """The rows of a step that have adapters, in tiles of eight.

    Attributes:
        gathered: `[tiles * 8]`, the rows of each tile; partial tiles are padded with their first row.
        rows: The rows to which the results are added.
        found: Their indices in `gathered`; `None` if there is no padding.
        runs: The products.
    """

    gathered: Tensor
    rows: Tensor
    found: Tensor | None
    runs: tuple[Run, ...]
    _input: Tensor | None = field(default=None, repr=False)
    _hidden: Tensor | None = field(default=None, repr=False)

    def rows_of(self, hidden: Tensor) -> Tensor:
        """Return the gathered rows `[tiles * 8, in]` of a layer's input; cached for layers that share it."""
        if self._hidden is None or self._input is not hidden:
            self._hidden = hidden.reshape(-1, hidden.shape[-1]).index_select(0, self.gathered)
            self._input = hidden
        return self._hidden

    def add(self, out: Tensor, change: Tensor) -> None:
        """Add the results of the tiles, `[tiles * 8, out]`, to a layer's output in place."""
        if self.found is not None:
            change = change.index_select(0, self.found)
        out.view(-1, out.shape[-1]).index_add_(0, self.rows, change)


def lay_tiles(rows_of: Mapping[RankRange, Sequence[int]], device: torch.device) -> Tiles:
    """Group rows into tiles, given the rows of each range of ranks."""
    gathered: list[int] = []
    found: list[int] = []
    runs: list[Run] = []
    rests: list[tuple[RankRange, Sequence[int]]] = []

    def lay(parts: Sequence[tuple[RankRange, Sequence[int]]]) -> None:
        start = len(gathered)
        gathered.extend(row for _, rows in parts for row in rows)
        found.extend(range(start, len(gathered)))
        gathered.extend([gathered[start]] * (-len(gathered) % _TILE_ROWS))
        first, last = parts[0][0].first, parts[-1][0].last
        blocked = _blocked(parts, first, last, device) if len(parts) > 1 else None
        runs.append(Run(first, last, slice(start, len(gathered)), blocked))

    for ranks in sorted(rows_of, key=lambda ranks: ranks.first):
        rows = rows_of[ranks]
        whole = len(rows) - len(rows) % _TILE_ROWS
        if whole:
            lay([(ranks, rows[:whole])])
        if whole < len(rows):
            rests.append((ranks, rows[whole:]))
    for tile in _shared_tiles(rests):
        lay(tile)
    rows = [gathered[at] for at in found]
    return Tiles(
        gathered=torch.tensor(gathered, device=device),
        rows=torch.tensor(rows, device=device),
        found=None if len(found) == len(gathered) else torch.tensor(found, device=device),
        runs=tuple(runs),
    )


def _shared_tiles(
    rests: Iterable[tuple[RankRange, Sequence[int]]],
) -> list[list[tuple[RankRange, Sequence[int]]]]:
    """Put adapters with neighbouring ranges into one tile, within the limits of rows, ranks and gaps."""
    tiles: list[list[tuple[RankRange, Sequence[int]]]] = []
    for ranks, rows in rests:
        tile = tiles[-1] if tiles else []
        joins = (
            bool(tile)
            and sum(len(held) for _, held in tile) + len(rows) <= _TILE_ROWS
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
    blocked = torch.ones(_TILE_ROWS, last - first, dtype=torch.bool)
    at = 0
    for ranks, rows in parts:
        blocked[at : at + len(rows), ranks.first - first : ranks.last - first] = False
        at += len(rows)
    return blocked.to(device)
