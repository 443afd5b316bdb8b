"""A model's flat buffer from a store's host memory to the device, as engines load it, beside plain copies."""

from __future__ import annotations

import time
from typing import Any

import anyio
import torch
from torch import Tensor

from benchmarks.gpu.session import Session
from benchmarks.measure import Summary, ratios, rounds
from benchmarks.table import show
from hotswap import ModelId
from hotswap.abc import Manifest, Shard
from hotswap.backends.stores import PinnedStore
from hotswap.backends.torch.buffers import fetch

__all__ = ["run"]

SIZE_BYTES = 8 * 10**9
_REPEATS = 5
_PLAIN, _STORE = "plain copy, PyTorch's memory", "plain copy, the store's memory"
_CHUNKED = {f"as an engine loads, {size} MiB at a time": size << 20 for size in (16, 64, 256)}


def run(session: Session) -> None:
    """Copy in all ways in turns, and compare what has come."""
    size = (1 << 20) + 5 if session.is_dry else _fitting(session)
    seconds = anyio.run(_measure, session, size)
    session.report["swap"] = {"bytes": size, **{f"{name}, s": each for name, each in seconds.items()}}
    lines = [
        [
            name,
            Summary.of(each).format(),
            f"{size / Summary.of(each).median / 1e9:.1f}",
            Summary.of(ratios(seconds[_PLAIN], each)).format(2),
        ]
        for name, each in seconds.items()
    ]
    show(f"{size / 1e9:.1f} GB to the device", ("", "s", "GB/s", "share of plain"), lines)
    session.free()


async def _measure(session: Session, size: int) -> dict[str, list[float]]:
    manifest = _manifest(size)
    flat = torch.empty(size, dtype=torch.uint8, device=session.device)
    pinned = torch.empty(size, dtype=torch.uint8, pin_memory=not session.is_dry)
    step = max(1, size // 4096)
    pinned[::step] = torch.randint(1, 256, (len(pinned[::step]),), dtype=torch.uint8)
    seconds: dict[str, list[float]] = {name: [] for name in (_PLAIN, _STORE, *_CHUNKED)}
    async with PinnedStore(size) as store:
        async with store.reserve(manifest, 0) as reservation:
            lent = torch.frombuffer(reservation.place(manifest.shards[0]), dtype=torch.uint8)
            lent.copy_(pinned)
            reservation.commit(manifest.shards[0])
            reservation.keep()
        session.report["store_is_pinned"] = lent.is_pinned()
        for name in rounds(list(seconds), _REPEATS):
            flat.zero_()
            session.wait()
            began_s = time.perf_counter()
            if name in _CHUNKED:
                store.chunk_bytes = _CHUNKED[name]
                await fetch(store, manifest, flat)
            else:
                flat.copy_(pinned if name == _PLAIN else lent, non_blocking=True)
            session.wait()
            seconds[name].append(time.perf_counter() - began_s)
            _compare(session, name, flat[::step], pinned[::step])
        del lent
    return seconds


def _compare(session: Session, name: str, found: Tensor, right: Tensor) -> None:
    if not torch.equal(found.cpu(), right.cpu()):
        session.report.setdefault("faults", []).append(f"a swap by {name} brought other bytes")


def _manifest(size: int) -> Manifest:
    places: dict[str, Any] = {"file_offset_bytes": 0, "buffer_offset_bytes": 0, "size_bytes": size}
    shard = Shard(model=ModelId("m"), rank=0, file="weights-0.bin", **places, checksum="none:")
    return Manifest(model=ModelId("m"), shards=(shard,), buffer_bytes=size, tensors=(), config="{}")


def _fitting(session: Session) -> int:
    """Eight gigabytes, or what there is room for."""
    free, _ = torch.cuda.mem_get_info(session.device)
    return min(SIZE_BYTES, int(0.8 * free))
