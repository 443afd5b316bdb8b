"""From the store to a CUDA device, beside a plain copy from pinned memory."""

from __future__ import annotations

import shutil
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import torch
from torch import Tensor

from benchmarks import checkpoints, pagecache
from benchmarks.measure import Summary, ratios, rounds
from benchmarks.table import show
from benchmarks.timed_run import Source
from hotswap import Manifest, ModelId, WeightStore
from hotswap.backends.stores import NvmeStore, PinnedStore, TieredStore
from hotswap.backends.torch.buffers import fetch

__all__ = ["measure", "show_report"]

_SIZE_BYTES = 2_000_000_000

_Copy = Callable[[], Awaitable[None]]


def measure(directory: Path, repeats: int, *, size_bytes: int = _SIZE_BYTES) -> dict[str, Any]:
    """Return bytes per second to the device: plain pinned copy, host tier, disk (cold)."""
    if not torch.cuda.is_available():
        return {"skipped": "there is no CUDA device"}
    shutil.rmtree(directory, ignore_errors=True)
    source = checkpoints.write(directory / "weights", "llama", size_bytes, seed=3, peers_python=None)
    try:
        return anyio.run(_measure, source, repeats)
    finally:
        shutil.rmtree(directory)


def show_report(report: dict[str, Any]) -> None:
    """Print the table of `measure`."""
    if "skipped" in report:
        return print(f"not measured: copies to a device: {report['skipped']}")
    series = {key.removesuffix("_bytes_per_s"): value for key, value in report.items() if key != "device"}
    rows = []
    for name, speeds in series.items():
        share = Summary.of(ratios(speeds, series["pinned_copy"]))
        rows.append([name, Summary.of([speed / 1e9 for speed in speeds]).format(2), share.format()])
    return show(f"to {report['device']}", ("", "GB/s [min-max]", "ratio to pinned copy"), rows)


async def _measure(source: Source, repeats: int) -> dict[str, Any]:
    disk = NvmeStore(source.store)
    host = TieredStore(PinnedStore("1 TiB"), NvmeStore(source.store))
    async with disk, host:
        manifest = await disk.manifest(ModelId(source.model))
        await host.prefetch(manifest.model)
        flat = torch.zeros(manifest.buffer_bytes, dtype=torch.uint8, device="cuda")
        pinned = torch.zeros(manifest.buffer_bytes, dtype=torch.uint8, pin_memory=True)
        ways: dict[str, _Copy] = {
            "pinned_copy": partial(_copy, pinned, flat),
            "host": partial(_fetch, host, manifest, flat),
            "disk": partial(_fetch, disk, manifest, flat),
        }
        for way in ways.values():
            await way()
        speeds: dict[str, list[float]] = {name: [] for name in ways}
        for name in rounds(list(ways), repeats):
            pagecache.empty(source.flat_files)
            began_s = time.perf_counter()
            await ways[name]()
            speeds[name].append(manifest.buffer_bytes / (time.perf_counter() - began_s))
    return {
        "device": torch.cuda.get_device_name(),
        **{f"{name}_bytes_per_s": values for name, values in speeds.items()},
    }


async def _copy(pinned: Tensor, flat: Tensor) -> None:
    await anyio.to_thread.run_sync(partial(flat.copy_, pinned, non_blocking=True))
    torch.cuda.synchronize()


async def _fetch(store: WeightStore, manifest: Manifest, flat: Tensor) -> None:
    await fetch(store, manifest, flat)
    torch.cuda.synchronize()
