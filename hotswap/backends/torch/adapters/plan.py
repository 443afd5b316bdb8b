"""The adapter plan of a step: which rows are multiplied by which ranks of the pool.

On a CPU a kernel multiplies each row by the ranks of its adapter (`hotswap.kernels.low_rank`). On a GPU a
kernel multiplies the rows of each adapter together (`hotswap.kernels.segmented_lora`). Without these kernels
rows are multiplied in `tiles`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch import Tensor

from hotswap.backends.torch.adapters.slots import AdapterSlot, RankPages, RankRange
from hotswap.backends.torch.adapters.tiles import Tiles, lay_tiles
from hotswap.kernels.segmented_lora import RankPlace, RankPool, SegmentPlan, plan_rows, shrink, tile_for

__all__ = ["Adaptation", "PagedPlan", "RangePlan", "StepPlan", "adaptation"]


@dataclass(slots=True, eq=False)
class RangePlan:
    """The plan of a step for a pool of ranges.

    Attributes:
        rows_of: The rows of each range.
        device: The device of the rows.
    """

    rows_of: Mapping[RankRange, Sequence[int]]
    device: torch.device
    _spans: dict[frozenset[RankRange], Tensor | None] = field(
        default_factory=dict[frozenset[RankRange], "Tensor | None"], repr=False
    )
    _tiles: Tiles | None = field(default=None, repr=False)

    def spans(self, changed_by: frozenset[RankRange]) -> Tensor | None:
        """Return the rows of a step that adapters of a layer change; `None` if there are none.

        Args:
            changed_by: The slots of the adapters of the layer.

        Returns:
            `[n, 3]`, int32: a row, its first rank and the one after its last. Rows of one adapter are
            contiguous; the longest ranges come first, so that threads finish at about the same time.
        """
        if changed_by not in self._spans:
            longest = sorted(
                self.rows_of.keys() & changed_by, key=lambda ranks: (ranks.first - ranks.last, ranks.first)
            )
            spans = [(row, ranks.first, ranks.last) for ranks in longest for row in self.rows_of[ranks]]
            self._spans[changed_by] = torch.tensor(spans, dtype=torch.int32) if spans else None
        return self._spans[changed_by]

    def tiles(self) -> Tiles:
        """Return the plan in tiles."""
        if self._tiles is None:
            self._tiles = lay_tiles(self.rows_of, self.device)
        return self._tiles


@dataclass(slots=True, eq=False)
class PagedPlan:
    """The plan of a step for a pool of pages.

    Attributes:
        segments: The segments of rows, in the form that the kernels take.
        serials: The serial numbers of the adapters.
    """

    segments: SegmentPlan
    serials: frozenset[int]
    _pool: RankPool | None = field(default=None, repr=False)
    _input: Tensor | None = field(default=None, repr=False)
    _ranks: Tensor | None = field(default=None, repr=False)

    def ranks(self, hidden: Tensor, pool: RankPool) -> Tensor:
        """Return `hidden` multiplied by a pool's down matrices; cached for layers that share both."""
        if self._ranks is None or self._input is not hidden or self._pool is not pool:
            self._ranks = shrink(hidden.reshape(-1, hidden.shape[-1]), pool, self.segments)
            self._input, self._pool = hidden, pool
        return self._ranks


StepPlan: TypeAlias = RangePlan | PagedPlan


@dataclass(frozen=True, slots=True, eq=False)
class Adaptation:
    """The adapter plans of one step.

    Attributes:
        tokens: For layers whose input is all rows.
        kept: For the output head, whose input is the rows whose logits are needed; `None` if none of them has
            an adapter.
    """

    tokens: StepPlan
    kept: StepPlan | None


def adaptation(pieces: Iterable[tuple[AdapterSlot, range, range]], device: torch.device) -> Adaptation | None:
    """Return the plans of a step; `None` if it has no adapters.

    Args:
        pieces: For each piece with an adapter: the slot, its rows in the step, and its rows among those whose
            logits are needed.
        device: The device of the step.
    """
    tokens: dict[AdapterSlot, list[int]] = {}
    kept: dict[AdapterSlot, list[int]] = {}
    for slot, rows, kept_rows in pieces:
        tokens.setdefault(slot, []).extend(rows)
        if kept_rows:
            kept.setdefault(slot, []).extend(kept_rows)
    if not tokens:
        return None
    return Adaptation(_plan(tokens, device), _plan(kept, device) if kept else None)


def _plan(rows_of: dict[AdapterSlot, list[int]], device: torch.device) -> StepPlan:
    """Return the plan of rows; all slots of a pool have the same type."""
    paged = {slot: rows for slot, rows in rows_of.items() if isinstance(slot, RankPages)}
    if paged:
        return _paged_plan(paged, device)
    ranges = {slot: rows for slot, rows in rows_of.items() if isinstance(slot, RankRange)}
    return RangePlan(ranges, device)


def _paged_plan(rows_of: dict[RankPages, list[int]], device: torch.device) -> PagedPlan:
    num_rows = sum(len(rows) for rows in rows_of.values())
    tile = tile_for(num_rows, max(slot.width_in for slot in rows_of), device)
    by_pages = {RankPlace(slot.pages): rows for slot, rows in rows_of.items()}
    segments = plan_rows(by_pages, tile=tile, device=device)
    return PagedPlan(segments, frozenset(slot.serial for slot in rows_of))
