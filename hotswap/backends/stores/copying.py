"""Copying an open checkpoint into the buffers of all ranks, in one pass over its tensors.

Weights with which no model can answer are refused on the way: NaN, and infinity where it cannot be.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias, cast

import torch
from torch import Tensor

from hotswap.backends.stores.checkpoint import not_finite
from hotswap.backends.stores.slicing import Cut, Shape, cuts
from hotswap.backends.stores.streaming import Blueprint, Source
from hotswap.backends.stores.writer import RankWriter
from hotswap.backends.torch.weights import place
from hotswap.model import TensorSpec

__all__ = ["Copy", "Transform", "check_finite"]


_Out: TypeAlias = tuple[str, torch.dtype, Shape]


class Transform(Protocol):
    """Turns one tensor into the tensors that are stored in its place, for instance values and scales.

    It is applied to a rank's part of a tensor, in pieces of some rows (indices of the first dimension). The
    result must not depend on the pieces: row i of it depends on row i of the tensor only. It is called on the
    meta device first, for dtypes and shapes.

    Attributes:
        key: Identifies the transform; a conversion is not resumed with another.
    """

    key: str

    def __call__(self, name: str, tensor: Tensor, /) -> Sequence[tuple[str, Tensor]]:
        """Return the tensors with their names. The first may be large; the others are kept in memory."""
        ...


@dataclass(frozen=True, slots=True)
class _Job:
    """One tensor of the module, its cut, and for each rank the places of the stored tensors."""

    name: str
    source: Source
    cut: Cut | None
    places: list[list[TensorSpec]] = field(default_factory=list[list[TensorSpec]])


class Copy:
    """The plan of a copy. `tensors` and `buffer_bytes` are as in a `Manifest`; `where` is the checkpoint."""

    def __init__(
        self, blueprint: Blueprint, world_size: int, transform: Transform | None, *, where: str
    ) -> None:
        self._where = where
        self._buffers = {name for name, _ in blueprint.module.named_buffers()}
        self.world_size = world_size
        self._transform = transform
        sources = blueprint.sources
        found = cuts(blueprint.module, {name: one.shape for name, one in sources.items()}, world_size)
        # Tied names are one job, unless the plan cuts them differently.
        self._jobs: dict[tuple[int, Cut | None], _Job] = {}
        self._names: list[tuple[str, _Job]] = []
        for name, source in sources.items():
            cut = found.get(name)
            job = self._jobs.setdefault((id(source), cut), _Job(name, source, cut))
            self._names.append((name, job))
        placed = [self._place(rank) for rank in range(world_size)]
        self.tensors: tuple[TensorSpec, ...] = tuple(spec for specs, _ in placed for spec in specs)
        self.buffer_bytes = max(end for _, end in placed)
        largest = max(sources.values(), key=lambda one: math.prod(one.shape), default=None)
        self.item_bytes = largest.dtype.itemsize if largest is not None else 0

    def run(self, ranks: Sequence[RankWriter]) -> None:
        """Fill the ranks' buffers; tensors that an earlier writer has finished are not read again.

        Raises:
            ShardCorrupt: a weight is NaN, or infinite where it cannot be; see `check_finite`.
        """
        for job in self._jobs.values():
            if any(not _is_finished(rank, job.places[rank.rank]) for rank in ranks):
                self._copy(job, ranks)

    def _place(self, rank: int) -> tuple[tuple[TensorSpec, ...], int]:
        """Lay out the buffer of one rank, and add the places to the jobs."""
        made = [(job, index, out) for name, job in self._names for index, out in self._made(name, job, rank)]
        specs, end = place(((*out, (id(job), index)) for job, index, out in made), rank=rank)
        for (job, index, _), spec in zip(made, specs, strict=True):
            if len(job.places) == rank:
                job.places.append([])
            if len(job.places[rank]) == index:  # else it is a tied name
                job.places[rank].append(spec)
        return specs, end

    def _made(self, name: str, job: _Job, rank: int) -> Iterator[tuple[int, _Out]]:
        """Name, dtype and shape of each tensor that is stored for a rank's part of a tensor."""
        shape = job.cut.shape(job.source.shape, rank, self.world_size) if job.cut else job.source.shape
        part = torch.empty(shape, dtype=job.source.dtype, device="meta")
        for index, (made, tensor) in enumerate(self._transformed(job.name, part)):
            tied = name + made.removeprefix(job.name) if made.startswith(job.name) else made
            yield index, (tied, tensor.dtype, tuple(tensor.shape))

    def _copy(self, job: _Job, ranks: Sequence[RankWriter]) -> None:
        held: dict[int, list[list[Tensor]]] = {}
        for rank in ranks:
            rank.skip_to(job.places[rank.rank][0].offset_bytes)
            held[rank.rank] = [[] for _ in job.places[rank.rank][1:]]
        is_matrix = len(job.source.shape) > 1 and job.name not in self._buffers
        for start, rows in job.source.pieces():
            check_finite(self._where, job.name, rows, start, is_matrix=is_matrix)
            for rank in ranks:
                first, *others = self._transformed(job.name, self._part(job, rows, start, rank.rank))
                rank.write(_bytes_of(first[1]))
                for tensors, (_, tensor) in zip(held[rank.rank], others, strict=True):
                    tensors.append(tensor)
                del first  # before the next piece is read: it may be large
            del rows
        for rank in ranks:
            for spec, tensors in zip(job.places[rank.rank][1:], held[rank.rank], strict=True):
                rank.skip_to(spec.offset_bytes)
                for tensor in tensors:
                    rank.write(_bytes_of(tensor))

    def _part(self, job: _Job, rows: Tensor, start: int, rank: int) -> Tensor:
        if job.cut is None:
            return rows
        return job.cut.part(rows, start, job.source.shape, rank, self.world_size)

    def _transformed(self, name: str, tensor: Tensor) -> Sequence[tuple[str, Tensor]]:
        return [(name, tensor)] if self._transform is None else self._transform(name, tensor)


def _is_finished(rank: RankWriter, places: Sequence[TensorSpec]) -> bool:
    return rank.finished_bytes >= max(place.offset_bytes + place.size_bytes for place in places)


def _bytes_of(tensor: Tensor) -> memoryview:
    flat = tensor.detach().contiguous().flatten().view(torch.uint8)
    return cast("memoryview", cast("Any", flat.numpy()).data)


def check_finite(where: str, name: str, rows: Tensor, first_row: int, *, is_matrix: bool) -> None:
    """Check a piece of a checkpoint's tensor that begins at `first_row`.

    NaN is refused everywhere, infinity in matrices: biases and masks may have it. FP8, integers and complex
    numbers are not looked at. It takes one pass at 5 to 9 GB/s on a core (bf16, EPYC).

    Raises:
        ShardCorrupt: naming the tensor, and the place of the first such number.
    """
    if not rows.is_floating_point() or rows.dtype.itemsize == 1 or not rows.numel():
        return
    least, most = rows.aminmax()  # both are NaN if one number is
    if least.isfinite() and most.isfinite():
        return
    if not is_matrix and not least.isnan():
        return
    found = rows.isnan() if least.isnan() else rows.isinf()
    place = [int(index) for index in found.nonzero()[0]]
    if place:
        place[0] += first_row
    what = "NaN" if least.isnan() else "infinite"
    raise not_finite(name, where, what, place, str(rows.dtype).removeprefix("torch."))
