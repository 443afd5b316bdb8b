"""Reading one shard from a disk with several threads: ahead of the consumer, or into its buffer."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, AsyncIterator, Generator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import anyio
from anyio import CapacityLimiter, from_thread
from anyio.abc import TaskGroup
from anyio.lowlevel import checkpoint

from hotswap.backends.memory import address_of, copy
from hotswap.backends.stores.bandwidth import Meter
from hotswap.backends.stores.files import BlockFile, FileCalls
from hotswap.backends.stores.layout import ALIGNMENT_BYTES
from hotswap.backends.stores.pieces import BufferPool, Pieces, Ring, Verify
from hotswap.errors import StoreError
from hotswap.model import HostChunk, Shard
from hotswap.worker_threads import in_thread, run_in_thread

__all__ = ["DiskReader", "ReadAhead", "ReadContext", "background", "give_back", "is_aligned", "read_into"]

_log = logging.getLogger("hotswap.stores")


@asynccontextmanager
async def background() -> AsyncGenerator[TaskGroup]:
    """A task group that is cancelled and awaited when the block ends.

    An error of the block is raised as it is, not in an exception group.
    """
    failure: Exception | None = None
    async with anyio.create_task_group() as tasks:
        try:
            yield tasks
        except Exception as exc:
            failure = exc
        finally:
            tasks.cancel_scope.cancel()
    if failure is not None:
        raise failure


def give_back(view: memoryview | None) -> None:
    """Release a lent view, so that a consumer that kept it gets an error instead of another chunk's bytes.

    Arrays and tensors made from the view cannot be released in this way.
    """
    if view is not None:
        with suppress(BufferError):
            view.release()


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadContext:
    """Shared by the reads of one store: its name, buffers, read settings and measured bandwidth."""

    tier: str
    pool: BufferPool
    depth: int
    threads: int
    verify: Verify = "load"
    calls: FileCalls = field(default_factory=FileCalls)
    limiter: CapacityLimiter = field(default_factory=lambda: CapacityLimiter(4))
    bandwidth: Meter = field(default_factory=lambda: Meter(2e9))

    def pieces(self, file: BlockFile, shard: Shard) -> Pieces:
        """Cut a shard into pieces of a buffer's length."""
        return Pieces(file, shard, self.pool.buffer_bytes, meter=self.bandwidth, verify=self.verify)


class ReadAhead:
    """The chunks of one shard in order; threads read up to `context.depth` of them ahead.

    `prepare` in a worker thread, `start` beside the consumer (`background`), `stop` before the block is left,
    and `close` after the threads have ended. Threads wake the event loop only when it waits for them.
    """

    def __init__(self, file: BlockFile, shard: Shard, context: ReadContext) -> None:
        self._file = file
        self._shard = shard
        self._context = context
        self._pieces = context.pieces(file, shard)
        self._buffers: list[memoryview] = []
        self._ring = Ring(0, ())
        self._num_threads = min(context.threads, len(self._pieces))
        self._wake = anyio.Event()
        self._num_taken = 0
        self._lent: memoryview | None = None
        self._lent_buffer: memoryview | None = None

    def prepare(self) -> None:
        """Open the file and allocate the buffers. Blocking."""
        self._file.open()
        self._file.check_size(self._shard.file_offset_bytes + self._shard.size_bytes)
        for _ in range(min(self._context.depth, len(self._pieces))):
            self._buffers.append(self._context.pool.take())
        self._ring = Ring(len(self._pieces), self._buffers)

    def start(self, tasks: TaskGroup) -> None:
        """Start the reading threads."""
        limiter = CapacityLimiter(self._num_threads)  # its own: threads may wait long for the consumer
        for _ in range(self._num_threads):
            tasks.start_soon(self._run_thread, limiter)

    def stop(self) -> None:
        """Start no further read."""
        self._ring.stop()

    def close(self) -> None:
        """Return every buffer to the pool; only after the threads have ended."""
        self._return_lent()
        for buffer in self._buffers:
            self._context.pool.put(buffer)
        self._buffers.clear()
        self._ring = Ring(0, ())

    def __aiter__(self) -> AsyncIterator[HostChunk]:
        return self

    async def __anext__(self) -> HostChunk:
        self._return_lent()
        if self._num_taken == len(self._pieces):
            raise StopAsyncIteration
        buffer = await self._take()
        span = self._pieces.span(self._num_taken)
        self._num_taken += 1
        self._lent_buffer, self._lent = buffer, buffer[: span.stop - span.start]
        return HostChunk(
            self._shard.buffer_offset_bytes + span.start,
            self._lent,
            self._context.tier,
            pinned=self._context.pool.is_pinned(buffer),
            buffered=self._file.buffered,
        )

    async def _take(self) -> memoryview:
        """Wait for the next piece in order."""
        await checkpoint()
        while True:
            self._wake = anyio.Event()
            outcome = self._ring.take()
            if isinstance(outcome, memoryview):
                return outcome
            if outcome is not None:
                raise outcome
            if not self._num_threads:  # else a part would pass for the whole
                await checkpoint()  # a cancellation may have ended the threads first
                raise StoreError(f"Reading {self._shard.file!r} ended early: its block was left.")
            await self._wake.wait()

    async def _run_thread(self, limiter: CapacityLimiter) -> None:
        try:
            await run_in_thread(self._read_pieces, limiter=limiter)
        finally:
            self._num_threads -= 1
            self._wake.set()

    def _read_pieces(self) -> None:
        while (claim := self._ring.claim()) is not None:
            index, buffer = claim
            span = self._pieces.span(index)
            outcome: memoryview | StoreError = buffer
            try:
                self._pieces.read(index, buffer[: span.stop - span.start])
            except StoreError as exc:
                outcome = exc
            if self._ring.fill(index, outcome):
                from_thread.run_sync(self._notify)

    def _notify(self) -> None:
        self._wake.set()

    def _return_lent(self) -> None:
        if self._lent is not None and self._lent_buffer is not None:
            give_back(self._lent)
            self._ring.put_back(self._lent_buffer)
            self._lent = self._lent_buffer = None


