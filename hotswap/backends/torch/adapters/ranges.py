"""The adapter pool on a CPU, or a GPU without kernels: one matrix per layer, a range of ranks per adapter.

The kernel multiplies a row by the ranks of its adapter in an order that depends neither on the other rows of
the step nor on the position of the range. Without a kernel, `tiles` compute all adapters in few products.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from hotswap.backends.torch.adapters.hook import AdaptedLayer
from hotswap.backends.torch.adapters.peft import AdapterWeights, LowRank
from hotswap.backends.torch.adapters.plan import RangePlan, StepPlan
from hotswap.backends.torch.adapters.pool import AdapterPool
from hotswap.backends.torch.adapters.slots import RankRange
from hotswap.backends.torch.adapters.targets import Target
from hotswap.backends.torch.adapters.tiles import Run, Tiles
from hotswap.backends.torch.buffers import host_bytes
from hotswap.kernels.low_rank import ALIGNMENT, DTYPES, add_low_rank, compile_for

__all__ = ["RangeLayer", "RangePool", "goes_by_rows"]


class RangeLayer(AdaptedLayer):
    """A layer whose adapters are ranges of one matrix.

    All ranks are finite at any time, unused ones included: tiles multiply them by zero.
    """

    def __init__(self, target: Target, num_ranks: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(target)
        self._down = _zeros(num_ranks, target.width_in, dtype, device)
        self._up = _zeros(num_ranks, target.width_out, dtype, device)
        # Immutable, and replaced as a whole: the engine's thread reads them.
        self._changed_by: frozenset[RankRange] = frozenset()
        self._matrices: dict[tuple[int, int], tuple[Tensor, Tensor] | None] = {}

    def put(self, ranks: RankRange, weights: LowRank | None) -> None:
        """Write an adapter's matrices to its range; `None` if it does not change this layer."""
        rank = 0 if weights is None else weights.rank
        if weights is not None:
            self._down[ranks.first : ranks.first + rank] = weights.down
            self._up[ranks.first : ranks.first + rank] = weights.up
            self._changed_by |= {ranks}
        self._down[ranks.first + rank : ranks.last] = 0
        self._up[ranks.first + rank : ranks.last] = 0
        self._matrices = {}

    def drop(self, ranks: RankRange) -> None:
        """Remove an adapter; its range is overwritten when it is reallocated."""
        self._changed_by -= {ranks}
        self._matrices = {}

    def _adapt(self, plan: StepPlan, hidden: Tensor, out: Tensor) -> None:
        assert isinstance(plan, RangePlan), "all slots of a step are of this pool"
        if goes_by_rows(self._down.dtype, self._down.device):
            spans = plan.spans(self._changed_by)
            if spans is not None:
                rows, sums = hidden.reshape(-1, hidden.shape[-1]), out.view(-1, out.shape[-1])
                add_low_rank(rows, sums, self._down, self._up, spans)
        else:
            self._adapt_tiles(plan.tiles(), hidden, out)

    def _adapt_tiles(self, tiles: Tiles, hidden: Tensor, out: Tensor) -> None:
        known = self._matrices
        used = [(run, pair) for run in tiles.runs if (pair := self._matrices_of(run, known)) is not None]
        if not used:
            return
        rows = tiles.rows_of(hidden)
        make = torch.empty if len(used) == len(tiles.runs) else torch.zeros
        change = make(len(rows), out.shape[-1], dtype=rows.dtype, device=rows.device)
        for run, (down, up) in used:
            _multiply(rows[run.rows], down, up, run, change[run.rows])
        tiles.add(out, change)

    def _matrices_of(
        self, run: Run, known: dict[tuple[int, int], tuple[Tensor, Tensor] | None]
    ) -> tuple[Tensor, Tensor] | None:
        """Return `[ranks, in]` and `[ranks, out]` of a run; `None` if no adapter in it changes this layer."""
        key = (run.first, run.last)
        if key not in known:
            used = any(r.first < run.last and run.first < r.last for r in self._changed_by)
            known[key] = (self._down[slice(*key)], self._up[slice(*key)]) if used else None
        return known[key]


def goes_by_rows(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether there is a kernel that multiplies each row by its own ranks."""
    return device.type == "cpu" and dtype in DTYPES


def _zeros(rows: int, width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return zeros, whose pages on a CPU are allocated when they are first written, unlike torch's.

    Without huge pages: an adapter writes a little to many matrices, and clearing a huge page in each of them
    would take most of the time.
    """
    if device.type != "cpu":
        return torch.zeros(rows, width, dtype=dtype, device=device)
    return host_bytes(rows * width * dtype.itemsize, huge=False).view(dtype).view(rows, width)


def _multiply(rows: Tensor, down: Tensor, up: Tensor, run: Run, out: Tensor) -> None:
    """Compute `out = rows @ down.T @ up`, with the ranks of other rows' adapters set to zero in between."""
    inner = torch.mm(rows, down.t())
    if run.blocked is not None:
        inner.masked_fill_(run.blocked, 0)
    torch.mm(inner, up, out=out)


class RangePool(AdapterPool[RankRange]):
    """A pool of ranges of ranks; an adapter has the same range in every layer."""

    alignment = ALIGNMENT

    def __init__(
        self, targets: Mapping[str, Target], *, num_ranks: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__(targets, num_ranks=num_ranks, dtype=dtype, device=device)
        self._taken: list[RankRange] = []
        self._layers: dict[str, RangeLayer] = {}

    def allocate(self, rank: int, key: bytes = b"") -> RankRange | None:
        need, at = self.rounded(rank), 0
        for taken in (*self._taken, RankRange(self.num_ranks, self.num_ranks, 0)):
            if taken.first - at >= need:
                ranks = RankRange(at, at + need, self.next_serial(), key)
                self._taken = sorted([*self._taken, ranks], key=lambda ranks: ranks.first)
                return ranks
            at = taken.last
        return None

    def _write(self, slot: RankRange, weights: AdapterWeights) -> None:
        if goes_by_rows(self.dtype, self.device):
            compile_for(self.dtype)
        for name in weights.layers.keys() - self._layers.keys():
            layer = RangeLayer(self.targets[name], self.num_ranks, self.dtype, self.device)
            layer.install()
            self._layers[name] = layer
        for name, layer in self._layers.items():
            layer.put(slot, weights.layers.get(name))

    def _forget(self, slot: RankRange) -> None:
        self._taken = [taken for taken in self._taken if taken != slot]
        for layer in tuple(self._layers.values()):  # another thread may be adding some
            layer.drop(slot)

    def _clear(self) -> None:
        for layer in self._layers.values():
            layer.remove()
        self._layers.clear()
        self._taken = []
