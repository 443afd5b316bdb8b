"""`RemoteSource` and `RemoteSink`: the ends of moves of engines elsewhere, as their controller has them."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager, suppress

import anyio
from anyio.lowlevel import checkpoint

from hotswap.backends.remote.control import Answer, ControlLink
from hotswap.backends.remote.linked import LinkedEngine
from hotswap.backends.remote.pages import PageLink
from hotswap.backends.transports import wire
from hotswap.backends.transports.link_errors import reason_in
from hotswap.errors import InstanceLost, MigrationAborted
from hotswap.migration import KVPages, KVSink, KVSource, Stopped
from hotswap.request import Request, RequestId

__all__ = ["End", "Migrates", "RemoteSink", "RemoteSource", "push"]

log = logging.getLogger("hotswap")

_LEAVE_S = 10.0


class End:
    """One end of a move, lent by a host.

    Args:
        engine: The engine that has the end.
        link: The link over which the host has lent it.
        answer: What the host has answered.

    Attributes:
        layout: The format of the blocks.
        num_present_blocks: See `KVSink`.
        key: What the host calls it.
        address: Where other hosts reach its host; "" if they do not.
        is_left: Whether the host has said that its engine has it back.
    """

    def __init__(self, engine: LinkedEngine, link: ControlLink, answer: Answer) -> None:
        self._engine, self.link = engine, link
        self._pages: PageLink | None = None
        self.is_left = False
        with link.reading():
            self.layout = wire.layout_of(wire.Message("", 0, answer.fields))
            self.num_present_blocks = answer.fields.size("num_present_blocks")
            self.key, self.address = answer.fields.text("key"), answer.fields.text("address")

    @asynccontextmanager
    async def lent(self) -> AsyncGenerator[None]:
        """Give it back at the end of the block, and return when the engine has it."""
        try:
            yield
        finally:
            with anyio.CancelScope(shield=True):
                with suppress(InstanceLost, MigrationAborted), anyio.move_on_after(_LEAVE_S):
                    await self.call("leave")
                    self.is_left = True
                await self._close_pages()

    async def call(self, verb: str, payload: memoryview | None = None, /, **fields: object) -> Answer:
        """Have the host do something with it."""
        return await self.link.call_at_once(verb, payload, key=self.key, **fields)

    async def read(self, first_block: int, num_tokens: int) -> KVPages:
        """Read blocks of a source."""
        return await self.link.unless_lost(self._read(first_block, num_tokens))

    async def write(self, pages: KVPages) -> None:
        """Write blocks to a sink."""
        await self.link.unless_lost(self._write(pages))

    def cannot_reach(self, other: End, because: str) -> None:
        """Note that its host does not."""
        log.warning(
            "The host of %r does not reach that of %r: %s. Stored KV blocks go through this process; "
            "the hosts try again after %.0f s.",
            self._engine.id,
            other._engine.id,
            because,
            self.link.reach.failed(other.link),
        )

    async def _read(self, first_block: int, num_tokens: int) -> KVPages:
        return await (await self._page_link()).read(first_block, num_tokens)

    async def _write(self, pages: KVPages) -> None:
        await (await self._page_link()).write(pages)

    async def _page_link(self) -> PageLink:
        if self._pages is None or self._pages.is_closed:
            self._pages = PageLink(await self._engine.open_channel(), self.layout)
            await self._pages.open(self.key)
        return self._pages

    async def _close_pages(self) -> None:
        if self._pages is not None:
            await self._pages.leave()


class RemoteSource(KVSource):
    """The source of a move at the host of a remote engine.

    Args:
        end: What the host has lent.
        is_stored: Whether its blocks are stored ones: they go through this process if their host turns out
            not to reach the sink's. A move ends then, for the request can go on as tokens.
    """

    def __init__(self, end: End, *, is_stored: bool = False) -> None:
        self.layout, self._end, self._is_stored = end.layout, end, is_stored
        self._sent_to: KVSink | None = None
        self._sent_from = self._sent_bytes = 0

    async def num_tokens(self) -> int:
        answer = await self._end.call("num_tokens")
        with self._end.link.reading():
            return answer.fields.size("num_tokens")

    async def read(self, first_block: int, num_tokens: int) -> KVPages:
        return await self._end.read(first_block, num_tokens)

    async def copy_to(self, sink: KVSink, first_block: int, num_tokens: int) -> int:
        """Copy blocks from host to host, where the source's reaches the sink's; else through this process."""
        if sink is self._sent_to and first_block >= self._sent_from:  # with the stop: all that was left
            await checkpoint()
            num_bytes, self._sent_bytes = self._sent_bytes, 0
            return num_bytes
        link = self._end.link
        if isinstance(sink, RemoteSink) and (sink.end.link is link or self._reached(sink) is not None):
            try:
                num_bytes = await push(link, self._end.key, sink, first_block, num_tokens)
            except MigrationAborted as exc:
                if sink.end.link is link or exc.stage != "link" or not self._is_stored:
                    raise
                self._end.cannot_reach(sink.end, reason_in(exc))
            else:
                link.reach.worked(sink.end.link)
                return num_bytes
        return await super().copy_to(sink, first_block, num_tokens)

    async def stop(self) -> Stopped:
        return _stopped(self._end, await self._end.call("stop"))

    async def stop_for(self, sink: KVSink, first_block: int) -> Stopped:
        """Stop the request, and have its host send what is left to the sink's and commit it, in one call."""
        if (far := self._reached(sink)) is None:
            return await self.stop()
        call = self._end.call("stop", to=far.address, sink=far.key, entry=0, first_block=first_block)
        answer = await far.link.unless_lost(call)
        stopped = _stopped(self._end, answer)
        with self._end.link.reading():
            is_sent, self._sent_bytes = answer.fields.flag("is_sent"), answer.fields.size("num_bytes")
        if is_sent and isinstance(sink, RemoteSink):
            sink.committed = stopped.tokens
            self._sent_to, self._sent_from = sink, first_block
        return stopped

    async def release(self) -> None:
        await self._end.call("release")

    def _reached(self, sink: KVSink) -> End | None:
        """Return a sink's end if the source's host reaches the sink's."""
        if not (isinstance(sink, RemoteSink) and self._end.address and sink.end.address):
            return None
        return sink.end if self._end.link.reach.may_try(sink.end.link) or not self._is_stored else None