async def read_into(file: BlockFile, shard: Shard, context: ReadContext, destination: memoryview) -> None:
    """Read a shard straight into `destination`, which is as long; `file` is opened here, and left open.

    Reads go through the page cache unless the destination begins on a page (`is_aligned`). A cancellation or
    an error waits for the running reads; what they have written stays.

    Raises:
        StoreError: see `Pieces.read`; of several errors the one nearest to the beginning.
    """
    read = _InPlace(file, context.pieces(file, shard), destination)
    await in_thread(read.open, limiter=context.limiter)
    limiter = CapacityLimiter(context.threads)
    async with background() as watch:
        watch.start_soon(read.stop_when_cancelled)
        async with anyio.create_task_group() as threads:
            for _ in range(min(context.threads, len(read.pieces))):
                threads.start_soon(partial(run_in_thread, read.run, limiter=limiter))
    if read.errors:
        raise read.errors[min(read.errors)]


def is_aligned(destination: memoryview) -> bool:
    """Whether direct reads can write to this memory."""
    return address_of(destination) % ALIGNMENT_BYTES == 0


class _InPlace:
    """The part of `read_into` that runs in threads."""

    def __init__(self, file: BlockFile, pieces: Pieces, destination: memoryview) -> None:
        self.pieces = pieces
        self.errors: dict[int, StoreError] = {}
        self._file = file
        self._destination = destination
        self._indices = iter(range(len(pieces)))  # `next` on it is atomic
        self._stopped = False

    def open(self) -> None:
        shard = self.pieces.shard
        self._file.open()
        self._file.check_size(shard.file_offset_bytes + shard.size_bytes)

    def run(self) -> None:
        """Read pieces that no other thread has taken, until none is left."""
        for index in self._indices:
            if self._stopped:
                return
            try:
                with self._destination[
                    self.pieces.span(index)
                ] as part:  # else a kept traceback would keep it in use
                    self.pieces.read(index, part)
            except StoreError as exc:
                self.errors[index] = exc
                self._stopped = True

    async def stop_when_cancelled(self) -> None:
        try:
            await anyio.sleep_forever()
        finally:
            self._stopped = True


class DiskReader:
    """Reads shards from files under one root; past the page cache, until that is refused once."""

    def __init__(self, root: Path, context: ReadContext, *, direct: bool) -> None:
        self._root = root
        self._context = context
        self._direct = direct

    @asynccontextmanager
    async def open(self, path: Path, shard: Shard) -> AsyncGenerator[AsyncIterator[HostChunk]]:
        """Lend a shard; see `WeightStore.open`."""
        with self._file(path) as file:
            chunks = ReadAhead(file, shard, self._context)
            try:
                await in_thread(chunks.prepare, limiter=self._context.limiter)
                async with background() as tasks:
                    chunks.start(tasks)
                    try:
                        yield chunks
                    finally:
                        chunks.stop()
            finally:
                chunks.close()

    async def read_into(self, path: Path, shard: Shard, destination: memoryview) -> HostChunk:
        """Read a shard into a buffer; see `SupportsReadInto`."""
        with destination.cast("B") as whole:  # released at the end, even where a kept traceback refers to it
            if whole.readonly or len(whole) != shard.size_bytes:
                raise ValueError(
                    f"The destination for {shard.file!r} has {len(whole)} bytes"
                    f"{', read-only' if whole.readonly else ''}; give {shard.size_bytes} writable ones."
                )
            if not is_aligned(whole):
                buffered = await self._copy_into(path, shard, whole)
            else:
                with self._file(path) as file:
                    await read_into(file, shard, self._context, whole)
                    buffered = file.buffered
        return HostChunk(shard.buffer_offset_bytes, destination, self._context.tier, buffered=buffered)

    async def _copy_into(self, path: Path, shard: Shard, destination: memoryview) -> bool:
        """Copy from the ring, whose buffers are aligned; return whether the page cache was used."""
        buffered = False
        async with self.open(path, shard) as chunks:
            async for chunk in chunks:
                start = chunk.offset_bytes - shard.buffer_offset_bytes
                target = destination[start : start + len(chunk.data)]
                await in_thread(partial(copy, target, chunk.data))
                buffered = chunk.buffered
        return buffered

    @contextmanager
    def _file(self, path: Path) -> Generator[BlockFile]:
        """A file for one read, not yet open; remembers afterwards whether direct reads were refused."""
        file = BlockFile(path, direct=self._direct, calls=self._context.calls)
        try:
            yield file
        finally:
            file.close()
            if file.refused and self._direct:
                self._direct = False
                _log.warning("%r refuses direct reads; going on through the page cache.", str(self._root))
