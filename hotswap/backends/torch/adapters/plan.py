"""Which rows of a step go through which ranks of the pool.

On a CPU each row goes through the ranks of its own adapter (`hotswap.kernels.low_rank`), on a GPU each
adapter takes its rows (`hotswap.kernels.segmented_lora`), and where there are kernels for neither, rows go in
`tiles`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch import Tensor

from hotswap.backends.torch.adapters.places import Place, RankPages, RankRange
from hotswap.backends.torch.adapters.tiles import Tiles, lay_tiles
from hotswap.kernels.segmented_lora import RankPlace, RankPool, SegmentPlan, plan_rows, shrink, tile_for

__all__ = ["Adaptation", "PagedPlan", "RangePlan", "StepPlan", "adaptation"]


@dataclass(slots=True, eq=False)
class RangePlan:
    """The rows with adapters, whose places are ranges.

    Attributes:
        rows_of: Which rows go through which range.
        device: Where the rows are.
    """

    rows_of: Mapping[RankRange, Sequence[int]]
    device: torch.device
    _spans: dict[frozenset[RankRange], Tensor | None] = field(
        default_factory=dict[frozenset[RankRange], "Tensor | None"], repr=False
    )
    _tiles: Tiles | None = field(default=None, repr=False)

    def spans(self, changed_by: frozenset[RankRange]) -> Tensor | None:
        """What of a step changes a layer that some adapters change, or `None` if nothing does.

        Returns:
            `[n, 3]`, int32: a row, its first rank and the one after its last. Rows of one adapter follow each
            other; the longest ranges come first, so that several threads end together.
        """
        if changed_by not in self._spans:
            longest = sorted(
                self.rows_of.keys() & changed_by, key=lambda ranks: (ranks.first - ranks.last, ranks.first)
            )
            spans = [(row, ranks.first, ranks.last) for ranks in longest for row in self.rows_of[ranks]]
            self._spans[changed_by] = torch.tensor(spans, dtype=torch.int32) if spans else None
        return self._spans[changed_by]

    def tiles(self) -> Tiles:
        """The same in tiles."""
        if self._tiles is None:
            self._tiles = lay_tiles(self.rows_of, self.device)
        return self._tiles


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


StepPlan: TypeAlias = RangePlan | PagedPlan


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
    ranges = {place: rows for place, rows in rows_of.items() if isinstance(place, RankRange)}
    return RangePlan(ranges, device)


def _paged_plan(rows_of: dict[RankPages, list[int]], device: torch.device) -> PagedPlan:
    num_rows = sum(len(rows) for rows in rows_of.values())
    tile = tile_for(num_rows, max(place.width_in for place in rows_of), device)
    by_pages = {RankPlace(place.pages): rows for place, rows in rows_of.items()}
    segments = plan_rows(by_pages, tile=tile, device=device)
    return PagedPlan(segments, frozenset(place.serial for place in rows_of))
