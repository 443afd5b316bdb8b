"""`LinkedStore`: the store of another node over a link, as a controller uses it."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, AsyncIterator, Generator
from contextlib import aclosing, asynccontextmanager, contextmanager
from functools import partial
from typing import Self

import anyio
from anyio import CancelScope

from hotswap.backends.nodes.chunks import received_chunks
from hotswap.backends.nodes.links import Call, LinkToNode, NodeLost
from hotswap.backends.nodes.messages import shard_fields, unpack_files, view_of
from hotswap.backends.stores.index import parse_index
from hotswap.backends.stores.reading import background
from hotswap.backends.stores.text_files import parse_text_settings, read_adapter_settings
from hotswap.backends.transports import LinkOpener, wire
from hotswap.backends.transports.link_errors import ProtocolError
from hotswap.backends.transports.silence import check_silence, silence_fields
from hotswap.backends.transports.wire import Message
from hotswap.checks import check_positive_seconds
from hotswap.errors import ConfigError
from hotswap.model import Adapter, HostChunk, Manifest, Shard
from hotswap.request import ModelId
from hotswap.store import WeightStore
from hotswap.text import TextSettings, Tokenizer
from hotswap.view import StoreView
from hotswap.worker_threads import run_in_thread

__all__ = ["LinkedStore"]

_log = logging.getLogger("hotswap.stores")
_MOST_RETRY_S = 30.0


class LinkedStore(WeightStore):
    """The store of another node, whose `StoreHost` is at the other end of the links.

    Its view is pushed by the node. It is empty while the node cannot be reached, calls then fail at once or
    end early, and a link is tried again and again, after pauses that double from `retry_s` to 30 s; the log
    tells when a node is lost and when it is back. Opening it waits for the first view, or the first failure.

    Args:
        node: The name of the node, for errors and the log.
        open_link: Opens a link: `partial(connect_tcp, "10.0.0.2", 7000, secret=secret)`.
        silence_s: The node counts as lost when nothing came for so long; it is told, and beats often enough.
        retry_s: The first pause before it is tried again.

    Raises:
        ConfigError: an argument is out of range.
    """

    def __init__(
        self, node: str, open_link: LinkOpener, *, silence_s: float = 10.0, retry_s: float = 0.5
    ) -> None:
        check_silence(silence_s)
        check_positive_seconds(ConfigError, retry_s=retry_s)
        self.node, self._silence_s = node, silence_s
        self._link = LinkToNode(node, open_link, answer_s=silence_s)
        self._retry_s = retry_s
        self._view, self._seen = StoreView(), -1
        self._failure: NodeLost | None = None
        self._tried = anyio.Event()
        self._calls: set[CancelScope] = set()

    @asynccontextmanager
    async def __asynccontextmanager__(self) -> AsyncGenerator[Self]:
        async with background() as tasks:
            tasks.start_soon(self._watch)
            await self._tried.wait()
            yield self

    @property
    def lost(self) -> bool:
        """Whether the node cannot be reached at this moment."""
        return self._failure is not None

    def view(self) -> StoreView:
        return self._view

    async def manifest(self, model: ModelId) -> Manifest:
        async with self._call() as call:
            self._see(await call.ask("manifest", model=model))
            text = bytes(call.payload)
        return await run_in_thread(partial(parse_index, text, path=self._where(model), model=model))

    @asynccontextmanager
    async def open(self, shard: Shard) -> AsyncGenerator[AsyncIterator[HostChunk]]:
        async with self._link.call() as call:
            await call.ask("open", shard=shard_fields(shard), start=0)
            async with aclosing(received_chunks(call, shard, 0)) as chunks:
                yield chunks

    async def prefetch(self, model: ModelId) -> None:
        await self._do("prefetch", model)

    async def drop(self, model: ModelId) -> None:
        await self._do("drop", model)

    async def side_files(self, model: ModelId) -> dict[str, bytes]:
        """Return the small files beside a model's weights, by name."""
        async with self._call() as call:
            answer = await call.ask("files", model=model)
            with self._protocol_errors():
                return unpack_files(answer, call.payload)

    async def tokenizer(self, model: ModelId) -> Tokenizer | None:
        text = (await self.side_files(model)).get("tokenizer.json")
        if text is None:
            return None
        from hotswap.backends.tokenizer import HfTokenizer

        return await run_in_thread(HfTokenizer.parse, text)

    async def text_settings(self, model: ModelId) -> TextSettings | None:
        files = await self.side_files(model)
        return await run_in_thread(parse_text_settings, files, self._where(model)) if files else None

    async def adapter_settings(self, adapter: Adapter) -> TextSettings:
        model = ModelId(adapter.model)
        manifest, files = await self.manifest(model), await self.side_files(model)
        return await run_in_thread(read_adapter_settings, adapter, manifest, files)

    def __repr__(self) -> str:
        state = "lost" if self.lost else f"{len(self._view.tiers)} tiers"
        return f"<LinkedStore {self.node!r} [{state}]>"

    def _where(self, model: ModelId) -> str:
        return f"{model} on node {self.node}"

    # ------------------------------------------------------------------ calls

    @asynccontextmanager
    async def _call(self) -> AsyncGenerator[Call]:
        if self._failure is not None:
            raise NodeLost(str(self._failure))
        async with self._link.call() as call:
            yield call

    async def _do(self, verb: str, model: ModelId) -> None:
        """Have the node do what may take any time; a cancellation ends it there, too."""
        with self._ends_with_node():
            async with self._call() as call:
                await call.send(verb, model=model)
                self._see(await call.answer(limit_s=float("inf")))

    @contextmanager
    def _ends_with_node(self) -> Generator[None]:
        """Cancel the block when the node is lost."""
        with CancelScope() as scope:
            self._calls.add(scope)
            try:
                yield
            finally:
                self._calls.discard(scope)
        if scope.cancelled_caught:
            raise NodeLost(f"Node {self.node!r} was lost meanwhile: {self._failure}")

    # ------------------------------------------------------------------ the view

    async def _watch(self) -> None:
        """Keep the view, over one link after the other."""
        pause_s = self._retry_s
        while True:
            try:
                async with self._link.call() as call:
                    await call.send("watch", **silence_fields(self._silence_s))
                    self._seen = -1  # the host may be another one, which numbers its views anew
                    while True:
                        self._see(await call.answer())
                        if self._failure is not None:
                            self._be_back()
                        self._tried.set()
                        pause_s = self._retry_s
            except NodeLost as exc:
                self._lose(exc)
            await anyio.sleep(pause_s)
            pause_s = min(2 * pause_s, _MOST_RETRY_S)

    def _see(self, answer: Message) -> None:
        """Take the view of an answer over, unless a later one was seen."""
        with self._protocol_errors():
            number = wire.size(answer, "view_number")
            view = view_of(answer)
        if number > self._seen:
            self._view, self._seen = view, number

    def _be_back(self) -> None:
        self._failure = None
        _log.warning("Node %r is back, with %d tiers.", self.node, len(self._view.tiers))

    @contextmanager
    def _protocol_errors(self) -> Generator[None]:
        try:
            yield
        except ProtocolError as exc:
            raise NodeLost(f"Node {self.node!r} broke the protocol: {exc}.") from exc

    def _lose(self, error: NodeLost) -> None:
        if self._failure is None:
            _log.warning("Node %r is lost, and its tiers are gone until it is back: %s", self.node, error)
        self._view, self._failure = StoreView(), error
        for scope in self._calls:
            scope.cancel()
        self._tried.set()
