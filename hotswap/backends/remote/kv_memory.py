"""`KVMemory`: memory of a host for KV blocks, of which its controller keeps account.

The controller says which pages a block has. The host lends pages as the sink of a move, or as its source, as
it lends the ends of an engine's moves, and copies between the two: blocks of its engine stay on its machine.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from functools import partial

import numpy as np
from anyio.lowlevel import checkpoint

from hotswap.backends.fields import Fields
from hotswap.backends.kv_stores.arena import Arena
from hotswap.backends.kv_stores.pages import PAGE_BYTES, PAGE_DTYPE, Pages, whole_pages
from hotswap.backends.transports import wire
from hotswap.backends.transports.link_errors import ProtocolError
from hotswap.errors import MigrationAborted, TierFull
from hotswap.migration import KVLayout, KVPages, KVSink, KVSource, Stopped
from hotswap.worker_threads import in_thread

__all__ = ["KVMemory", "MemorySink", "MemorySource"]

# The most that is taken from the system ahead, and the part of the memory that is.
_MOST_AHEAD_BYTES, _AHEAD_PART = 1 << 30, 8


class KVMemory:
    """Memory for the KV blocks of one controller, for as long as its host knows of no other's.

    Args:
        id: What the controller calls it.
        capacity_bytes: Its size. The system gives it as it is written to, an eighth ahead.

    Raises:
        TierFull: the system has no such memory.
    """

    def __init__(self, id: str, capacity_bytes: int) -> None:
        self.id = id
        try:
            self._arena = Arena(capacity_bytes)
        except (MemoryError, OSError, OverflowError, ValueError) as exc:
            raise TierFull(
                f"The host has no {capacity_bytes:,} bytes of memory for KV blocks ({exc}). Give the store "
                "a smaller capacity."
            ) from exc
        self._ahead_bytes = min(capacity_bytes // _AHEAD_PART, _MOST_AHEAD_BYTES)
        self._num_uses, self._is_closed = 0, False

    @contextmanager
    def used(self) -> Generator[None]:
        """A block in which it is copied to or from; if it was closed meanwhile it is given back then."""
        self._num_uses += 1
        try:
            yield
        finally:
            self._num_uses -= 1
            self._give_back()

    def close(self) -> None:
        """Give it back once nothing uses it, what was pinned for it too."""
        self._is_closed = True
        self._give_back()

    def _give_back(self) -> None:
        if self._is_closed and not self._num_uses:
            self._arena.close()

    async def take_ahead(self) -> bool:
        """Have the system give some of the first pages before they are written to; false if it gives none."""
        with self.used():
            pages = self._arena.lacking(self._ahead_bytes)
            return bool(pages) and await in_thread(partial(self._arena.populate, pages))

    def lend(self, fields: Fields, payload: bytes) -> MemorySink | MemorySource:
        """Return pages as the end of a move that a message describes; `add` takes those to come.

        Raises:
            ProtocolError: it cannot be read.
        """
        with wire.protocol_errors():
            layout = wire.layout_of(wire.Message("", 0, fields))
            blocks = _Blocks(
                self._arena,
                layout,
                fields.size("first_block"),
                fields.size("num_tokens"),
                has_states=fields.flag("has_states"),
            )
            kind = MemorySink if fields.flag("is_sink") else MemorySource
        blocks.add(payload)
        return kind(blocks)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} [{self._arena.num_pages * PAGE_BYTES:,} bytes]>"


class _Blocks:
    """Blocks that follow each other, the pages that they have, and those of states after them.

    Args:
        arena: Has the pages.
        layout: The format of the blocks.
        first_block: The first of them.
        num_tokens: Where the tokens of the last one end.
        has_states: Whether pages of states come last.

    Raises:
        ProtocolError: they are larger than the memory.
    """

    def __init__(
        self, arena: Arena, layout: KVLayout, first_block: int, num_tokens: int, *, has_states: bool
    ) -> None:
        self.layout, self.num_tokens, self.has_states = layout, num_tokens, has_states
        self._arena, self._first = arena, first_block
        self._count = max(0, -(-num_tokens // layout.block_tokens) - first_block)
        self._num_block_pages = whole_pages(layout.block_bytes) // PAGE_BYTES
        num_state_pages = whole_pages(layout.state_bytes) // PAGE_BYTES
        self._num_state_pages = num_state_pages if has_states else 0
        self._num_pages = self._count * self._num_block_pages + self._num_state_pages
        # What is received in parts, or named in several messages, is as large.
        if max(self._num_pages, self._num_block_pages, num_state_pages) > arena.num_pages:
            raise ProtocolError(f"{self._count:,} blocks are larger than memory of {arena.num_pages:,} pages")
        self._pages: Pages = np.empty(0, np.int64)
        self._lent: memoryview | None = None

    def add(self, payload: bytes) -> None:
        """Take the numbers of more pages.

        Raises:
            ProtocolError: they are too many, or the memory has no such pages.
        """
        if len(payload) % PAGE_DTYPE.itemsize:
            raise ProtocolError(f"{len(payload):,} bytes are no numbers of pages")
        more = np.frombuffer(payload, PAGE_DTYPE).astype(np.int64)
        if len(self._pages) + len(more) > self._num_pages:
            raise ProtocolError(f"over {self._num_pages:,} pages are named for {self._count:,} blocks")
        if len(more) and not 0 <= int(more.min()) <= int(more.max()) < self._arena.num_pages:
            raise ProtocolError(f"pages are named of which the memory has {self._arena.num_pages:,}")
        self._pages = np.concatenate([self._pages, more])

    def is_end(self, first_block: int, num_tokens: int) -> bool:
        """Whether blocks are the last ones."""
        return first_block * self.layout.block_tokens + num_tokens == self.num_tokens

    async def fill(self, first_block: int, num_tokens: int, data: memoryview) -> None:
        """Copy blocks, and states after the last, to their pages."""
        places = self._places(first_block, num_tokens)
        size = len(places) * self.layout.block_bytes
        has_states = self.has_states and self.is_end(first_block, num_tokens)
        if len(data) not in (size, size + has_states * self.layout.state_bytes):
            raise _refused(f"{len(data):,} bytes are written to blocks of {size:,}")
        states = [self._state_place()] if len(data) > size else []
        if size:
            await self._arena.fill(places, data[:size])
        if states:
            await self._arena.fill(states, data[size:])
        await checkpoint()

    async def content(self, first_block: int, num_tokens: int) -> memoryview:
        """Return the content of blocks, and states after the last, until the next call or `done`."""
        self.done()
        places, block_bytes = self._places(first_block, num_tokens), self.layout.block_bytes
        if not (self.has_states and self.is_end(first_block, num_tokens)):
            self._lent = await self._arena.content(places, block_bytes)
            return self._lent
        size, states = len(places) * block_bytes, [self._state_place()]
        whole = memoryview(bytearray(size + self.layout.state_bytes))
        await in_thread(partial(self._arena.read, places, whole[:size], block_bytes))
        await in_thread(partial(self._arena.read, states, whole[size:], self.layout.state_bytes))
        return whole

    def done(self) -> None:
        """Take back what `content` returned."""
        lent, self._lent = self._lent, None
        if lent is not None:
            self._arena.done(lent)

    def _places(self, first_block: int, num_tokens: int) -> list[Pages]:
        count, skipped = -(-num_tokens // self.layout.block_tokens), first_block - self._first
        if skipped < 0 or skipped + count > self._count:
            raise _refused(f"{count:,} blocks from {first_block:,} on are not lent")
        if not (each := self._num_block_pages):  # of states alone
            return []
        pages = self._pages[skipped * each : (skipped + count) * each]
        if len(pages) < count * each:
            raise _refused("the pages of blocks were not named")
        return list(pages.reshape(count, each))

    def _state_place(self) -> Pages:
        if len(self._pages) < self._num_pages:
            raise _refused("the pages of states were not named")
        return self._pages[len(self._pages) - self._num_state_pages :]


class MemorySink(KVSink):
    """Pages of a host's memory as the destination of blocks."""

    def __init__(self, blocks: _Blocks) -> None:
        self.layout, self.blocks = blocks.layout, blocks

    def name_pages(self, payload: bytes) -> None:
        """See `_Blocks.add`."""
        self.blocks.add(payload)

    async def reserve(self, num_tokens: int) -> None:
        await checkpoint()

    async def write(self, pages: KVPages) -> None:
        await self.blocks.fill(pages.first_block, pages.num_tokens, pages.data)

    async def commit(self, tokens: Sequence[int]) -> None:
        await checkpoint()


class MemorySource(KVSource):
    """Pages of a host's memory as the source of blocks; `blocks.done` takes back what was read last."""

    def __init__(self, blocks: _Blocks) -> None:
        self.layout, self.blocks = blocks.layout, blocks

    def name_pages(self, payload: bytes) -> None:
        """See `_Blocks.add`."""
        self.blocks.add(payload)

    async def num_tokens(self) -> int:
        await checkpoint()
        return self.blocks.num_tokens

    async def read(self, first_block: int, num_tokens: int) -> KVPages:
        return KVPages(first_block, num_tokens, await self.blocks.content(first_block, num_tokens))

    async def stop(self) -> Stopped:
        raise _refused("no request is stopped in memory")

    async def release(self) -> None:
        raise _refused("no request is released in memory")


def _refused(what: str) -> MigrationAborted:
    return MigrationAborted(f"Stored KV blocks were not copied: {what}.", stage="copy")
