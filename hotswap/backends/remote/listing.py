"""What a remote engine keeps of requests that have ended: told by its host, read over a link for blocks."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import anyio
from anyio.abc import TaskGroup

from hotswap.backends.remote.control import ControlLink
from hotswap.backends.remote.linked import LinkedEngine
from hotswap.backends.remote.messages import MAX_PAYLOAD_BYTES
from hotswap.backends.remote.moves import RemoteSink, push
from hotswap.backends.remote.pages import PageLink
from hotswap.backends.remote.values import tokens_in
from hotswap.backends.transports import wire
from hotswap.backends.transports.link_errors import ProtocolError
from hotswap.migration import CachedKV, KVLayout, KVPages, KVSink

__all__ = ["ListsKV", "listed"]

# Of one listing, the latest first. What is over these limits is computed again.
_MOST_TOKENS, _MOST_ENTRIES, _MOST_LAYOUTS = MAX_PAYLOAD_BYTES // wire.TOKEN_BYTES // 4, 4096, 16
# A link for blocks that is not used for so long is closed; the next read opens another.
_IDLE_S = 5.0


def listed(cached: Sequence[CachedKV]) -> tuple[list[CachedKV], dict[str, object], memoryview]:
    """Return which entries are told, the fields that tell of them, and all their tokens."""
    told, layouts, num_tokens = list[CachedKV](), list[KVLayout](), 0
    for entry in cached:
        num_tokens += len(entry.tokens)
        if entry.layout not in layouts:
            layouts.append(entry.layout)
        if num_tokens > _MOST_TOKENS or len(layouts) > _MOST_LAYOUTS or len(told) == _MOST_ENTRIES:
            break
        told.append(entry)
    fields: dict[str, object] = {
        "layouts": [{"layout": wire.layout_fields(layout)} for layout in layouts[:_MOST_LAYOUTS]],
        "layout": [layouts.index(entry.layout) for entry in told],
        "num_tokens": [len(entry.tokens) for entry in told],
    }
    return told, fields, wire.pack_tokens(itertools.chain.from_iterable(entry.tokens for entry in told))


class _Listing:
    """One listing at the host of an engine; its entries are read one at a time.

    Args:
        engine: The engine.
        tasks: Of the engine, for the task that closes links for blocks.
        link: Over which the host has told it.
        key: What the host calls it.
    """

    def __init__(self, engine: LinkedEngine, tasks: TaskGroup, link: ControlLink, key: str) -> None:
        self._engine, self._tasks, self.link, self.key = engine, tasks, link, key
        self._pages: PageLink | None = None
        self._reading, self._used_s = anyio.Lock(), 0.0

    async def read(self, layout: KVLayout, entry: int, first_block: int, num_tokens: int) -> KVPages:
        """Read blocks of an entry."""
        async with self._reading:
            try:
                pages = await self.link.unless_lost(self._page_link(layout))
                return await self.link.unless_lost(pages.read(first_block, num_tokens, entry=entry))
            finally:
                self._used_s = anyio.current_time()

    async def _page_link(self, layout: KVLayout) -> PageLink:
        if self._pages is None or self._pages.is_closed:
            pages = PageLink(await self._engine.open_channel(), layout)
            self._tasks.start_soon(self._close_idle, pages, name=f"link for blocks of {self._engine.id}")
            await pages.open(self.key)
            self._pages = pages
        return self._pages

    async def _close_idle(self, pages: PageLink) -> None:
        """Close a link once it is not used any more, or cannot be."""
        try:
            while not (pages.is_closed or self.link.lost):
                with anyio.move_on_after(_IDLE_S):
                    await self.link.ended.wait()
                if not self._reading.locked() and self._used_s + _IDLE_S <= anyio.current_time():
                    break
        finally:
            with anyio.CancelScope(shield=True):
                await pages.leave()


class _RemoteCachedKV(CachedKV):
    """One entry of a listing."""

    def __init__(self, listing: _Listing, entry: int, layout: KVLayout, tokens: tuple[int, ...]) -> None:
        self.layout, self.tokens = layout, tokens
        self._listing, self._entry = listing, entry

    async def read(self, first_block: int, num_tokens: int) -> KVPages:
        return await self._listing.read(self.layout, self._entry, first_block, num_tokens)

    async def copy_to(self, sink: KVSink, first_block: int, num_tokens: int) -> int:
        link = self._listing.link
        if isinstance(sink, RemoteSink) and sink.end.link is link:  # at the same host
            return await push(link, self._listing.key, sink, first_block, num_tokens, entry=self._entry)
        return await super().copy_to(sink, first_block, num_tokens)


class ListsKV(LinkedEngine):
    """See `SupportsKVListing`; of long listings the latest 262,144 tokens."""

    async def cached_kv(self) -> Sequence[CachedKV]:
        link = self._linked()
        assert self._tasks is not None, "it has a link"
        answer = await link.call("list_kv")
        with link.reading():
            fields, tokens = answer.fields, await tokens_in(answer.payload)
            listing = _Listing(self, self._tasks, link, fields.text("key"))
            layouts = [wire.layout_of(wire.Message("", 0, layout)) for layout in fields.records("layouts")]
            of, lengths = fields.sizes("layout"), fields.sizes("num_tokens")
            if len(of) != len(lengths) or sum(lengths) != len(tokens) or any(n >= len(layouts) for n in of):
                raise ProtocolError("the entries of a listing do not agree with each other")
        ends = itertools.accumulate(lengths)
        return [
            _RemoteCachedKV(listing, entry, layouts[layout], tokens[end - length : end])
            for entry, (layout, length, end) in enumerate(zip(of, lengths, ends, strict=True))
        ]