def _stopped(end: End, answer: Answer) -> Stopped:
    with end.link.reading():
        return Stopped(
            wire.tokens_of(memoryview(answer.payload)),
            answer.fields.size("num_computed"),
            answer.fields.number("ago_s"),
        )


class RemoteSink(KVSink):
    """The sink of a move at the host of a remote engine.

    Attributes:
        end: What the host has lent.
        committed: What the source's host has had committed already.
    """

    def __init__(self, end: End) -> None:
        self.layout, self.num_present_blocks, self.end = end.layout, end.num_present_blocks, end
        self.committed: tuple[int, ...] | None = None
        self._num_reserved = 0  # blocks

    async def reserve(self, num_tokens: int) -> None:
        num_blocks = -(-num_tokens // self.layout.block_tokens)
        if num_blocks > self._num_reserved or self.end.link.lost:
            await self.end.call("reserve", num_tokens=num_tokens)
            self._num_reserved = num_blocks
        else:  # a call would change nothing, and the request may be stopped
            await checkpoint()

    async def write(self, pages: KVPages) -> None:
        await self.end.write(pages)

    async def commit(self, tokens: Sequence[int]) -> None:
        if self.committed == tuple(tokens):
            return await checkpoint()
        await self.end.call("commit", wire.pack_tokens(tokens))
        return None


async def push(
    link: ControlLink, key: str, sink: RemoteSink, first_block: int, num_tokens: int, *, entry: int = 0
) -> int:
    """Have a host copy blocks of what it has lent to a sink, its own or another's; return how many bytes.

    The loss of the sink's host ends that, too, and not only of this one. After a cancellation the host does
    nothing for it any more once this returns.

    Args:
        link: To the host.
        key: What it calls the source, or the listing.
        sink: Where blocks go, at a host that it reaches.
        first_block: The first of them.
        num_tokens: How many tokens they have.
        entry: Which entry of the listing.
    """
    to = "" if sink.end.link is link else sink.end.address
    what = {"key": key, "entry": entry, "first_block": first_block, "num_tokens": num_tokens}
    answer = await sink.end.link.unless_lost(link.call_at_once("push", to=to, sink=sink.end.key, **what))
    with link.reading():
        return answer.fields.size("num_bytes")


class Migrates(LinkedEngine):
    """See `SupportsMigration`: control goes over the engine's link, blocks over links of their own."""

    @asynccontextmanager
    async def export_kv(self, request: RequestId) -> AsyncGenerator[KVSource]:
        link = self._linked()
        end = End(self, link, await link.call("export", request=request))
        async with end.lent():
            yield RemoteSource(end)

    @asynccontextmanager
    async def import_kv(self, request: Request) -> AsyncGenerator[KVSink]:
        link = self._linked()
        fields = wire.request_fields(request)
        end = End(self, link, await link.call("import", wire.pack_tokens(request.tokens), **fields))
        async with end.lent():
            yield RemoteSink(end)
