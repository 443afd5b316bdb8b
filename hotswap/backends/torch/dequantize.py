"""Quantised weights made whole again on their way to the modules: stored bytes in, a flat buffer out.

The larger buffer holds the stored bytes at its end and is filled from its beginning, so that no second copy
of a model exists at any time: what is written never reaches what has yet to be read.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hotswap.backends.torch.fp8 import (
    CODE_DTYPE,
    SCALE_DTYPE,
    SCALE_SUFFIX,
    SCHEMES,
    Scheme,
    decode,
    row_blocks,
)
from hotswap.backends.torch.weights import dtype_of, place, tensor_at
from hotswap.errors import ShardCorrupt, UnsupportedModel
from hotswap.kernels.fp8_gemm import pack_into, packed_width
from hotswap.model import Manifest, TensorSpec

__all__ = ["Dequantizer", "original_dtype"]


@dataclass(frozen=True, slots=True)
class _Job:
    """One tensor that is stored, and what becomes of it: decoded if it has scales, else packed or copied."""

    stored: TensorSpec
    scales: TensorSpec | None
    target: TensorSpec
    packs: bool = False

    @property
    def begin(self) -> int:
        """The first stored byte that it needs."""
        parts = (self.stored, self.scales or self.stored)
        return min(part.offset_bytes for part in parts)


class Dequantizer:
    """Turns the stored tensors of a rank into those that the modules want.

    Args:
        manifest: Of a quantised model; it is not trusted.
        rank: Whose tensors.
        dtype: What the model computes in; `None` for the dtype that its weights had before. They go through
            that one in any case, as the weights of a model that was never quantised do.
        keep: Names of matrices that may stay codes and scales; one with a further name that is not among them
            is made whole.
        packs: Whether the codes that stay are laid out for GPUs, see `hotswap.kernels.fp8_gemm.pack`.

    Raises:
        UnsupportedModel: the manifest names a quantisation that this release does not know.
        ShardCorrupt: codes and scales do not belong together.

    Attributes:
        specs: The tensors in the filled buffer.
        size_bytes: The filled part of it.
        room_bytes: How large it must be to hold the stored bytes at first.
        kept: The names of what stays codes; their scales are among `specs`.
        scheme: How weights are grouped.
        before: The dtype that they had.
        as_stored: Whether nothing changes: the stored bytes can be used where they are.
    """

    def __init__(
        self,
        manifest: Manifest,
        *,
        rank: int = 0,
        dtype: torch.dtype | None = None,
        keep: Set[str] = frozenset(),
        packs: bool = False,
    ) -> None:
        self.scheme = _scheme(manifest)
        self.before = original_dtype(manifest)
        stored = _by_offset(manifest.tensors_of(rank))
        known = {spec.name: spec for spec in stored}
        scales = {spec.name: known.get(spec.name + SCALE_SUFFIX) for spec in stored}
        of_others = {its.name for its in scales.values() if its is not None}
        for spec in stored:
            if spec.name not in of_others:
                self._check(spec, scales[spec.name])
        self.kept = _kept(stored, {name for name, its in scales.items() if its is not None} & keep)
        own = {name: its for name, its in scales.items() if its is not None and name not in self.kept}
        owned = {its.name for its in own.values()}
        free = [spec for spec in stored if spec.name not in owned]
        wanted = [(spec, *self._wanted(spec, own.get(spec.name), dtype, packs)) for spec in free]
        self.specs, self.size_bytes = place((s.name, d, shape, _place_of(s)) for s, d, shape in wanted)
        self._jobs = _distinct(
            _Job(spec, own.get(spec.name), target, packs and spec.name in self.kept)
            for spec, target in zip(free, self.specs, strict=True)
        )
        self.as_stored = all(job.target == replace(job.stored, checksum="", rank=0) for job in self._jobs)
        unit = manifest.alignment_bytes
        begin = -(-_lead_bytes(self._jobs) // unit) * unit
        self._stored = slice(begin, begin + manifest.buffer_bytes)
        self.room_bytes = max(self.size_bytes, self._stored.stop)

    def stored_part(self, flat: Tensor) -> Tensor:
        """Return where in a buffer of `room_bytes` the stored bytes are to be read."""
        return flat[self._stored]

    def run(self, stored: Tensor, flat: Tensor) -> None:
        """Fill `flat` from `stored`, a buffer of its own or `stored_part(flat)`, then destroyed. Blocking.

        Both are uint8; `flat` has `size_bytes` or more.

        Raises:
            ShardCorrupt: a tensor lies outside of `stored`.
        """
        for job in self._jobs:
            # Scales may lie where the first rows will be written.
            scales = None if job.scales is None else _cloned(tensor_at(stored, job.scales))
            source, target = tensor_at(stored, job.stored), tensor_at(flat, job.target)
            if not source.is_contiguous():
                source = _cloned(source)
            if job.packs:
                self._pack(source, target)
            elif scales is not None:
                self._decode(source, scales, target)
            elif source.data_ptr() != target.data_ptr() or source.dtype is not target.dtype:
                self._copy(source, target)

    def _decode(self, codes: Tensor, scales: Tensor, target: Tensor) -> None:
        code_rows, scale_rows, rows = (_rows(part) for part in (codes, scales, target))
        for block in row_blocks(rows):
            rows[block] = decode(code_rows[block], scale_rows[block], self.scheme).to(self.before)

    def _pack(self, codes: Tensor, words: Tensor) -> None:
        for block in row_blocks(words):
            pack_into(codes[block].clone(), words[block])

    def _copy(self, source: Tensor, target: Tensor) -> None:
        values, places = source.view(-1), target.view(-1)
        for block in row_blocks(places):
            # A copy in between: source and target may overlap.
            places[block] = values[block].clone()

    def _wanted(
        self, spec: TensorSpec, scales: TensorSpec | None, dtype: torch.dtype | None, packs: bool
    ) -> tuple[torch.dtype, tuple[int, ...]]:
        if spec.name in self.kept and packs:
            return torch.int32, (*spec.shape[:-1], packed_width(spec.shape[-1]))
        if spec.name in self.kept or spec.name.removesuffix(SCALE_SUFFIX) in self.kept:
            return dtype_of(spec), spec.shape
        own = self.before if scales is not None else dtype_of(spec)
        return dtype if dtype is not None and own is self.before else own, spec.shape

    def _check(self, spec: TensorSpec, scales: TensorSpec | None) -> None:
        """Raise `ShardCorrupt` unless a tensor is codes with scales, or neither."""
        if scales is None:
            sound = dtype_of(spec) is not CODE_DTYPE
        else:
            groups = (*spec.shape[:-1], self.scheme.num_groups(spec.shape[-1])) if spec.shape else None
            sound = (
                dtype_of(spec) is CODE_DTYPE and dtype_of(scales) is SCALE_DTYPE and scales.shape == groups
            )
        if not sound:
            raise ShardCorrupt(
                f"Tensor {spec.name!r} ({spec.dtype} {list(spec.shape)}) has no scales that fit "
                f"{self.scheme.name!r}; convert the model again."
            )


def _scheme(manifest: Manifest) -> Scheme:
    if manifest.quantization not in SCHEMES:
        raise UnsupportedModel(
            f"Model {manifest.model!r} is quantised as {manifest.quantization!r}, which this release does "
            "not know; convert it again, or update hotswap."
        )
    return SCHEMES[manifest.quantization]


def original_dtype(manifest: Manifest) -> torch.dtype:
    """Return the dtype that a quantised model's weights had.

    Raises:
        ShardCorrupt: the manifest names none.
    """
    dtype = getattr(torch, manifest.unquantized_dtype, None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ShardCorrupt(
            f"The weights of {manifest.model!r} were of dtype {manifest.unquantized_dtype!r}, which is none; "
            "convert the model again."
        )
    return dtype


def _kept(stored: Sequence[TensorSpec], wanted: Set[str]) -> frozenset[str]:
    """Those of the wanted names whose place has no other names, and that are matrices as they are stored."""
    others = {_place_of(spec) for spec in stored if spec.name not in wanted and spec.size_bytes}
    return frozenset(
        spec.name
        for spec in stored
        if spec.name in wanted
        and len(spec.shape) == 2
        and spec.size_bytes
        and spec.stride == (spec.shape[1], 1)
        and _place_of(spec) not in others
    )


def _by_offset(specs: Sequence[TensorSpec]) -> list[TensorSpec]:
    # An empty tensor lies where another does, and takes no room there.
    return sorted(specs, key=lambda spec: (spec.offset_bytes, spec.size_bytes))


def _distinct(jobs: Iterable[_Job]) -> tuple[_Job, ...]:
    """Every place once, in ascending order both of what is read and of what is written."""
    filled = {_place_of(job.stored): job for job in jobs if job.stored.size_bytes}
    return tuple(filled.values())


def _lead_bytes(jobs: Sequence[_Job]) -> int:
    """How far into the buffer the stored bytes must begin, so that none is overwritten before it was read.

    Each tensor is read and written in blocks at two steady rates, so it is enough that the first and the last
    byte are read before they are overwritten; and nothing may be written where later tensors are read.
    """
    lead, unread = 0, math.inf
    for job in reversed(jobs):
        begin, end = job.target.offset_bytes, job.target.offset_bytes + job.target.size_bytes
        lead = max(
            lead,
            begin - job.stored.offset_bytes,
            end - int(min(unread, job.stored.offset_bytes + job.stored.size_bytes)),
        )
        unread = min(unread, job.begin)
    return lead


def _place_of(spec: TensorSpec) -> tuple[int, int]:
    return spec.offset_bytes, spec.size_bytes


def _cloned(tensor: Tensor) -> Tensor:
    return tensor.clone(memory_format=torch.contiguous_format)


def _rows(tensor: Tensor) -> Tensor:
    return tensor.view(-1, tensor.shape[-1])
