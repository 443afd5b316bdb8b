"""`hotswap store verify` and `hotswap store bench`: every byte of a model compared, and its reads timed.

Reads are timed through the store, and by a plain direct read of the files.
"""

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

from hotswap.backends.fields import CONVERT_AGAIN
from hotswap.backends.memory import aligned_buffer, copy
from hotswap.backends.stores.files import BlockFile, map_read_errors, open_regular
from hotswap.backends.stores.index import load_index
from hotswap.backends.stores.layout import ALIGNMENT_BYTES, Checksum, align, model_directory
from hotswap.backends.stores.nvme import NvmeStore
from hotswap.backends.stores.pinned import PinnedStore
from hotswap.backends.stores.tiered import TieredStore
from hotswap.commands.table import table, to_size
from hotswap.errors import ConfigError, ShardCorrupt
from hotswap.model import Manifest, Shard, TensorSpec
from hotswap.request import ModelId
from hotswap.store import WeightStore
from hotswap.worker_threads import run_in_thread

__all__ = ["Bench", "ReadMethod", "bench", "bench_text", "verify"]


_PIECE_BYTES = 16 << 20


def verify(root: Path, model: ModelId, *, progress: Callable[[int, int], None] | None = None) -> Manifest:
    """Read all bytes of a model, compare their checksums, and return its manifest. Blocking.

    `progress` is called with the bytes done and the total.

    Raises:
        StoreError: the model is damaged or missing; see `load_index`.
    """
    manifest = load_index(root, model)
    buffer = aligned_buffer(_PIECE_BYTES)
    done = 0
    for shard in manifest.shards:
        checksum = Checksum()
        for piece in _pieces(model_directory(root, model), shard, buffer, 0, shard.size_bytes):
            checksum.update(piece)
            done += len(piece)
            if progress is not None:
                progress(done, manifest.weight_bytes)
        if str(checksum) != shard.checksum:
            raise _damaged(model_directory(root, model), manifest, shard, buffer)
    return manifest


def _damaged(directory: Path, manifest: Manifest, shard: Shard, buffer: memoryview) -> ShardCorrupt:
    """Return the error that names the damaged tensors of a shard."""
    begin, end = shard.buffer_offset_bytes, shard.buffer_offset_bytes + shard.size_bytes
    inside = [
        tensor
        for tensor in manifest.tensors_of(shard.rank)
        if tensor.offset_bytes < end and begin < tensor.offset_bytes + tensor.size_bytes
    ]
    names = [
        tensor.name for tensor in inside if _checksum(directory, manifest, tensor, buffer) != tensor.checksum
    ]
    what = f"the tensor {names[0]!r}" if names else "the padding between tensors"
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return ShardCorrupt(
        f"The bytes of {shard.file!r} of model {shard.model!r} have changed: {what}{more} is damaged. "
        f"{CONVERT_AGAIN}"
    )


def _checksum(directory: Path, manifest: Manifest, tensor: TensorSpec, buffer: memoryview) -> str:
    """The checksum of a tensor's bytes, which may span files."""
    checksum = Checksum()
    for shard in manifest.shards_of(tensor.rank):
        start = max(0, tensor.offset_bytes - shard.buffer_offset_bytes)
        stop = min(shard.size_bytes, tensor.offset_bytes + tensor.size_bytes - shard.buffer_offset_bytes)
        for piece in _pieces(directory, shard, buffer, start, stop):
            checksum.update(piece)
    return str(checksum)


def _pieces(directory: Path, shard: Shard, buffer: memoryview, start: int, stop: int) -> Iterator[memoryview]:
    """The bytes of a shard from `start` to `stop`; each piece is valid until the next."""
    if start >= stop:
        return
    # Direct reads start and end at block boundaries.
    first, last = start // ALIGNMENT_BYTES * ALIGNMENT_BYTES, min(align(stop), shard.size_bytes)
    file = BlockFile(directory / shard.file)
    try:
        file.open()
        for at in range(first, stop, len(buffer)):
            size = min(len(buffer), last - at)
            file.read(buffer[:size], shard.file_offset_bytes + at)
            yield buffer[max(0, start - at) : min(size, stop - at)]
    finally:
        file.close()


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


def bench_text(result: Bench) -> str:
    """Return what was measured, as a table."""
    rows = [
        (one.name, f"{one.bytes_per_s / 1e9:.2f}", f"{one.ratio_to_raw:.2f}", f"{min(one.seconds):.3f}")
        for one in result.methods
    ]
    title = f"{result.model}: {to_size(result.size_bytes)}, medians of {len(result.methods[0].seconds)} reads"
    if not result.direct:
        title += "; the file system refuses direct reads, so all of them went through the page cache"
    return f"{title}\n{table(('METHOD', 'GB/S', 'OF RAW', 'BEST S'), rows)}"
