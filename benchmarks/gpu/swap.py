"""A model's flat buffer from host memory to the device, as engines take it in, beside a plain pinned copy."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import anyio
import torch
from torch import Tensor

from benchmarks.gpu.session import Session
from benchmarks.measure import Summary, ratios, rounds
from benchmarks.table import show
from hotswap import HostChunk, Manifest, ModelId, Shard, StoreView, WeightStore
from hotswap.backends.torch.buffers import fetch

__all__ = ["run"]

SIZE_BYTES = 16 * 10**9
_CHUNK_BYTES = 64 << 20
_REPEATS = 3
_MODEL = ModelId("m")


class _Pinned(WeightStore):
    """Lends one model from pinned memory, chunk by chunk."""

    def __init__(self, flat: Tensor) -> None:
        data: Any = flat.numpy()
        self._data = memoryview(data).toreadonly()

    async def manifest(self, model: ModelId) -> Manifest:
        size = len(self._data)
        shard = Shard(
            model=model,
            rank=0,
            file="weights-0.bin",
            file_offset_bytes=0,
            buffer_offset_bytes=0,
            size_bytes=size,
            checksum="none:",
        )
        return Manifest(model=model, shards=(shard,), buffer_bytes=size, tensors=(), config="{}")

    @asynccontextmanager
    async def open(self, shard: Shard) -> AsyncGenerator[AsyncIterator[HostChunk]]:
        yield self._chunks()

    def view(self) -> StoreView:
        return StoreView(tiers=())

    async def _chunks(self) -> AsyncIterator[HostChunk]:
        for at in range(0, len(self._data), _CHUNK_BYTES):
            yield HostChunk(at, self._data[at : at + _CHUNK_BYTES], tier="host", pinned=True)


def run(session: Session) -> None:
    """Copy both ways in turns, and compare what has come."""
    size = (1 << 20) + 5 if session.is_dry else _fitting(session)
    flat = torch.empty(size, dtype=torch.uint8, device=session.device)
    pinned = torch.empty(size, dtype=torch.uint8, pin_memory=not session.is_dry)
    pinned[:: max(1, size // 4096)] = 7
    store = _Pinned(pinned)
    manifest = anyio.run(store.manifest, _MODEL)
    ways = {
        "plain pinned copy": partial(flat.copy_, pinned, non_blocking=True),
        "as an engine loads": partial(anyio.run, fetch, store, manifest, flat),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for name in rounds(list(ways), _REPEATS):
        flat.zero_()
        seconds[name].append(session.wall_s(ways[name]))
        if not torch.equal(flat[:: max(1, size // 4096)].cpu(), pinned[:: max(1, size // 4096)]):
            session.report.setdefault("faults", []).append(f"a swap by {name} brought other bytes")
    plain = seconds["plain pinned copy"]
    session.report["swap"] = {"bytes": size, **{f"{name}, s": each for name, each in seconds.items()}}
    lines = [
        [
            name,
            Summary.of(each).format(),
            f"{size / Summary.of(each).median / 1e9:.1f}",
            Summary.of(ratios(plain, each)).format(2),
        ]
        for name, each in seconds.items()
    ]
    show(f"{size / 1e9:.1f} GB to the device", ("", "s", "GB/s", "share of plain"), lines)
    del flat, pinned, store, ways
    session.free()


def _fitting(session: Session) -> int:
    """Sixteen gigabytes, or what there is room for."""
    free, _ = torch.cuda.mem_get_info(session.device)
    return min(SIZE_BYTES, int(0.8 * free))
