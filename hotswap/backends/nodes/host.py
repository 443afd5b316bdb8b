"""`StoreHost`: serves the store of a node to a controller, and its weights to other nodes, over links."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import anyio

from hotswap.backends.nodes.messages import (
    MAX_CALL_BYTES,
    pack_failure,
    pack_files,
    shard_of,
)
from hotswap.backends.nodes.offering import Offering
from hotswap.backends.stores.index import dump_index
from hotswap.backends.stores.reading import background
from hotswap.backends.transports import wire
from hotswap.backends.transports.link_errors import ProtocolError, link_broken
from hotswap.backends.transports.silence import beat_every_s, silence_in
from hotswap.backends.transports.wire import Message
from hotswap.checks import check_counts, check_positive_seconds
from hotswap.errors import ConfigError, MigrationAborted, StoreError
from hotswap.hardware import parse_bytes
from hotswap.model import HostChunk, Shard
from hotswap.request import ModelId
from hotswap.store import SupportsPrefetch, SupportsSideFiles, WeightStore
from hotswap.transport import Channel, Frame

__all__ = ["StoreHost"]

_log = logging.getLogger("hotswap.stores")


class StoreHost:
    """Serves the store of a node: `serve_tcp(StoreHost("n0", store).serve, "10.0.0.1", 7000, secret=...)`.

    Other nodes read shards that are here (`PeerStore`), from a `TieredStore` also those that are still
    arriving in host memory, as far as they have arrived; nothing is loaded for them. A controller sees the
    view, and has models prefetched and dropped (`LinkedStore`).

    Args:
        node: The name of the node.
        store: Its store, open for as long as links are served.
        children: How many peers may read from here at once; others ask elsewhere. 1 makes chains of nodes
            that load a model together, 2 trees.
        bytes_per_s: What all peers read at most, together; `None` is without bound.
        part_bytes: The longest payload of a frame.
        view_s: How often the view is looked at for a change.
        beat_s: How often it is sent without one; four times in the silence of its reader at least.

    Raises:
        ConfigError: an argument is out of range.
    """

    def __init__(
        self,
        node: str,
        store: WeightStore,
        *,
        children: int = 2,
        bytes_per_s: float | None = None,
        part_bytes: int | str = "8 MiB",
        view_s: float = 0.1,
        beat_s: float = 1.0,
    ) -> None:
        check_counts(ConfigError, 1, children=children)
        check_positive_seconds(ConfigError, view_s=view_s, beat_s=beat_s)
        if bytes_per_s is not None and not bytes_per_s > 0:
            raise ConfigError(f"bytes_per_s is {bytes_per_s!r}; give a number over 0, or None.")
        self._view_s, self._beat_s = view_s, beat_s
        self._offering = Offering(
            node,
            store,
            children=children,
            bytes_per_s=bytes_per_s,
            part_bytes=max(1, parse_bytes(part_bytes, "part_bytes")),
        )

    async def serve(self, channel: Channel) -> None:
        """Answer the calls of a link until it ends.

        Raises:
            MigrationAborted: the link broke by a frame that cannot be read.
        """
        await _Served(self._offering, channel, view_s=self._view_s, beat_s=self._beat_s).run()

    @property
    def num_children(self) -> int:
        """How many peers read from here at this moment."""
        return self._offering.num_children

    def __repr__(self) -> str:
        offering = self._offering
        return f"<StoreHost {offering.node!r} [{offering.num_children} peers read] {offering.store!r}>"


class _Served:
    """The calls of one link, one after the other."""

    def __init__(self, offering: Offering, channel: Channel, *, view_s: float, beat_s: float) -> None:
        self._offering, self._channel = offering, channel
        self._view_s, self._beat_s = view_s, beat_s
        self._next: Frame | None = None
        self._heard = anyio.Event()

    async def run(self) -> None:
        try:
            await self._serve()
        except MigrationAborted as exc:
            if isinstance(exc.__cause__, ProtocolError | TimeoutError):  # its misuse, and not its end
                raise

    async def _serve(self) -> None:
        while (frame := await self._call()) is not None:
            try:
                message = wire.unpack(frame.message)
                async with self._while_linked():
                    await self._answer(message)
            except ProtocolError as exc:
                await self._channel.aclose()
                raise link_broken(str(exc)) from exc

    async def _call(self) -> Frame | None:
        """Return the next call, `None` at the end of the link."""
        if (frame := self._next) is not None:
            self._next = None
            return frame
        try:
            return await self._channel.receive(max_message_bytes=MAX_CALL_BYTES, max_payload_bytes=0)
        except MigrationAborted as exc:
            if isinstance(exc.__cause__, ProtocolError | TimeoutError):
                raise
            return None

    @asynccontextmanager
    async def _while_linked(self) -> AsyncGenerator[None]:
        """Cancel the block when the link ends."""
        self._heard = anyio.Event()
        async with background() as tasks:
            tasks.start_soon(self._listen, tasks.cancel_scope)
            yield

    async def _listen(self, scope: anyio.CancelScope) -> None:
        self._next = await self._call()
        self._heard.set()
        if self._next is None:
            scope.cancel()

    async def _answer(self, message: Message) -> None:
        try:
            await self._execute(message)
        except StoreError as exc:
            await self._channel.send(pack_failure(message.number, exc))
        except (MigrationAborted, ProtocolError):
            raise
        except Exception as exc:  # the store's own fault: it ends no other link
            _log.exception("The store of node %r failed at %r.", self._offering.node, message.verb)
            await self._channel.send(pack_failure(message.number, exc))

    async def _execute(self, message: Message) -> None:
        offering, store = self._offering, self._offering.store
        match message.verb:
            case "watch":
                with wire.protocol_errors():
                    heard_within_s = silence_in(message.fields)
                await self._send_views(message.number, min(self._beat_s, beat_every_s(heard_within_s)))
            case "offer":
                await self._offer(message)
            case "read" | "open":
                await self._read(message)
            case "manifest":
                index = dump_index(await store.manifest(_model(message)))
                await self._done(message, memoryview(index), **offering.view_now())
            case "files":
                model = _model(message)
                files = await store.side_files(model) if isinstance(store, SupportsSideFiles) else {}
                names, data = pack_files(files)
                await self._done(message, data, files=names)
            case "prefetch" | "drop" as verb:
                if not isinstance(store, SupportsPrefetch):
                    raise StoreError(f"Node {offering.node!r} has a single tier: nothing to {verb} there.")
                model = _model(message)
                await (store.prefetch(model) if verb == "prefetch" else store.drop(model))
                await self._done(message, None, **offering.view_now())
            case verb:
                raise ProtocolError(f"{verb!r} is no call to a store")

    async def _done(self, message: Message, payload: memoryview | None = None, /, **fields: object) -> None:
        await self._channel.send(wire.pack("done", message.number, **fields), payload)

    async def _send_views(self, number: int, beat_s: float) -> None:
        sent, sent_s = None, 0.0
        while True:
            view, now_s = self._offering.store.view(), anyio.current_time()
            if view != sent or now_s - sent_s >= beat_s:
                await self._channel.send(wire.pack("view", number, **self._offering.view_now()))
                sent, sent_s = view, now_s
            await anyio.sleep(min(self._view_s, beat_s))

    # ------------------------------------------------------------------ weights

    async def _offer(self, message: Message) -> None:
        shard = shard_of(message)
        arrived = self._offering.arrived_bytes(shard)
        await self._done(
            message,
            arrived_bytes=0 if arrived is None else arrived,
            is_here=arrived is not None,
            num_children=self._offering.num_children,
        )

    async def _read(self, message: Message) -> None:
        shard, start = shard_of(message), wire.size(message, "start")
        if message.verb == "open":
            await self._send_chunks(message, shard, self._offering.opened(shard, start))
            return
        with wire.protocol_errors():
            reader = message.fields.text("node")
        if (refused := self._offering.refusal(shard, reader, start)) is not None:
            told = wire.pack("refused", message.number, reason=refused.reason, later=refused.later)
            await self._channel.send(told)
            return
        await self._send_chunks(message, shard, self._offering.reading(shard, start))

    async def _send_chunks(
        self,
        message: Message,
        shard: Shard,
        lent: AbstractAsyncContextManager[AsyncIterator[HostChunk]],
    ) -> None:
        part_bytes = min(self._offering.part_bytes, self._channel.max_payload_bytes)
        async with lent as chunks:
            await self._channel.send(wire.pack("begin", message.number))
            async for chunk in chunks:
                offset = chunk.offset_bytes - shard.buffer_offset_bytes
                for at in range(0, len(chunk.data), part_bytes):
                    with chunk.data[at : at + part_bytes] as part:
                        await self._offering.admit(len(part))
                        told = wire.pack("chunk", message.number, offset=offset + at, tier=chunk.tier)
                        await self._channel.send(told, part)
            await self._done(message)
            await self._heard.wait()  # the model is in use here until it is read there


def _model(message: Message) -> ModelId:
    with wire.protocol_errors():
        return ModelId(message.fields.text("model"))
