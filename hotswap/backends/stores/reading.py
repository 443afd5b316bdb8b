"""One shard on its way from a file to a consumer: the next chunk is read while one is lent."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import TypeAlias

import anyio
from anyio import CapacityLimiter, to_thread
from anyio.abc import TaskGroup
from anyio.lowlevel import checkpoint

from hotswap.backends.stores.bandwidth import Bandwidth
from hotswap.backends.stores.fields import CONVERT_AGAIN
from hotswap.backends.stores.files import BlockFile, aligned_buffer
from hotswap.backends.stores.layout import Checksum
from hotswap.errors import ShardCorrupt, StoreError
from hotswap.model import HostChunk, Shard

__all__ = ["BufferPool", "Lane", "ReadAhead", "background", "check_shard", "give_back"]


@asynccontextmanager
async def background() -> AsyncGenerator[TaskGroup]:
    """A task group for work beside the block: leaving the block cancels it and waits for its end.

    What the block raises passes as it is, not in an exception group.
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
    """End a loan, so that a consumer who kept the chunk gets an error instead of another chunk's bytes.

    A consumer that still holds an array or a tensor made from the view cannot be told in this way.
    """
    if view is not None:
        with suppress(BufferError):
            view.release()


class BufferPool:
    """Page-aligned buffers of one size, kept between reads, since fresh memory costs more than the read."""

    def __init__(self, buffer_bytes: int, *, keep: int) -> None:
        self.buffer_bytes = buffer_bytes
        self.num_lent = 0
        self._keep = keep
        self._spare: list[memoryview] = []

    def take(self) -> memoryview:
        """Lend a buffer; its bytes are whatever the last reader left."""
        self.num_lent += 1
        return self._spare.pop() if self._spare else aligned_buffer(self.buffer_bytes)

    def put(self, buffer: memoryview) -> None:
        """Take a buffer back."""
        self.num_lent -= 1
        if len(self._spare) < self._keep:
            self._spare.append(buffer)

    def clear(self) -> None:
        """Forget the spare buffers."""
        self._spare.clear()


@dataclass(frozen=True, slots=True)
class Lane:
    """What the reads of one store share: its name, its buffers, its threads, and its measured speed."""

    tier: str
    pool: BufferPool
    depth: int = 2
    limiter: CapacityLimiter = field(default_factory=lambda: CapacityLimiter(4))
    bandwidth: Bandwidth = field(default_factory=lambda: Bandwidth(2e9))


_Loan: TypeAlias = tuple[memoryview, HostChunk]


class ReadAhead:
    """The chunks of one shard in order; `fill` reads up to `lane.depth` of them before they are asked for.

    Run `fill` beside the consumer (`background`), then `close`. The checksum is taken chunk by chunk and
    compared before the last chunk is lent.
    """

    def __init__(self, file: BlockFile, shard: Shard, lane: Lane) -> None:
        self._file = file
        self._shard = shard
        self._lane = lane
        self._checksum = Checksum()
        self._error: StoreError | None = None
        self._buffers = [lane.pool.take() for _ in range(lane.depth)]
        self._num_lent_bytes = 0
        self._lent: HostChunk | None = None
        self._lent_buffer: memoryview | None = None
        self._free_in, self._free_out = anyio.create_memory_object_stream[memoryview](lane.depth)
        self._full_in, self._full_out = anyio.create_memory_object_stream[_Loan](lane.depth)
        for buffer in self._buffers:
            self._free_in.send_nowait(buffer)

    def close(self) -> None:
        """Give every buffer back; only after `fill` has ended."""
        self._return_lent()
        for stream in (self._free_in, self._free_out, self._full_in, self._full_out):
            stream.close()
        for buffer in self._buffers:
            self._lane.pool.put(buffer)
        self._buffers.clear()

    def __aiter__(self) -> AsyncIterator[HostChunk]:
        return self

    async def __anext__(self) -> HostChunk:
        self._return_lent()
        try:
            self._lent_buffer, self._lent = await self._full_out.receive()
        except anyio.EndOfStream:
            await self._end()
            raise StopAsyncIteration from None
        self._num_lent_bytes += len(self._lent.data)
        return self._lent

    async def _end(self) -> None:
        """Return if the shard was lent to its end; else say why not, lest a part be taken for the whole."""
        if self._error is not None:
            raise self._error
        if self._num_lent_bytes < self._shard.size_bytes:
            await checkpoint()  # a cancellation ends `fill` too, and may reach it first
            raise StoreError(f"Reading {self._shard.file!r} ended early: its block was left.")

    async def fill(self) -> None:
        """Read the shard to its end; an error reaches the consumer after the chunks before it."""
        try:
            for start in range(0, self._shard.size_bytes, self._lane.pool.buffer_bytes):
                await self._fill_one(start)
        except StoreError as exc:
            self._error = exc
        finally:
            self._full_in.close()

    async def _fill_one(self, start: int) -> None:
        buffer = await self._free_out.receive()
        data = buffer[: min(len(buffer), self._shard.size_bytes - start)]
        await to_thread.run_sync(self._read, data, start, limiter=self._lane.limiter)
        chunk = HostChunk(self._shard.buffer_offset_bytes + start, data, self._lane.tier)
        await self._full_in.send((buffer, chunk))

    def _read(self, data: memoryview, start: int) -> None:
        began_s = time.perf_counter()
        self._file.read(data, self._shard.file_offset_bytes + start)
        self._lane.bandwidth.observe(len(data), time.perf_counter() - began_s)
        self._checksum.update(data)
        if start + len(data) == self._shard.size_bytes:
            check_shard(self._shard, self._checksum)

    def _return_lent(self) -> None:
        if self._lent is not None and self._lent_buffer is not None:
            give_back(self._lent.data)
            self._free_in.send_nowait(self._lent_buffer)
            self._lent = self._lent_buffer = None


def check_shard(shard: Shard, checksum: Checksum) -> None:
    """Raise `ShardCorrupt` if the bytes read are not those that were written."""
    if str(checksum) != shard.checksum:
        raise ShardCorrupt(
            f"The bytes of {shard.file!r} of model {shard.model!r} have changed: their checksum is "
            f"{checksum}, the index says {shard.checksum}. {CONVERT_AGAIN}"
        )
