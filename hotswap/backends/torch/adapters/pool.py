"""The adapters of one served model on its device: one matrix a layer, in which each has a range of ranks."""

from __future__ import annotations

import itertools
import mmap
import threading
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from hotswap.backends.torch.adapters.peft import AdapterWeights, LowRank
from hotswap.backends.torch.adapters.plan import Plan, RankRange, Run
from hotswap.backends.torch.adapters.targets import Target
from hotswap.backends.torch.attention import current
from hotswap.backends.torch.linear import kernels, product
from hotswap.errors import UnsupportedAdapter

__all__ = ["AdaptedLayer", "AdapterPool", "bytes_per_rank"]

# Ranges begin at multiples of it: sums of bf16 are taken in pairs, which must not depend on the place.
_ALIGNMENT = 8

_SERIALS = itertools.count(1)


class AdaptedLayer:
    """What computes a linear layer that adapters change, in place of its `forward` and by calling it.

    All ranks are finite at any time, those that nobody has included: what is not to be added is zero times a
    number.
    """

    def __init__(self, target: Target, num_ranks: int, dtype: torch.dtype, device: torch.device) -> None:
        self._layer, self._kept_rows = target.layer, target.kept_rows
        self._former: object = vars(target.layer).get("forward")
        self._inner: Callable[[Tensor], Tensor] = target.layer.forward
        self._down = _zeros(num_ranks, target.width_in, dtype, device)
        self._up = _zeros(num_ranks, target.width_out, dtype, device)
        # Replaced, never changed: another thread is reading them.
        self._changed_by: frozenset[RankRange] = frozenset()
        self._parts: dict[tuple[int, int], tuple[Tensor, Tensor] | None] = {}

    def install(self) -> None:
        """Take the place of the layer's `forward`; a step that is under way may see it at once."""
        vars(self._layer)["forward"] = self

    def remove(self) -> None:
        """Leave the layer as it was."""
        if self._former is None:
            vars(self._layer).pop("forward", None)
        else:
            vars(self._layer)["forward"] = self._former

    def put(self, ranks: RankRange, weights: LowRank | None) -> None:
        """Write an adapter's part to its range; `None` if it does not change this layer."""
        rank = 0 if weights is None else weights.rank
        if weights is not None:
            self._down[ranks.first : ranks.first + rank] = weights.down
            self._up[ranks.first : ranks.first + rank] = weights.up
            self._changed_by |= {ranks}
        self._down[ranks.first + rank : ranks.last] = 0
        self._up[ranks.first + rank : ranks.last] = 0
        self._parts = {}

    def drop(self, ranks: RankRange) -> None:
        """Forget an adapter; its numbers stay until the range is given anew."""
        self._changed_by -= {ranks}
        self._parts = {}

    def __call__(self, hidden: Tensor) -> Tensor:
        """Return the layer's output, with what its adapters add to the rows of the running step."""
        out = self._inner(hidden)
        step = current()
        if step is not None and step.adapters is not None:
            plan = step.adapters.kept if self._kept_rows else step.adapters.tokens
            if plan is not None:
                self._adapt(plan, hidden, out)
        return out

    def _adapt(self, plan: Plan, hidden: Tensor, out: Tensor) -> None:
        parts = self._parts
        used = [(run, part) for run in plan.runs if (part := self._part(run, parts)) is not None]
        if not used:
            return
        tiles = plan.tiles(hidden)
        make = torch.empty if len(used) == len(plan.runs) else torch.zeros
        change = make(len(tiles), out.shape[-1], dtype=tiles.dtype, device=tiles.device)
        for run, (down, up) in used:
            _multiply(tiles[run.rows], down, up, run, change[run.rows])
        plan.add(out, change)

    def _part(
        self, run: Run, parts: dict[tuple[int, int], tuple[Tensor, Tensor] | None]
    ) -> tuple[Tensor, Tensor] | None:
        """`[ranks, in]` and `[ranks, out]` of a run; `None` if nobody in it changes this layer."""
        key = (run.first, run.last)
        if key not in parts:
            used = any(r.first < run.last and run.first < r.last for r in self._changed_by)
            parts[key] = (self._down[slice(*key)], self._up[slice(*key)]) if used else None
        return parts[key]


