"""A mapped segment in one process: its use count, pinning for a device, and exclusive filling."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TypeVar

import anyio
from anyio import CancelScope

from hotswap.backends.memory import can_pin, pin, unpin
from hotswap.backends.stores.files import map_write_errors
from hotswap.backends.stores.host_tier import BufferReservation
from hotswap.backends.stores.locks import LOCK_LIMIT_S, holder_of, pauses
from hotswap.backends.stores.segment import Segment
from hotswap.backends.stores.segment_directory import Busy
from hotswap.errors import StoreBusy
from hotswap.model import Manifest, Shard
from hotswap.worker_threads import in_thread, run_in_thread, shielded

__all__ = ["BusyWait", "SharedBuffer", "SharedBufferReservation", "retry_while_busy"]

_T = TypeVar("_T")
_LONG_S = 5.0  # the directory is locked for as long as the removal of segments takes

_log = logging.getLogger("hotswap.stores")


class SharedBuffer:
    """A mapped segment and its uses in this process; removed with the last use unless it is `kept`."""

    def __init__(self, manifest: Manifest, rank: int, segment: Segment) -> None:
        self.segment = segment
        self.label = segment.label
        self.numbers = {shard: number for number, shard in enumerate(manifest.shards_of(rank))}
        self.users = 0
        self.uses = 0
        self.kept = not segment.created
        self.pinned = False
        self.preparing = anyio.Lock()
        self.fill_lock = anyio.Lock()
        self.num_filling = 0
        self._tried_to_pin = False

    @property
    def whole(self) -> bool:
        return self.segment.whole

    @property
    def data(self) -> memoryview:
        return self.segment.memory.toreadonly()

    @property
    def place(self) -> tuple[Path | None, int]:
        return self.segment.path, self.label.header_bytes

    def has(self, shard: Shard) -> bool:
        return self.segment.has(self.numbers[shard])

    def part(self, shard: Shard) -> memoryview:
        start = shard.buffer_offset_bytes
        part = self.segment.memory[start : start + shard.size_bytes]
        return part.toreadonly() if self.has(shard) else part

    async def prepare(self, directory: Path) -> None:
        """Allocate the pages and pin them; a cancellation takes effect between parts of the memory."""
        for number in range(self.segment.num_reservations):
            with map_write_errors(directory, memory=True):
                await in_thread(partial(self.segment.reserve, number))
        if not self._tried_to_pin and can_pin():
            await in_thread(self._pin)

    def _pin(self) -> None:
        self._tried_to_pin = True
        self.pinned = not self.segment.memory.readonly and pin(self.segment.memory)

    async def end_filling(self) -> None:
        """End one fill of this process; the last one lets other processes fill."""
        async with self.fill_lock:
            self.num_filling -= 1
            if not self.num_filling:
                await run_in_thread(self.segment.end_filling)

    def close(self) -> None:
        """Unpin and unmap. Blocking."""
        if self.pinned:
            unpin(self.segment.memory)
        self.segment.close(discard=not self.kept)


class SharedBufferReservation(BufferReservation):
    """Keeps a segment mapped while it is filled; inside `filling` this process alone writes to it."""

    def __init__(self, buffer: SharedBuffer) -> None:
        super().__init__(buffer)
        self._shared_buffer = buffer

    @asynccontextmanager
    async def filling(self) -> AsyncGenerator[None]:
        buffer = self._shared_buffer
        if buffer.whole:  # which it stays
            yield
            return
        async with buffer.fill_lock:
            if not buffer.num_filling:
                for pause_s in pauses():
                    if buffer.segment.try_filling():
                        break
                    await anyio.sleep(pause_s)
            buffer.num_filling += 1
        try:
            yield
        finally:
            with CancelScope(shield=True):
                await shielded(buffer.end_filling)

    def commit(self, shard: Shard) -> None:
        self._shared_buffer.segment.commit(self._shared_buffer.numbers[shard])

    def keep(self) -> None:
        self._shared_buffer.kept = True


class BusyWait:
    """Pauses between attempts to use a directory that another process has locked; they may be cancelled."""

    def __init__(self, limit_s: float = LOCK_LIMIT_S) -> None:
        self._limit_s = limit_s
        self._pauses = pauses()
        self._waited_s = 0.0

    async def pause(self, busy: Busy) -> None:
        """Wait before the next attempt; a long wait is logged.

        Raises:
            StoreBusy: the pauses have taken `limit_s` together.
        """
        pause_s = next(self._pauses)
        directory = Path(*busy.args)
        if self._waited_s <= _LONG_S < self._waited_s + pause_s:
            _log.warning(
                "Another process has had a shared directory locked for %g s; waiting goes on. "
                "If it hangs, end it and its child processes.",
                _LONG_S,
            )
        if self._waited_s >= self._limit_s:
            raise StoreBusy(
                f"{str(directory)!r} has been locked by {holder_of(directory)} for {self._limit_s:g} s. "
                "If that process hangs, end it and its child processes; nothing was changed."
            )
        self._waited_s += pause_s
        await anyio.sleep(pause_s)


async def retry_while_busy(call: Callable[[], _T], limit_s: float = LOCK_LIMIT_S) -> _T:
    """Call in a worker thread, again while another process has the directory locked; may be cancelled.

    Raises:
        StoreBusy: it still is after `limit_s`.
    """
    wait = BusyWait(limit_s)
    while True:
        try:
            return await in_thread(call)
        except Busy as exc:
            busy = exc
        await wait.pause(busy)
