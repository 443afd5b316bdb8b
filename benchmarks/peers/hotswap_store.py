"""This project's store: from the disk, and from the host tier, consumed as an engine would.

The store is entered before the clock starts, as once in the life of a process (`enter_s` says what that
took); the manifest is asked for, the files are opened and the tensors are made while the clock runs. The
`sink` says where the bytes end:

    existing   read into a flat buffer that exists, as an engine that reuses its memory does
    fresh      by a store that has not seen the index before, into a flat buffer made under the clock
    copy       as `existing`, but chunk by chunk, as an engine does whose memory a store cannot reach
    gone       dropped: the chunks were in host memory, and the disk was the only cost
    view       host tier only: tensors that are views of what the tier lends, without a copy
"""

from __future__ import annotations

import time
from pathlib import Path

import anyio
import numpy as np
import torch
from anyio import to_thread
from torch import Tensor

from benchmarks.timed_run import Peer, Source, TimedRun, WarmUp
from hotswap import ModelId
from hotswap.abc import HostChunk, WeightStore
from hotswap.backends.stores import NvmeStore, PinnedStore, TieredStore
from hotswap.backends.torch.buffers import FlatBuffers, fetch, in_place
from hotswap.backends.torch.weights import Views

DISTRIBUTIONS = ("anyio",)


class Contestant(Peer):
    """Options: `tier` ("disk" or "host"), `sink`, and `store`, more arguments for `NvmeStore`."""

    def files(self, source: Source) -> list[Path]:
        return sorted((source.store / source.model).iterdir())

    def run(self, warm_up: Source, source: Source, run: TimedRun) -> None:
        """Load both in one store, whose threads and buffers so exist when the clock starts."""
        anyio.run(self._run, [(warm_up, WarmUp()), (source, run)])

    def load(self, source: Source, run: TimedRun) -> None:
        """Load one checkpoint in a store of its own."""
        anyio.run(self._run, [(source, run)])

    async def _run(self, runs: list[tuple[Source, TimedRun]]) -> None:
        began_s = time.perf_counter()
        async with self._store(runs[0][0].store) as store:
            entered_s = time.perf_counter() - began_s
            for source, run in runs:
                await self._load(store, ModelId(source.model), run)
                run.note(enter_s=entered_s)

    def _store(self, root: Path) -> WeightStore:
        disk = NvmeStore(root, **self.options.get("store", {}))
        if self.options["tier"] == "disk":
            return disk
        return TieredStore(PinnedStore("1 TiB"), disk)

    async def _load(self, store: WeightStore, model: ModelId, run: TimedRun) -> None:
        if isinstance(store, TieredStore):
            await store.prefetch(model)
        sink = self.options["sink"]
        if sink == "fresh":
            # Not entered, so that the index is parsed under the clock; reads in place need nothing of it.
            assert isinstance(store, NvmeStore)
            await _read(self._store(store.root), model, run, existing=None)
        elif sink == "existing":
            await _read(store, model, run, existing=await _existing(store, model))
        elif sink == "copy":
            await _copy(store, model, run)
        elif sink == "view":
            await _view(store, model, run)
        else:
            await _let_go(store, model, run)


async def _existing(store: WeightStore, model: ModelId) -> Tensor:
    """A flat buffer as a CPU engine makes it, its pages there."""
    return _take((await store.manifest(model)).buffer_bytes).fill_(0)


async def _read(store: WeightStore, model: ModelId, run: TimedRun, *, existing: Tensor | None) -> None:
    """What a CPU engine does: the buffer is made as it makes it, the shards are fetched as it does."""
    run.start()
    manifest = await store.manifest(model)
    flat = await to_thread.run_sync(_take, manifest.buffer_bytes) if existing is None else existing
    await fetch(store, manifest, flat)
    views = Views(flat)
    run.finish({spec.name: views.at(spec) for spec in manifest.tensors})


def _take(size_bytes: int) -> Tensor:
    return FlatBuffers(torch.device("cpu"), 0).allocate(size_bytes)


async def _copy(store: WeightStore, model: ModelId, run: TimedRun) -> None:
    flat = await _existing(store, model)
    run.start()
    manifest = await store.manifest(model)
    target = flat.numpy()

    def copy(chunk: HostChunk) -> None:
        end = chunk.offset_bytes + len(chunk.data)
        np.copyto(target[chunk.offset_bytes : end], np.frombuffer(chunk.data, np.uint8))

    for shard in manifest.shards_of(0):
        async with store.open(shard) as chunks:
            async for chunk in chunks:
                await to_thread.run_sync(copy, chunk)
    views = Views(flat)
    run.finish({spec.name: views.at(spec) for spec in manifest.tensors})


async def _let_go(store: WeightStore, model: ModelId, run: TimedRun) -> None:
    run.start()
    manifest = await store.manifest(model)
    size = 0
    for shard in manifest.shards_of(0):
        async with store.open(shard) as chunks:
            async for chunk in chunks:
                size += len(chunk.data)
    run.finish({}, size_bytes=size)


async def _view(store: WeightStore, model: ModelId, run: TimedRun) -> None:
    """What a CPU engine does with a model that is on the host tier."""
    assert isinstance(store, TieredStore)
    run.start()
    manifest = await store.manifest(model)
    async with store.lend(manifest) as buffer:
        assert buffer is not None, "the model was prefetched"
        views = Views(in_place(buffer.data))
        run.finish({spec.name: views.at(spec) for spec in manifest.tensors})
