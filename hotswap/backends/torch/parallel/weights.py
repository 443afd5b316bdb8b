"""Reads a store's shards into the memory of the ranks that need them; each byte is read once."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from hotswap.backends.torch.buffers import check_shard_size, fetch
from hotswap.backends.torch.dequantize import Dequantizer
from hotswap.backends.torch.fp8 import SCALE_SUFFIX
from hotswap.backends.torch.modeling import main_dtype
from hotswap.backends.torch.parallel.part import Part
from hotswap.backends.torch.parallel.shared import SharedMemory
from hotswap.backends.torch.weights import ALIGNMENT_BYTES, convert, recast
from hotswap.errors import OutOfMemory, ShardCorrupt
from hotswap.model import HostChunk, Manifest, Shard, TensorSpec
from hotswap.store import WeightStore
from hotswap.worker_threads import run_in_thread

__all__ = ["PartWeights", "Reader", "digest_of"]


@dataclass(frozen=True, slots=True, eq=False)
class PartWeights:
    """The weights of one rank: shared memory, and the tensors in it."""

    memory: SharedMemory
    specs: tuple[TensorSpec, ...]


@dataclass(frozen=True, slots=True)
class _Run:
    """A contiguous range of a store's buffer, and its offset `target` in a rank's memory."""

    start: int
    stop: int
    target: int


class Reader:
    """Reads the weights of the ranks of a model that are on one machine.

    Ranks of one tensor-parallel part, one per stage, need different tensors of one buffer of the store. The
    shards of the buffer are read once, chunk by chunk, and each chunk is copied to the ranks that need it.

    Args:
        manifest: The manifest of the model, sharded for the ranks of a stage.
        parts: The part of the model on each rank.
        dtype: The dtype to which weights of the model's main dtype are converted; `None` keeps it.
    """

    def __init__(self, manifest: Manifest, parts: Sequence[Part], dtype: torch.dtype | None) -> None:
        self._manifest, self._dtype = manifest, dtype
        self._manifests = tuple(_manifest_of(manifest, part) for part in parts)
        self._runs = tuple(
            _runs(manifest, part, own) for part, own in zip(parts, self._manifests, strict=True)
        )
        self._parts = tuple(parts)

    @property
    def rank_bytes(self) -> tuple[int, ...]:
        """The memory of each rank's weights after they are dequantized and converted.

        Raises:
            ShardCorrupt: a quantized tensor does not fit the index.
        """
        return tuple(self._size_bytes(own) for own in self._manifests)

    async def read(self, store: WeightStore) -> tuple[PartWeights, ...]:
        """Return the weights of every rank. On an error or a cancellation all memory is freed.

        Raises:
            OutOfMemory: there is not enough memory.
            ShardCorrupt: a shard or a tensor does not fit the index.
            StoreError: a shard could not be read.
        """
        made: list[PartWeights] = []
        stored: list[SharedMemory] = []
        try:
            stored.extend(_make(own, own.buffer_bytes) for own in self._manifests)
            targets = [memory.tensor for memory in stored]
            for part in range(self._manifest.world_size):
                if self._parts[0].position.grid.pp == 1:
                    await fetch(store, self._manifest, targets[part], rank=part)
                else:
                    for shard in filter(self._needs, self._manifest.shards_of(part)):
                        await self._scatter(store, shard, targets)
            for own, memory in zip(self._manifests, stored, strict=True):
                made.append(await run_in_thread(self._finish, own, memory))
        except BaseException:
            for weights in made:
                weights.memory.close()
            for memory in stored:
                memory.close()
            raise
        return tuple(made)

    def _needs(self, shard: Shard) -> bool:
        """Whether a rank has anything of a shard; those of other nodes may be the only ones."""
        first, last = shard.buffer_offset_bytes, shard.buffer_offset_bytes + shard.size_bytes
        return any(
            run.start < last and first < run.stop
            for part, runs in zip(self._parts, self._runs, strict=True)
            if part.position.part == shard.rank
            for run in runs
        )

    async def _scatter(self, store: WeightStore, shard: Shard, targets: Sequence[Tensor]) -> None:
        copied = 0
        async with store.open(shard) as chunks:
            async for chunk in chunks:
                await run_in_thread(self._copy, chunk, shard.rank, targets)
                copied += chunk.data.nbytes
        check_shard_size(shard, copied)

    def _copy(self, chunk: HostChunk, part: int, targets: Sequence[Tensor]) -> None:
        data = np.frombuffer(chunk.data, dtype=np.uint8)
        first, last = chunk.offset_bytes, chunk.offset_bytes + len(data)
        for mine, runs, target in zip(self._parts, self._runs, targets, strict=True):
            for run in runs if mine.position.part == part else ():
                start, stop = max(run.start, first), min(run.stop, last)
                if start < stop:
                    at = run.target + start - run.start
                    np.copyto(target.numpy()[at : at + stop - start], data[start - first : stop - first])

    def _size_bytes(self, own: Manifest) -> int:
        if own.quantization:
            return Dequantizer(own, dtype=self._dtype).size_bytes
        specs = self._recast(own)
        return specs[1] if specs else own.buffer_bytes

    def _recast(self, own: Manifest) -> tuple[tuple[TensorSpec, ...], int] | None:
        """Return the layout in the requested dtype; `None` if no conversion is needed."""
        main = main_dtype(self._manifest.tensors)
        return None if self._dtype is None or main is self._dtype else recast(own.tensors, main, self._dtype)

    def _finish(self, own: Manifest, stored: SharedMemory) -> PartWeights:
        """Dequantize the stored weights, or convert their dtype, if needed."""
        if own.quantization:
            dequantizer = Dequantizer(own, dtype=self._dtype)
            with stored:
                made = _make(own, dequantizer.size_bytes)
                dequantizer.run(stored.tensor, made.tensor)
            return PartWeights(made, dequantizer.specs)
        wanted = self._recast(own)
        if wanted is None:
            return PartWeights(stored, own.tensors)
        specs, size_bytes = wanted
        with stored:
            made = _make(own, size_bytes)
            convert(stored.tensor, own.tensors, made.tensor, specs)
        return PartWeights(made, specs)


def digest_of(manifest: Manifest) -> str:
    """Return a hash of what a manifest says of the weights, equal for equal ones of two stores."""
    shards = [
        (each.rank, each.buffer_offset_bytes, each.size_bytes, each.checksum) for each in manifest.shards
    ]
    sizes = manifest.buffer_bytes, manifest.world_size
    described = manifest.config, manifest.tensors, sizes, manifest.quantization, shards
    return hashlib.blake2b(repr(described).encode(), digest_size=16).hexdigest()


def _make(manifest: Manifest, size_bytes: int) -> SharedMemory:
    try:
        return SharedMemory.make(size_bytes)
    except MemoryError as exc:
        raise OutOfMemory(
            f"There is no memory for the weights of {manifest.model!r}; unload something."
        ) from exc


def _manifest_of(manifest: Manifest, part: Part) -> Manifest:
    """Return a manifest with only the tensors of one rank, in a buffer of their own; tied ones stay tied."""
    wanted = part.shapes.keys() | {name + SCALE_SUFFIX for name in part.shapes}
    specs = [spec for spec in manifest.tensors_of(part.position.part) if spec.name in wanted]
    if part.position.grid.pp == 1:
        return replace(manifest, tensors=tuple(replace(s, rank=0) for s in specs), shards=(), world_size=1)
    offsets: dict[int, int] = {}
    end = 0
    # An empty tensor has the offset of the next one without being tied to it.
    for spec in sorted(specs, key=lambda spec: (spec.offset_bytes, -spec.size_bytes)):
        if not 0 <= spec.offset_bytes <= manifest.buffer_bytes - spec.size_bytes:
            raise ShardCorrupt(
                f"Tensor {spec.name!r} of {manifest.model!r} lies outside its buffer; convert it again."
            )
        if spec.offset_bytes not in offsets:
            offsets[spec.offset_bytes] = end
            end += -(-spec.size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    own = tuple(replace(spec, offset_bytes=offsets[spec.offset_bytes], rank=0) for spec in specs)
    return replace(manifest, tensors=own, shards=(), buffer_bytes=end, world_size=1)


def _runs(manifest: Manifest, part: Part, own: Manifest) -> tuple[_Run, ...]:
    """Return the ranges to copy for a rank, with ranges merged that are contiguous in source and target."""
    sources = {spec.name: spec for spec in manifest.tensors_of(part.position.part)}
    pairs = sorted(
        {(sources[spec.name].offset_bytes, spec.offset_bytes, spec.size_bytes) for spec in own.tensors}
    )
    runs: list[_Run] = []
    for start, target, size in pairs:
        run = _Run(start, start + size, target)
        last = runs[-1] if runs else None
        together = last is not None and run.start - run.target == last.start - last.target
        if last is not None and together and run.start <= last.stop + ALIGNMENT_BYTES:
            runs[-1] = replace(last, stop=max(last.stop, run.stop))
        else:
            runs.append(run)
    return tuple(runs)
