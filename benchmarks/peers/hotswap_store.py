"""This project's store: from the disk, and from the host tier, consumed as an engine would.

The store is entered before the clock starts, as once in the life of a process (`enter_s` says what that
took); the manifest is read, the files are opened and the tensors are made under the clock. What happens to
the chunks is the `sink`:

    resident   read into a flat buffer that exists, as an engine that reuses its memory does
    fresh      read into a flat buffer made under the clock, as every other loader makes its memory
    copy       as `resident`, but chunk by chunk, as an engine does whose memory a store cannot reach
    lend       let go: the chunks were in host memory, and the disk was the only cost
    view       host tier only: tensors that are views of what the tier lends, without a copy
"""

from __future__ import annotations

import time
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

import anyio
import numpy as np
import torch
from anyio import to_thread
from torch import Tensor

from benchmarks.race import Peer, Place, Race, Rehearsal, Source, flat_buffer
from hotswap import HostChunk, ModelId, TensorSpec, WeightStore
from hotswap.backends.stores import NvmeStore, PinnedStore, TieredStore
from hotswap.backends.torch.buffers import FlatBuffers, fetch

DISTRIBUTIONS = ("anyio",)


class Contestant(Peer):
    """Options: `tier` ("disk" or "host"), `sink`, and `store`, more arguments for `NvmeStore`."""

    def files(self, source: Source) -> list[Path]:
        return sorted((source.store / source.model).iterdir())

    def run(self, rehearsal: Source, source: Source, race: Race) -> None:
        """Load both in one store, whose threads and buffers so exist when the clock starts."""
        anyio.run(self._run, [(rehearsal, Rehearsal()), (source, race)])

    def load(self, source: Source, race: Race) -> None:
        """Load one checkpoint in a store of its own."""
        anyio.run(self._run, [(source, race)])

    async def _run(self, races: list[tuple[Source, Race]]) -> None:
        began_s = time.perf_counter()
        async with self._store(races[0][0].store) as store:
            entered_s = time.perf_counter() - began_s
            for source, race in races:
                await self._load(store, ModelId(source.model), race)
                race.note(enter_s=entered_s)

    def _store(self, root: Path) -> WeightStore:
        disk = NvmeStore(root, **self.options.get("store", {}))
        if self.options["tier"] == "disk":
            return disk
        # One chunk a shard, so that tensors can be views of it.
        return TieredStore(PinnedStore("1 TiB", chunk_bytes="1 TiB"), disk)

    async def _load(self, store: WeightStore, model: ModelId, race: Race) -> None:
        if isinstance(store, TieredStore):
            await store.prefetch(model)
        if self.options["sink"] == "view":
            await _view(store, model, race)
        elif self.options["sink"] == "lend":
            await _lend(store, model, race)
        elif self.options["sink"] == "copy":
            await _copy(store, model, race)
        else:
            await _read(store, model, race, fresh=self.options["sink"] == "fresh")


async def _read(store: WeightStore, model: ModelId, race: Race, *, fresh: bool) -> None:
    """What a CPU engine does: the buffer is made as it makes it, the shards are fetched as it does."""
    buffers = FlatBuffers(torch.device("cpu"), 0)
    resident = None if fresh else buffers.take((await store.manifest(model)).buffer_bytes).fill_(0)
    race.start()
    manifest = await store.manifest(model)
    flat = await to_thread.run_sync(buffers.take, manifest.buffer_bytes) if resident is None else resident
    await fetch(store, manifest, flat)
    race.finish({spec.name: _place(spec).view(flat) for spec in manifest.tensors})


async def _copy(store: WeightStore, model: ModelId, race: Race) -> None:
    flat = flat_buffer((await store.manifest(model)).buffer_bytes).fill_(0)
    race.start()
    manifest = await store.manifest(model)
    target = flat.numpy()

    def copy(chunk: HostChunk) -> None:
        end = chunk.offset_bytes + len(chunk.data)
        np.copyto(target[chunk.offset_bytes : end], np.frombuffer(chunk.data, np.uint8))

    for shard in manifest.shards_of(0):
        async with store.open(shard) as chunks:
            async for chunk in chunks:
                await to_thread.run_sync(copy, chunk)
    race.finish({spec.name: _place(spec).view(flat) for spec in manifest.tensors})


async def _lend(store: WeightStore, model: ModelId, race: Race) -> None:
    race.start()
    manifest = await store.manifest(model)
    size = 0
    for shard in manifest.shards_of(0):
        async with store.open(shard) as chunks:
            async for chunk in chunks:
                size += len(chunk.data)
    race.finish({}, size_bytes=size)


async def _view(store: WeightStore, model: ModelId, race: Race) -> None:
    """Keep the one chunk of every shard lent until the clock was stopped and the tensors were looked at."""
    race.start()
    manifest = await store.manifest(model)
    async with AsyncExitStack() as stack:
        lent: list[tuple[int, Tensor]] = []
        for shard in manifest.shards_of(0):
            chunks = await stack.enter_async_context(store.open(shard))
            chunk = await anext(chunks)
            lent.append((chunk.offset_bytes, torch.frombuffer(chunk.data, dtype=torch.uint8)))
        race.finish({spec.name: _lent_view(_place(spec), lent) for spec in manifest.tensors})
        del lent


def _lent_view(place: Place, lent: list[tuple[int, Tensor]]) -> Tensor:
    """A view of the chunk that holds the tensor; a copy where a tensor lies in two files."""
    first, last = place.offset_bytes, place.offset_bytes + place.size_bytes
    parts = [
        data[max(first - at, 0) : last - at] for at, data in lent if at < last and at + len(data) > first
    ]
    return replace(place, offset_bytes=0).view(parts[0] if len(parts) == 1 else torch.cat(parts))


def _place(spec: TensorSpec) -> Place:
    return Place(spec.dtype, spec.shape, spec.offset_bytes, spec.size_bytes)
