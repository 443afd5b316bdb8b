"""Benchmark of reading a model from a disk: through the store, and by a plain direct read of its files."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeAlias

from hotswap.backends.memory import aligned_buffer, copy
from hotswap.backends.stores.files import map_read_errors, open_regular
from hotswap.backends.stores.layout import model_directory
from hotswap.backends.stores.nvme import NvmeStore
from hotswap.backends.stores.pinned import PinnedStore
from hotswap.backends.stores.tiered import TieredStore
from hotswap.errors import ConfigError
from hotswap.model import Manifest
from hotswap.request import ModelId
from hotswap.store import WeightStore
from hotswap.worker_threads import run_in_thread

__all__ = ["Bench", "ReadMethod", "bench"]

_Read: TypeAlias = Callable[[], Awaitable[None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadMethod:
    """The times of one method of reading a model, and their ratio to the method `raw`."""

    name: str
    seconds: tuple[float, ...]
    bytes_per_s: float
    ratio_to_raw: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """The result of `bench`; `direct` is false where the file system refuses direct reads."""

    model: ModelId
    size_bytes: int
    chunk_bytes: int
    threads: int
    depth: int
    direct: bool
    methods: tuple[ReadMethod, ...]


async def bench(
    root: Path,
    model: ModelId,
    *,
    chunk_bytes: int = 4 << 20,
    threads: int = 4,
    depth: int = 8,
    repeat: int = 5,
    progress: Callable[[int, int], None] | None = None,
) -> Bench:
    """Read a model `repeat` times by each of several methods, in turn, and compare the medians.

    `raw` reads its files directly with as many threads and discards the bytes. `direct` and `buffered` read
    through a `NvmeStore` with checksums, past the page cache and through it (dropped before). `host` copies
    from host memory, and is left out where memory is short.

    Raises:
        ConfigError: `repeat` is under 1.
        StoreError: the model is not there or damaged.
    """
    if repeat < 1:
        raise ConfigError(f"repeat is {repeat}; give 1 or more.")
    store = partial(NvmeStore, root, chunk_bytes=chunk_bytes, threads=threads, depth=depth)
    async with AsyncExitStack() as stack:
        disk = await stack.enter_async_context(store(direct=True))
        cached = await stack.enter_async_context(store(direct=False))
        manifest = await disk.manifest(model)
        raw = stack.enter_context(_RawReader(model_directory(root, model), manifest, chunk_bytes, threads))
        methods: dict[str, _Read] = {
            "raw": partial(run_in_thread, raw.read),
            "direct": partial(_read_all, disk, manifest),
            "buffered": partial(_read_all, cached, manifest),
        }
        if manifest.weight_bytes < _free_memory_bytes() // 2:
            host = await stack.enter_async_context(_in_host_memory(root, manifest))
            methods["host"] = partial(_copy_all, host, manifest)
        seconds = await _measure(methods, raw, repeat, manifest.weight_bytes, progress)
    return Bench(
        model=model,
        size_bytes=manifest.weight_bytes,
        chunk_bytes=chunk_bytes,
        threads=threads,
        depth=depth,
        direct=raw.direct,
        methods=tuple(_method(name, seconds, manifest.weight_bytes) for name in methods),
    )


async def _measure(
    methods: dict[str, _Read],
    raw: _RawReader,
    repeat: int,
    size_bytes: int,
    progress: Callable[[int, int], None] | None,
) -> dict[str, tuple[float, ...]]:
    seconds: dict[str, tuple[float, ...]] = dict.fromkeys(methods, ())
    total_bytes = repeat * len(methods) * size_bytes
    for turn in range(repeat):
        for number, (name, read) in enumerate(methods.items()):
            await run_in_thread(raw.drop_pages)
            start_s = time.perf_counter()
            await read()
            seconds[name] += (time.perf_counter() - start_s,)
            if progress is not None:
                progress((turn * len(methods) + number + 1) * size_bytes, total_bytes)
    return seconds


def _method(name: str, seconds: dict[str, tuple[float, ...]], size_bytes: int) -> ReadMethod:
    # Paired: other load on the disk slows all methods of a turn.
    ratios = [raw_s / method_s for raw_s, method_s in zip(seconds["raw"], seconds[name], strict=True)]
    return ReadMethod(
        name=name,
        seconds=seconds[name],
        bytes_per_s=size_bytes / statistics.median(seconds[name]),
        ratio_to_raw=statistics.median(ratios),
    )


async def _read_all(store: WeightStore, manifest: Manifest) -> None:
    for shard in manifest.shards:
        async with store.open(shard) as chunks:
            async for _ in chunks:
                pass


async def _copy_all(store: WeightStore, manifest: Manifest) -> None:
    target = aligned_buffer(16 << 20)
    for shard in manifest.shards:
        async with store.open(shard) as chunks:
            async for chunk in chunks:
                await run_in_thread(copy, target[: len(chunk.data)], chunk.data)


@asynccontextmanager
async def _in_host_memory(root: Path, manifest: Manifest) -> AsyncGenerator[WeightStore]:
    budget = manifest.buffer_bytes * manifest.world_size
    async with TieredStore(PinnedStore(budget, chunk_bytes=16 << 20), NvmeStore(root)) as store:
        await store.prefetch(manifest.model)
        yield store


def _free_memory_bytes() -> int:
    """The free memory of the machine, 0 if unknown."""
    with suppress(OSError, ValueError):
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return 0


class _RawReader:
    """Reads the data files of a model directly, in pieces, with several threads."""

    def __init__(self, directory: Path, manifest: Manifest, chunk_bytes: int, threads: int) -> None:
        self.direct = True
        self._files = sorted({directory / shard.file for shard in manifest.shards})
        self._buffers = [aligned_buffer(chunk_bytes) for _ in range(threads)]
        self._threads = ThreadPoolExecutor(threads)

    def __enter__(self) -> _RawReader:
        return self

    def __exit__(self, *exc: object) -> None:
        self._threads.shutdown()

    def read(self) -> None:
        """Read all files once. Blocking."""
        for file in self._files:
            with map_read_errors(file):
                fd = self._open(file)
                try:
                    offsets = iter(range(0, os.fstat(fd).st_size, len(self._buffers[0])))
                    list(self._threads.map(partial(_read_pieces, fd, offsets), self._buffers))
                finally:
                    os.close(fd)

    def drop_pages(self) -> None:
        """Drop the files from the page cache, where the kernel allows it."""
        for file in self._files:
            fd = open_regular(file)
            try:
                with suppress(OSError, AttributeError):
                    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(fd)

    def _open(self, file: Path) -> int:
        if self.direct:
            with suppress(OSError, AttributeError):
                return os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
            self.direct = False
        return open_regular(file)


def _read_pieces(fd: int, offsets: Iterator[int], buffer: memoryview) -> None:
    for offset in offsets:
        os.preadv(fd, [buffer], offset)