def _zeros(rows: int, width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros that take no memory on a CPU until they are written to; torch would write them at once.

    In small pages: an adapter writes a little to many matrices, and clearing a huge page in each of them
    would take longer than everything else.
    """
    if device.type != "cpu":
        return torch.zeros(rows, width, dtype=dtype, device=device)
    blank = mmap.mmap(-1, max(1, rows * width * dtype.itemsize), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        blank.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(blank, dtype=dtype, count=rows * width).view(rows, width)


def _multiply(rows: Tensor, down: Tensor, up: Tensor, run: Run, out: Tensor) -> None:
    """`out = rows @ down.T @ up`, with what a row has no part in set to zero in between."""
    if rows.device.type == "cpu" and rows.dtype in kernels():
        inner = product(rows, down)
        if run.blocked is not None:
            inner.masked_fill_(run.blocked, 0)
        out.copy_(product(inner, up.t()))
        return
    inner = torch.mm(rows, down.t())
    if run.blocked is not None:
        inner.masked_fill_(run.blocked, 0)
    torch.mm(inner, up, out=out)


class AdapterPool:
    """Places for adapters, `num_ranks` ranks in all; belongs to one loaded model.

    Methods that write numbers may be called from any thread, also while steps run: nobody reads a range that
    is being written. `put` and `give` are called one at a time.
    """

    def __init__(
        self, targets: Mapping[str, Target], *, num_ranks: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.targets = targets
        self.num_ranks = num_ranks - num_ranks % _ALIGNMENT
        self.dtype, self._device = dtype, device
        self._layers: dict[str, AdaptedLayer] = {}
        self._taken: list[RankRange] = []
        self._closed = False
        self._lock = threading.Lock()

    def check(self, name: str, weights: AdapterWeights) -> None:
        """Raise `UnsupportedAdapter` if an adapter does not fit the model, or would not fit an empty pool."""
        if _rounded(weights.rank) > self.num_ranks:
            raise UnsupportedAdapter(
                f"Adapter {name!r} has rank {weights.rank}, and its engine has room for {self.num_ranks} "
                "ranks in all; give the engine more adapter_bytes."
            )
        for layer, pair in weights.layers.items():
            target = self.targets.get(layer)
            if target is None:
                raise UnsupportedAdapter(
                    f"Adapter {name!r} changes {layer!r}, which is no linear layer of its model that can be "
                    "changed for some requests alone; it belongs to another model, or must be merged."
                )
            found, wanted = (pair.down.shape[1], pair.up.shape[1]), (target.width_in, target.width_out)
            if found != wanted:
                raise UnsupportedAdapter(
                    f"Adapter {name!r} has widths {found} for {layer!r}, which has {wanted}; it belongs to "
                    "another model."
                )
            if target.dtype is not self.dtype:
                raise UnsupportedAdapter(
                    f"Adapter {name!r} changes {layer!r}, which is {target.dtype} in a model that has "
                    f"adapters in {self.dtype}; merge it into the model."
                )

    def take(self, rank: int) -> RankRange | None:
        """Hand out the first range that holds `rank`; `None` if there is none."""
        need, at = _rounded(rank), 0
        for taken in (*self._taken, RankRange(self.num_ranks, self.num_ranks, 0)):
            if taken.first - at >= need:
                ranks = RankRange(at, at + need, next(_SERIALS))
                self._taken = sorted([*self._taken, ranks], key=lambda ranks: ranks.first)
                return ranks
            at = taken.last
        return None

    def put(self, ranks: RankRange, weights: AdapterWeights) -> None:
        """Write an adapter to a range that was taken; it can be used afterwards."""
        with self._lock, torch.inference_mode(False), torch.no_grad():
            if self._closed:
                return
            for name in weights.layers.keys() - self._layers.keys():
                layer = AdaptedLayer(self.targets[name], self.num_ranks, self.dtype, self._device)
                layer.install()
                self._layers[name] = layer
            for name, layer in self._layers.items():
                layer.put(ranks, weights.layers.get(name))

    def give(self, ranks: RankRange) -> None:
        """Take a range back."""
        self._taken = [taken for taken in self._taken if taken != ranks]
        for layer in self._layers.values():
            layer.drop(ranks)

    def close(self) -> None:
        """Leave the model as it was and free the memory."""
        with self._lock:
            self._closed = True
            for layer in self._layers.values():
                layer.remove()
            self._layers.clear()
            self._taken = []


def _rounded(rank: int) -> int:
    """The ranks that an adapter takes."""
    return -(-rank // _ALIGNMENT) * _ALIGNMENT


def bytes_per_rank(targets: Mapping[str, Target], dtype: torch.dtype) -> int:
    """What one rank of all layers takes."""
    return sum(target.width_in + target.width_out for target in targets.values()) * dtype.itemsize
