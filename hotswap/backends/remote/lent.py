"""`Lent`: what a host lends for KV blocks to be copied, by keys that it tells its controller."""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from typing import Protocol, runtime_checkable

import anyio

from hotswap.backends.remote.pages import Listing, PageLink, serve_pages
from hotswap.errors import MigrationAborted
from hotswap.migration import CachedKV, KVSink, KVSource
from hotswap.transport import Channel

__all__ = ["Lent", "LentEnd"]


class LentEnd:
    """One end of a move, lent by the engine while the call that asked for it lasts, or a listing.

    Attributes:
        end: The source, the sink, or what was listed.
        key: Its name, which cannot be guessed.
        left: Set when the controller leaves it.
        ended: Set once the engine has it back.
        peer: The link over which its blocks go to another host, once there is one.
    """

    def __init__(self, end: KVSource | KVSink | Listing, ended: anyio.Event) -> None:
        self.end, self.ended = end, ended
        self.key = secrets.token_hex(16)
        self.left = anyio.Event()
        self.peer: PageLink | None = None
        self._scopes: dict[anyio.CancelScope, anyio.Event] = {}

    async def serve_pages(self, channel: Channel) -> None:
        """Serve a link for its blocks, until either ends."""
        with anyio.CancelScope() as scope:
            ended = self._scopes[scope] = anyio.Event()
            try:
                await serve_pages(self.end, channel)
            finally:
                del self._scopes[scope]
                ended.set()

    async def close(self) -> None:
        """End all links for its blocks, before the engine takes it back."""
        with anyio.CancelScope(shield=True):
            for scope, ended in tuple(self._scopes.items()):
                scope.cancel()
                await ended.wait()
            if self.peer is not None:
                await self.peer.leave()


@runtime_checkable
class InMemory(Protocol):
    """An end of a move in memory of the host, whose pages come in several messages if they are many."""

    def name_pages(self, payload: bytes) -> None:
        """Take the numbers of more pages."""
        ...


class Lent:
    """All ends that a host lends now."""

    def __init__(self) -> None:
        self._by_key: dict[str, LentEnd] = {}
        self._listed: LentEnd | None = None

    def list(self, cached: Sequence[CachedKV]) -> str:
        """Lend what the engine keeps of ended requests until the next listing; return its key."""
        self.forget_listing()
        self._listed = listed = LentEnd(Listing(cached), anyio.Event())
        listed.left.set()  # it holds nothing of the engine, so its links may end at any time
        self._by_key[listed.key] = listed
        return listed.key

    def forget_listing(self) -> None:
        """Lend it no more: the tokens of ended requests are of no use to another controller."""
        if self._listed is not None:
            del self._by_key[self._listed.key]
            self._listed = None

    @asynccontextmanager
    async def lend(self, end: KVSource | KVSink, ended: anyio.Event) -> AsyncGenerator[LentEnd]:
        """Lend an end by its key while the block runs; `ended` is set some time afterwards."""
        lent = LentEnd(end, ended)
        self._by_key[lent.key] = lent
        try:
            yield lent
        finally:
            del self._by_key[lent.key]
            await lent.close()

    async def leave(self, key: str) -> None:
        """Leave an end, and return when the engine has it back; at once if it has."""
        if (lent := self._by_key.get(key)) is not None:
            lent.left.set()
            await lent.ended.wait()

    def leave_memory(self) -> None:
        """Leave all ends in memory of the host."""
        for lent in self._by_key.values():
            if isinstance(lent.end, InMemory):
                lent.left.set()

    def get(self, key: str) -> LentEnd | None:
        """Return an end by its key; `None` if it is not lent any more."""
        return self._by_key.get(key)

    def __getitem__(self, key: str) -> LentEnd:
        """Return an end by its key.

        Raises:
            MigrationAborted: it is not lent, or not any more.
        """
        if (lent := self._by_key.get(key)) is None:
            raise MigrationAborted("The move has ended. The request goes on without it.", stage="copy")
        return lent

    def source(self, key: str) -> KVSource:
        """Return a source by its key; errors are those of `[]`."""
        end = self[key].end
        if not isinstance(end, KVSource):
            raise MigrationAborted("A source was asked for, and this is none.", stage="copy")
        return end

    def cached(self, key: str, entry: int) -> KVSource | CachedKV:
        """Return what blocks are read from: a source, or an entry of a listing; errors are those of `[]`."""
        end = self[key].end
        return end[entry] if isinstance(end, Listing) else self.source(key)

    def name_pages(self, key: str, payload: bytes) -> None:
        """Have an end in memory know more of its pages; errors are those of `[]`."""
        end = self[key].end
        if not isinstance(end, InMemory):
            raise MigrationAborted("Pages were named for an end that is not in memory.", stage="copy")
        end.name_pages(payload)

    def sink(self, key: str) -> KVSink:
        """Return a sink by its key; errors are those of `[]`."""
        end = self[key].end
        if not isinstance(end, KVSink):
            raise MigrationAborted("A sink was asked for, and this is none.", stage="copy")
        return end
