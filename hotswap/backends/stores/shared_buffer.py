"""A segment while this process has it mapped: pinned for a device, filled, and waited for."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TypeVar

import anyio
from anyio import CancelScope, to_thread

from hotswap.backends.memory import pin, unpin
from hotswap.backends.stores.host_tier import Hold
from hotswap.backends.stores.segment import Segment
from hotswap.backends.stores.segment_shelf import Busy, map_memory_errors
from hotswap.backends.stores.unbroken import in_thread, unbroken
from hotswap.model import Manifest, Shard

__all__ = ["SharedBuffer", "SharedHold", "patiently", "pauses"]

_T = TypeVar("_T")
_LONG_S = 5.0  # the books are locked for as long as it takes to remove segments

_log = logging.getLogger("hotswap.stores")


class SharedBuffer:
    """A mapped segment, and how this process uses it; it goes with the last use unless it is `kept`."""

    def __init__(self, manifest: Manifest, rank: int, segment: Segment) -> None:
        self.segment = segment
        self.label = segment.label
        self.numbers = {shard: number for number, shard in enumerate(manifest.shards_of(rank))}
        self.users = 0
        self.uses = 0
        self.kept = not segment.created
        self.pinned = False
        self.preparing = anyio.Lock()
        self.turn = anyio.Lock()
        self.num_filling = 0
        self._asked = False

    @property
    def whole(self) -> bool:
        return self.segment.whole

    @property
    def data(self) -> memoryview:
        return self.segment.memory.toreadonly()

    @property
    def place(self) -> tuple[Path | None, int]:
        return self.segment.path, self.label.head_bytes

    def has(self, shard: Shard) -> bool:
        return self.segment.has(self.numbers[shard])

    def part(self, shard: Shard) -> memoryview:
        start = shard.buffer_offset_bytes
        part = self.segment.memory[start : start + shard.size_bytes]
        return part.toreadonly() if self.has(shard) else part

    async def prepare(self, directory: Path) -> None:
        """See that the pages are there, and pin them; a cancellation is heard between parts of the memory."""
        for number in range(self.segment.num_reservations):
            with map_memory_errors(directory):
                await in_thread(partial(self.segment.reserve, number))
        if not self._asked:
            await in_thread(self._pin)

    def _pin(self) -> None:
        self._asked = True
        self.pinned = not self.segment.memory.readonly and pin(self.segment.memory)

    async def end_filling(self) -> None:
        """End one of this process's turns to write."""
        async with self.turn:
            self.num_filling -= 1
            if not self.num_filling:
                await to_thread.run_sync(self.segment.end_filling)

    def close(self) -> None:
        """Unpin and unmap; blocks for as long as memory takes."""
        if self.pinned:
            unpin(self.segment.memory)
        self.segment.close(discard=not self.kept)


class SharedHold(Hold):
    """A segment while this process fills it, alone among all processes inside `filling`."""

    def __init__(self, buffer: SharedBuffer) -> None:
        super().__init__(buffer)
        self._mine = buffer

    @asynccontextmanager
    async def filling(self) -> AsyncGenerator[None]:
        buffer = self._mine
        if buffer.whole:  # which it stays
            yield
            return
        async with buffer.turn:
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
                await unbroken(buffer.end_filling)

    def commit(self, shard: Shard) -> None:
        self._mine.segment.commit(self._mine.numbers[shard])

    def keep(self) -> None:
        self._mine.kept = True


async def patiently(ask: Callable[[], _T]) -> _T:
    """Ask in a worker thread until no other process has the books; waiting can be cancelled."""
    waited_s = 0.0
    for pause_s in pauses():
        with suppress(Busy):
            return await in_thread(ask)
        if waited_s <= _LONG_S < waited_s + pause_s:
            _log.warning(
                "Another process has had the books of a shared directory locked for %g s; waiting goes on. "
                "If it hangs, end it, and those that were forked from it.",
                _LONG_S,
            )
        waited_s += pause_s
        await anyio.sleep(pause_s)
    raise AssertionError("pauses end")


def pauses(*, most_s: float = 0.05) -> Iterator[float]:
    """How long to wait before asking again what another process does, without end."""
    pause_s = 0.001
    while True:
        yield pause_s
        pause_s = min(2 * pause_s, most_s)
