"""Downloading one shard in concurrent parts, verified and lent in order."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import TypeAlias

import anyio
from anyio.lowlevel import checkpoint

from hotswap.backends.stores.bandwidth import Meter
from hotswap.backends.stores.layout import Checksum
from hotswap.backends.stores.pieces import BufferPool
from hotswap.backends.stores.reading import background, give_back
from hotswap.backends.stores.remote.objects import PUSH_AGAIN, Objects, Part, Version
from hotswap.errors import ShardCorrupt, StoreError
from hotswap.model import HostChunk, Shard
from hotswap.worker_threads import run_in_thread

__all__ = ["Download", "DownloadContext"]

_Filled: TypeAlias = tuple[memoryview, Part]  # a buffer, and the part that was read into it


@dataclass(frozen=True, slots=True, kw_only=True)
class DownloadContext:
    """Shared by the downloads of one store: its name, buffers, and measured bandwidth."""

    tier: str
    pool: BufferPool
    concurrency: int
    meter: Meter = field(default_factory=lambda: Meter(0.5e9, anyio.current_time))


class Download:
    """The chunks of one shard in order, one for each part; `fill` fetches them ahead.

    Run `fill` beside the consumer (`background`), then `close`. It uses one buffer for each concurrent part
    and one that is lent. The checksum is compared before the last chunk is lent.
    """

    def __init__(self, objects: Objects, path: str, shard: Shard, context: DownloadContext) -> None:
        self._objects = objects
        self._path = path
        self._shard = shard
        self._context = context
        self._version = Version(least_bytes=shard.file_offset_bytes + shard.size_bytes)
        self._checksum = Checksum()
        self._error: StoreError | None = None
        self._starts = iter(range(0, shard.size_bytes, context.pool.buffer_bytes))
        self._num_lent_bytes = 0
        self._lent: _Filled | None = None
        num_parts = -(-shard.size_bytes // context.pool.buffer_bytes)
        self._num_workers = min(context.concurrency, num_parts)
        self._buffers = [context.pool.take() for _ in range(min(context.concurrency + 1, num_parts))]
        depth = len(self._buffers)
        self._free_in, self._free_out = anyio.create_memory_object_stream[memoryview](depth)
        self._arrived_in, self._arrived_out = anyio.create_memory_object_stream[_Filled | StoreError](
            2 * depth
        )
        self._full_in, self._full_out = anyio.create_memory_object_stream[_Filled](depth)
        for buffer in self._buffers:
            self._free_in.send_nowait(buffer)

    def close(self) -> None:
        """Return every buffer to the pool; only after `fill` has ended."""
        self._return_lent()
        for sender, receiver in (
            (self._free_in, self._free_out),
            (self._arrived_in, self._arrived_out),
            (self._full_in, self._full_out),
        ):
            sender.close()
            receiver.close()
        for buffer in self._buffers:
            self._context.pool.put(buffer)
        self._buffers.clear()

    def __aiter__(self) -> AsyncIterator[HostChunk]:
        return self

    async def __anext__(self) -> HostChunk:
        self._return_lent()
        try:
            self._lent = await self._full_out.receive()
        except anyio.EndOfStream:
            await self._end()
            raise StopAsyncIteration from None
        part = self._lent[1]
        self._num_lent_bytes += part.done
        offset = self._shard.buffer_offset_bytes + part.start - self._shard.file_offset_bytes
        return HostChunk(offset, part.target, self._context.tier)

    async def fill(self) -> None:
        """Fetch the whole shard; an error reaches the consumer after the chunks before it."""
        try:
            async with background() as tasks:
                for _ in range(self._num_workers):
                    tasks.start_soon(self._fetch_parts)
                await self._verify_in_order()
        except StoreError as exc:
            self._error = exc
        finally:
            self._full_in.close()

    async def _end(self) -> None:
        """Return if the whole shard was lent, else raise: a part must not pass for the whole."""
        if self._error is not None:
            raise self._error
        if self._num_lent_bytes < self._shard.size_bytes:
            await checkpoint()  # a cancellation may have ended `fill` first
            raise StoreError(f"Reading {self._objects.url(self._path)!r} ended early: its block was left.")

    async def _fetch_parts(self) -> None:
        """Fetch parts; the buffer is taken before the part, so that the next part in order always has one."""
        while True:
            buffer = await self._free_out.receive()
            start = next(self._starts, None)
            if start is None:
                return
            target = buffer[: min(len(buffer), self._shard.size_bytes - start)]
            part = Part(self._shard.file_offset_bytes + start, target)
            try:
                await self._fetch(part)
            except StoreError as exc:
                self._arrived_in.send_nowait(exc)
                return
            self._arrived_in.send_nowait((buffer, part))

    async def _fetch(self, part: Part) -> None:
        self._context.meter.begin()
        try:
            await self._objects.read_part(self._path, part, self._version)
        finally:
            self._context.meter.end(part.done)

    async def _verify_in_order(self) -> None:
        """Hand over the parts in order, the last one after the checksum of the whole."""
        early: dict[int, _Filled] = {}
        due, end = self._shard.file_offset_bytes, self._shard.file_offset_bytes + self._shard.size_bytes
        while due < end:
            while due not in early:
                arrived = await self._arrived_out.receive()
                if isinstance(arrived, StoreError):
                    raise arrived
                early[arrived[1].start] = arrived
            filled = early.pop(due)
            part = filled[1]
            await run_in_thread(self._checksum.update, part.target)
            due = part.end
            if due == end:
                self._check()
            await self._full_in.send(filled)

    def _check(self) -> None:
        if str(self._checksum) != self._shard.checksum:
            raise ShardCorrupt(
                f"The bytes of {self._objects.url(self._path)!r} are not those that were pushed: their "
                f"checksum is {self._checksum}, the index says {self._shard.checksum}. {PUSH_AGAIN}"
            )

    def _return_lent(self) -> None:
        if self._lent is not None:
            buffer, part = self._lent
            give_back(part.target)
            self._free_in.send_nowait(buffer)
            self._lent = None
