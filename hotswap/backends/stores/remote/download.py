"""One shard on its way over a network: several parts in flight, verified and lent in order."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import TypeAlias

import anyio
from anyio import to_thread
from anyio.lowlevel import checkpoint

from hotswap.backends.stores.bandwidth import Bandwidth
from hotswap.backends.stores.layout import Checksum
from hotswap.backends.stores.reading import BufferPool, background, give_back
from hotswap.backends.stores.remote.objects import PUSH_AGAIN, Objects, Part, Version
from hotswap.errors import ShardCorrupt, StoreError
from hotswap.model import HostChunk, Shard

__all__ = ["Download", "Link"]

_Filled: TypeAlias = tuple[memoryview, Part]  # a buffer, and the part that lies in it


class _Meter:
    """Learns what a link gives to all transfers together, from the time in which there was at least one."""

    def __init__(self, guess_bytes_per_s: float) -> None:
        self.bandwidth = Bandwidth(guess_bytes_per_s)
        self._active = 0
        self._since_s = 0.0

    def begin(self) -> None:
        if not self._active:
            self._since_s = anyio.current_time()
        self._active += 1

    def end(self, size_bytes: int) -> None:
        now_s = anyio.current_time()
        self.bandwidth.observe(size_bytes, now_s - self._since_s)
        self._since_s = now_s
        self._active -= 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """What the downloads of one store share: its name, its buffers, and its measured speed."""

    tier: str
    pool: BufferPool
    concurrency: int
    meter: _Meter = field(default_factory=lambda: _Meter(0.5e9))


class Download:
    """The chunks of one shard in order, each one part; `fill` fetches them before they are asked for.

    Run `fill` beside the consumer (`background`), then `close`. As many buffers as parts may be in flight,
    and one that is lent, are all the memory it uses. The checksum is compared before the last chunk is lent.
    """

    def __init__(self, objects: Objects, path: str, shard: Shard, link: Link) -> None:
        self._objects = objects
        self._path = path
        self._shard = shard
        self._link = link
        self._version = Version(least_bytes=shard.file_offset_bytes + shard.size_bytes)
        self._checksum = Checksum()
        self._error: StoreError | None = None
        self._starts = iter(range(0, shard.size_bytes, link.pool.buffer_bytes))
        self._num_lent_bytes = 0
        self._lent: _Filled | None = None
        num_parts = -(-shard.size_bytes // link.pool.buffer_bytes)
        self._num_workers = min(link.concurrency, num_parts)
        self._buffers = [link.pool.take() for _ in range(min(link.concurrency + 1, num_parts))]
        depth = len(self._buffers)
        self._free_in, self._free_out = anyio.create_memory_object_stream[memoryview](depth)
        self._come_in, self._come_out = anyio.create_memory_object_stream[_Filled | StoreError](2 * depth)
        self._full_in, self._full_out = anyio.create_memory_object_stream[_Filled](depth)
        for buffer in self._buffers:
            self._free_in.send_nowait(buffer)

    def close(self) -> None:
        """Give every buffer back; only after `fill` has ended."""
        self._return_lent()
        for sender, receiver in (
            (self._free_in, self._free_out),
            (self._come_in, self._come_out),
            (self._full_in, self._full_out),
        ):
            sender.close()
            receiver.close()
        for buffer in self._buffers:
            self._link.pool.put(buffer)
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
        return HostChunk(offset, part.target, self._link.tier)

    async def fill(self) -> None:
        """Fetch the shard to its end; an error reaches the consumer after the chunks verified before it."""
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
        """Return if the shard was lent to its end; else say why not, lest a part be taken for the whole."""
        if self._error is not None:
            raise self._error
        if self._num_lent_bytes < self._shard.size_bytes:
            await checkpoint()  # a cancellation ends `fill` too, and may reach it first
            raise StoreError(f"Reading {self._objects.url(self._path)!r} ended early: its block was left.")

    async def _fetch_parts(self) -> None:
        """Fetch part after part; the buffer comes before the place, so that the part due next has one."""
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
                self._come_in.send_nowait(exc)
                return
            self._come_in.send_nowait((buffer, part))

    async def _fetch(self, part: Part) -> None:
        self._link.meter.begin()
        try:
            await self._objects.read_part(self._path, part, self._version)
        finally:
            self._link.meter.end(part.done)

    async def _verify_in_order(self) -> None:
        """Hand over the parts as they are due, and the last one only if all of them are what was written."""
        early: dict[int, _Filled] = {}
        due, end = self._shard.file_offset_bytes, self._shard.file_offset_bytes + self._shard.size_bytes
        while due < end:
            while due not in early:
                come = await self._come_out.receive()
                if isinstance(come, StoreError):
                    raise come
                early[come[1].start] = come
            filled = early.pop(due)
            part = filled[1]
            await to_thread.run_sync(self._checksum.update, part.target)
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
