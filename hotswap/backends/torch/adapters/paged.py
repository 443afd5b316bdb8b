"""The adapter pool on a GPU: pages of ranks, in the layout of the kernels, shared by layers of one input."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from hotswap.backends.torch.adapters.hook import AdaptedLayer
from hotswap.backends.torch.adapters.peft import AdapterWeights
from hotswap.backends.torch.adapters.plan import PagedPlan, StepPlan
from hotswap.backends.torch.adapters.pool import AdapterPool
from hotswap.backends.torch.adapters.slots import RankPages
from hotswap.backends.torch.adapters.targets import Target
from hotswap.kernels.segmented_lora import (
    PAGE_RANKS,
    PageAllocator,
    RankPlace,
    RankPool,
    expand,
    make_plan,
    segmented_lora,
    tiles_of,
)

__all__ = ["PagedLayer", "PagedPool"]

# Names of sibling layers that usually have the same input. In a model where they do not, each also multiplies
# its input by the others' ranks, which takes time and does not change results.
_FUSED = (("q_proj", "k_proj", "v_proj"), ("query", "key", "value"), ("gate_proj", "up_proj"), ("w1", "w3"))


class _Group:
    """The page pool of layers that share an input.

    Attributes:
        names: The layers.
        pool: Their pages.
        changed_by: The serial numbers of the adapters of each layer. Immutable, and replaced as a whole:
            the engine's thread reads it.
    """

    def __init__(self, names: tuple[str, ...], pool: RankPool) -> None:
        self.names, self.pool = names, pool
        self.changed_by: tuple[frozenset[int], ...] = (frozenset(),) * len(names)

    def put(self, slot: RankPages, weights: AdapterWeights) -> None:
        """Write an adapter's matrices for these layers to its pages; zeros for layers it does not change."""
        parts = [weights.layers.get(name) for name in self.names]
        self.pool.put(
            RankPlace(slot.pages), [None if part is None else (part.down, part.up) for part in parts]
        )
        self.changed_by = tuple(
            known if part is None else known | {slot.serial}
            for known, part in zip(self.changed_by, parts, strict=True)
        )

    def drop(self, slot: RankPages) -> None:
        """Remove an adapter; its pages are overwritten when they are reallocated."""
        self.changed_by = tuple(known - {slot.serial} for known in self.changed_by)


class PagedLayer(AdaptedLayer):
    """A layer whose adapters are in pages: one slice of its group's pool."""

    def __init__(self, target: Target, group: _Group, piece: int) -> None:
        super().__init__(target)
        self._group, self._piece = group, piece

    def _adapt(self, plan: StepPlan, hidden: Tensor, out: Tensor) -> None:
        assert isinstance(plan, PagedPlan), "all slots of a step are of this pool"
        if plan.serials.isdisjoint(self._group.changed_by[self._piece]):
            return
        ranks = plan.ranks(hidden, self._group.pool)
        expand(out.view(-1, out.shape[-1]), ranks, self._group.pool, plan.segments, piece=self._piece)


class PagedPool(AdapterPool[RankPages]):
    """A pool of pages of ranks; an adapter has the same pages in every layer, not necessarily contiguous."""

    alignment = PAGE_RANKS

    def __init__(
        self, targets: Mapping[str, Target], *, num_ranks: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__(targets, num_ranks=num_ranks, dtype=dtype, device=device)
        self._page_allocator = PageAllocator(self.num_ranks // PAGE_RANKS)
        self._width_in = max((target.width_in for target in targets.values()), default=1)
        self._group_of = dict(_groups(targets))
        self._groups: dict[tuple[str, ...], _Group] = {}
        self._layers: list[PagedLayer] = []

    def allocate(self, rank: int, key: bytes = b"") -> RankPages | None:
        pages = self._page_allocator.allocate(rank)
        return None if pages is None else RankPages(pages, self.next_serial(), self._width_in, key)

    def _write(self, slot: RankPages, weights: AdapterWeights) -> None:
        for name in weights.layers:
            if self._group_of[name] not in self._groups:
                self._add(self._group_of[name])
        for group in self._groups.values():
            group.put(slot, weights)

    def _add(self, names: tuple[str, ...]) -> None:
        members = [self.targets[name] for name in names]
        pool = RankPool(
            self._page_allocator.num_pages,
            members[0].width_in,
            [target.width_out for target in members],
            dtype=self.dtype,
            device=self.device,
        )
        self._warm(pool)
        group = self._groups[names] = _Group(names, pool)
        for piece, target in enumerate(members):
            layer = PagedLayer(target, group, piece)
            layer.install()
            self._layers.append(layer)

    def _warm(self, pool: RankPool) -> None:
        """Compile the kernels before a step needs them."""
        if self.device.type != "cuda":
            return
        x = torch.zeros(1, pool.width_in, dtype=self.dtype, device=self.device)
        out = torch.zeros(1, sum(pool.widths), dtype=self.dtype, device=self.device)
        for tile in tiles_of(self._width_in, self.device):
            segmented_lora(out, x, pool, make_plan([0], [RankPlace((0,))], tile=tile, device=self.device))

    def _forget(self, slot: RankPages) -> None:
        self._page_allocator.free(slot.pages)
        for group in self._groups.values():
            group.drop(slot)

    def _clear(self) -> None:
        for layer in self._layers:
            layer.remove()
        self._layers.clear()
        self._groups.clear()


def _groups(targets: Mapping[str, Target]) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield every layer with the layers of its group, itself included."""
    for name, target in targets.items():
        parent, _, own = name.rpartition(".")
        fused = next((names for names in _FUSED if own in names), (own,))
        group = [f"{parent}.{other}" if parent else other for other in fused]
        yield (
            name,
            tuple(
                other
                for other in group
                if other in targets
                and (targets[other].width_in, targets[other].dtype, targets[other].kept_rows)
                == (target.width_in, target.dtype, target.kept_rows)
            ),
        )
