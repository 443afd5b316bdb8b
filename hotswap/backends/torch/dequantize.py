"""Dequantizes stored weights at load: stored bytes in, a flat buffer of dequantized tensors out.

Works within one buffer: the stored bytes are at its end and the results are written from its beginning, so
that memory never contains two copies of a model. Writes never reach bytes that are still to be read.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hotswap.backends.torch.fp8 import (
    FP8_DTYPE,
    SCALE_DTYPE,
    SCALE_SUFFIX,
    SCHEMES,
    Scheme,
    dequantize,
    row_blocks,
)
from hotswap.backends.torch.weights import dtype_of, place, tensor_at
from hotswap.errors import ShardCorrupt, UnsupportedModel
from hotswap.kernels.fp8_gemm import pack_into, packed_width
from hotswap.model import Manifest, TensorSpec

__all__ = ["Dequantizer", "original_dtype"]


@dataclass(frozen=True, slots=True)
class _Job:
    """The conversion of one stored tensor: dequantized if it has scales, else packed or copied."""

    stored: TensorSpec
    scales: TensorSpec | None
    target: TensorSpec
    packs: bool = False

    @property
    def begin(self) -> int:
        """The offset of the first stored byte that it reads."""
        parts = (self.stored, self.scales or self.stored)
        return min(part.offset_bytes for part in parts)


class Dequantizer:
    """Converts the stored tensors of one rank to the tensors that the modules need.

    Args:
        manifest: The manifest of a quantized model; it is not trusted.
        rank: The rank whose tensors are converted.
        dtype: The dtype that the model computes in; `None` for the dtype of the weights before they were
            quantized. Weights are rounded to that dtype first in any case, like those of a model that was
            never quantized.
        keep: Names of matrices that may stay quantized. A matrix that is tied to a name outside this set is
            dequantized.
        packs: Whether kept values are packed for GPUs, see `hotswap.kernels.fp8_gemm.pack`.

    Raises:
        UnsupportedModel: the manifest names a quantization scheme that this release does not support.
        ShardCorrupt: quantized values and scales do not match.

    Attributes:
        specs: The tensors in the filled buffer.
        size_bytes: The size of the results.
        buffer_bytes: The size of a buffer that has room for the stored bytes too.
        kept: The names of the matrices that stay quantized; their scales are among `specs`.
        scheme: The quantization scheme.
        original_dtype: The dtype of the weights before they were quantized.
        as_stored: Whether no tensor changes, so that the stored bytes can be used in place.
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
        self.original_dtype = original_dtype(manifest)
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
        self.specs, self.size_bytes = place((s.name, d, shape, _location(s)) for s, d, shape in wanted)
        self._jobs = _distinct(
            _Job(spec, own.get(spec.name), target, packs and spec.name in self.kept)
            for spec, target in zip(free, self.specs, strict=True)
        )
        self.as_stored = all(job.target == replace(job.stored, checksum="", rank=0) for job in self._jobs)
        unit = manifest.alignment_bytes
        begin = -(-_lead_bytes(self._jobs) // unit) * unit
        self._stored = slice(begin, begin + manifest.buffer_bytes)
        self.buffer_bytes = max(self.size_bytes, self._stored.stop)

    def stored_part(self, flat: Tensor) -> Tensor:
        """Return the part of a buffer of `buffer_bytes` into which the stored bytes must be read."""
        return flat[self._stored]

    def run(self, stored: Tensor, flat: Tensor) -> None:
        """Fill `flat` from `stored`. Blocking.

        Args:
            stored: uint8, a separate buffer or `stored_part(flat)`, which is then overwritten.
            flat: uint8, at least `size_bytes`.

        Raises:
            ShardCorrupt: a tensor lies outside `stored`.
        """
        for job in self._jobs:
            # The first rows may be written over the scales.
            scales = None if job.scales is None else _cloned(tensor_at(stored, job.scales))
            source, target = tensor_at(stored, job.stored), tensor_at(flat, job.target)
            if not source.is_contiguous():
                source = _cloned(source)
            if job.packs:
                self._pack(source, target)
            elif scales is not None:
                self._dequantize(source, scales, target)
            elif source.data_ptr() != target.data_ptr() or source.dtype is not target.dtype:
                self._copy(source, target)

    def _dequantize(self, quantized: Tensor, scales: Tensor, target: Tensor) -> None:
        value_rows, scale_rows, rows = (_rows(part) for part in (quantized, scales, target))
        for block in row_blocks(rows):
            part = dequantize(value_rows[block], scale_rows[block], self.scheme)
            rows[block] = part.to(self.original_dtype)

    def _pack(self, quantized: Tensor, words: Tensor) -> None:
        for block in row_blocks(words):
            pack_into(quantized[block].clone(), words[block])

    def _copy(self, source: Tensor, target: Tensor) -> None:
        values, targets = source.view(-1), target.view(-1)
        for block in row_blocks(targets):
            # A copy in between: source and target may overlap.
            targets[block] = values[block].clone()

    def _wanted(
        self, spec: TensorSpec, scales: TensorSpec | None, dtype: torch.dtype | None, packs: bool
    ) -> tuple[torch.dtype, tuple[int, ...]]:
        if spec.name in self.kept and packs:
            return torch.int32, (*spec.shape[:-1], packed_width(spec.shape[-1]))
        if spec.name in self.kept or spec.name.removesuffix(SCALE_SUFFIX) in self.kept:
            return dtype_of(spec), spec.shape
        own = self.original_dtype if scales is not None else dtype_of(spec)
        return dtype if dtype is not None and own is self.original_dtype else own, spec.shape

    def _check(self, spec: TensorSpec, scales: TensorSpec | None) -> None:
        """Raise `ShardCorrupt` if a tensor is quantized without matching scales, or the reverse."""
        if scales is None:
            sound = dtype_of(spec) is not FP8_DTYPE
        else:
            groups = (*spec.shape[:-1], self.scheme.num_groups(spec.shape[-1])) if spec.shape else None
            sound = dtype_of(spec) is FP8_DTYPE and dtype_of(scales) is SCALE_DTYPE and scales.shape == groups
        if not sound:
            raise ShardCorrupt(
                f"Tensor {spec.name!r} ({spec.dtype} {list(spec.shape)}) has no scales that fit "
                f"{self.scheme.name!r}; convert the model again."
            )


def _scheme(manifest: Manifest) -> Scheme:
    if manifest.quantization not in SCHEMES:
        raise UnsupportedModel(
            f"Model {manifest.model!r} is quantized as {manifest.quantization!r}, which this release does "
            "not support; convert it again, or update hotswap."
        )
    return SCHEMES[manifest.quantization]


def original_dtype(manifest: Manifest) -> torch.dtype:
    """Return the dtype that a quantized model's weights had before.

    Raises:
        ShardCorrupt: the manifest names no floating-point dtype.
    """
    dtype = getattr(torch, manifest.unquantized_dtype, None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ShardCorrupt(
            f"The manifest of {manifest.model!r} gives {manifest.unquantized_dtype!r} as the dtype of its "
            "weights, which is no floating-point dtype; convert the model again."
        )
    return dtype


def _kept(stored: Sequence[TensorSpec], wanted: Set[str]) -> frozenset[str]:
    """Return the wanted names that are stored as contiguous matrices and tied to wanted names only."""
    others = {_location(spec) for spec in stored if spec.name not in wanted and spec.size_bytes}
    return frozenset(
        spec.name
        for spec in stored
        if spec.name in wanted
        and len(spec.shape) == 2
        and spec.size_bytes
        and spec.stride == (spec.shape[1], 1)
        and _location(spec) not in others
    )


def _by_offset(specs: Sequence[TensorSpec]) -> list[TensorSpec]:
    # An empty tensor has the offset of another one, and no bytes.
    return sorted(specs, key=lambda spec: (spec.offset_bytes, spec.size_bytes))


def _distinct(jobs: Iterable[_Job]) -> tuple[_Job, ...]:
    """Return one job per distinct tensor, in ascending order of both source and target."""
    filled = {_location(job.stored): job for job in jobs if job.stored.size_bytes}
    return tuple(filled.values())


def _lead_bytes(jobs: Sequence[_Job]) -> int:
    """Return the offset at which the stored bytes must begin so that none is overwritten before it is read.

    Each tensor is read and written in blocks at two constant rates, so it suffices that its first and last
    bytes are read before they are overwritten, and that no write reaches the bytes of later tensors.
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


def _location(spec: TensorSpec) -> tuple[int, int]:
    return spec.offset_bytes, spec.size_bytes


def _cloned(tensor: Tensor) -> Tensor:
    return tensor.clone(memory_format=torch.contiguous_format)


def _rows(tensor: Tensor) -> Tensor:
    return tensor.view(-1, tensor.shape[-1])
