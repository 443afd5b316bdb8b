"""What the calls of a controller do at the host of an engine."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import TYPE_CHECKING

import anyio

from hotswap.backends.fields import Fields
from hotswap.backends.remote.lent import Lent
from hotswap.backends.remote.listing import listed
from hotswap.backends.remote.messages import Message
from hotswap.backends.remote.pages import PageLink
from hotswap.backends.remote.peers import PeerLinks
from hotswap.backends.remote.telling import HostOutbox
from hotswap.backends.remote.values import adapter_of, card_of, tokens_in
from hotswap.backends.transports import wire
from hotswap.backends.transports.link_errors import ProtocolError, no_link
from hotswap.engine import (
    Engine,
    SupportsAdapters,
    SupportsGrammars,
    SupportsKVLimit,
    SupportsModelCheck,
    SupportsModelTrial,
    SupportsPreload,
    SupportsResize,
)
from hotswap.errors import InstanceLost, MigrationAborted
from hotswap.metered_store import MeteredStore
from hotswap.migration import KVSink, KVSource, SupportsKVListing, SupportsMigration
from hotswap.model import Adapter, ModelCard
from hotswap.request import AdapterId, RequestId
from hotswap.store import WeightStore
from hotswap.worker_threads import run_in_thread

if TYPE_CHECKING:
    from hotswap.backends.remote.kv_memory import KVMemory

__all__ = ["Call", "Verbs"]

# For a link to another host: well under the time that a restore may take, which then goes another way.
_CONNECT_S = 3.0


class Call:
    """A call of a controller.

    Attributes:
        number: Its number.
        scope: The scope in which it is done; the controller may cancel it.
        ended: Set once nothing of it is left.
    """

    def __init__(self, number: int, outbox: HostOutbox) -> None:
        self.number = number
        self.scope = anyio.CancelScope()
        self.ended = anyio.Event()
        self._outbox = outbox
        self._is_answered = False

    def answer(self, payload: memoryview | None = None, /, **fields: object) -> None:
        """Answer it, after the status that the engine has now; only the first answer counts."""
        if not self._is_answered:
            self._is_answered = True
            self._outbox.say_status()
            self._outbox.say("answer", self.number, payload, **fields)


class Verbs:
    """Does what calls ask for, on an engine and a store.

    Args:
        engine: The engine.
        store: Where it reads weights.
        max_tokens: The most tokens of a request.

    Attributes:
        lent: What it has lent to moves.
        peers: How it reaches other hosts.
        kv_memory: What the controller has asked for to keep KV blocks in; `None` if it has not.
    """

    def __init__(self, engine: Engine, store: WeightStore, max_tokens: int) -> None:
        self.engine, self.store, self.max_tokens = engine, store, max_tokens
        self.lent = Lent()
        self.peers: PeerLinks | None = None
        self.kv_memory: KVMemory | None = None

    async def do(self, call: Call, message: Message, payload: bytes) -> None:
        """Do what a call asks for, and answer it.

        Raises:
            ProtocolError: it cannot be read, or asks for what the engine does not support.
            Exception: what the engine raised.
        """
        engine, fields = self.engine, message.fields
        match message.verb:
            case "load":
                await self._load(call, _card(fields))
            case "unload":
                await engine.unload()
            case "evict":
                with wire.protocol_errors():
                    deadline_s = fields.number("deadline_s")
                call.answer(num_evicted=await engine.evict(deadline_s=deadline_s))
            case "preload" if isinstance(engine, SupportsPreload):
                await self._preload(call, engine, _card(fields))
            case "drop_preload" if isinstance(engine, SupportsPreload):
                await engine.drop_preload()
            case "load_adapter" if isinstance(engine, SupportsAdapters):
                await engine.load_adapter(_adapter(fields))
            case "drop_adapter" if isinstance(engine, SupportsAdapters):
                await engine.drop_adapter(AdapterId(_text(fields, "adapter")))
            case "check_model" if isinstance(engine, SupportsModelCheck):
                engine.check_model(_card(fields))
            case "try_model" if isinstance(engine, SupportsModelTrial):
                await engine.try_model(_card(fields), self.store)
            case "most_kv_tokens" if isinstance(engine, SupportsKVLimit):
                call.answer(num_tokens=engine.most_kv_tokens(_card(fields)) or 0)
            case "check_grammar" if isinstance(engine, SupportsGrammars):
                field, grammar = _text(fields, "field"), _text(fields, "grammar")
                await run_in_thread(engine.check_grammar, field, grammar)
            case "resize_kv" if isinstance(engine, SupportsResize):
                call.answer(num_blocks=await engine.resize_kv(_size(fields, "num_blocks")))
            case "list_kv" if isinstance(engine, SupportsKVListing):
                await self._list(call, engine)
            case "open_memory":
                await self._open_memory(call, fields)
            case "lend_memory":
                await self._lend(call, self._memory_end(fields, payload))
            case "export" if isinstance(engine, SupportsMigration):
                await self._lend(call, engine.export_kv(RequestId(_text(fields, "request"))))
            case "import" if isinstance(engine, SupportsMigration):
                request = wire.request_of(message, await self._tokens(payload))
                await self._lend(call, engine.import_kv(request))
            case _:
                await self._move(call, message, payload)
        call.answer()

    async def _load(self, call: Call, model: ModelCard) -> None:
        store = MeteredStore(self.store)
        await self.engine.load(model, store)
        call.answer(num_bytes=store.num_bytes, tier=store.tier, buffered=store.buffered)

    async def _preload(self, call: Call, engine: SupportsPreload, model: ModelCard) -> None:
        store = MeteredStore(self.store)
        await engine.preload(model, store)
        call.answer(num_bytes=store.num_bytes, tier=store.tier, buffered=store.buffered)

    async def _list(self, call: Call, engine: SupportsKVListing) -> None:
        cached, fields, tokens = listed(await engine.cached_kv())
        call.answer(tokens, key=self.lent.list(cached), **fields)

    # ------------------------------------------------------------------ memory for KV blocks

    async def _open_memory(self, call: Call, fields: Fields) -> None:
        """Have memory for a store of the controller, which may be what it has had; some is taken ahead."""
        from hotswap.backends.remote.kv_memory import KVMemory  # which needs numpy

        id, capacity_bytes = _text(fields, "memory"), _size(fields, "capacity_bytes")
        is_kept = self.kv_memory is not None and self.kv_memory.id == id
        if not is_kept:
            self.drop_memory()  # before there is more
            self.kv_memory = KVMemory(id, capacity_bytes)
        call.answer(is_kept=is_kept)
        while (memory := self.kv_memory) is not None and memory.id == id and await memory.take_ahead():
            pass

    def drop_memory(self) -> None:
        """Have no memory for KV blocks any more, once nothing of it is being copied."""
        memory, self.kv_memory = self.kv_memory, None
        self.lent.leave_memory()
        if memory is not None:
            memory.close()

    @asynccontextmanager
    async def _memory_end(self, fields: Fields, payload: bytes) -> AsyncGenerator[KVSource | KVSink]:
        memory = self.kv_memory
        if memory is None or memory.id != _text(fields, "memory"):
            raise MigrationAborted(
                "The host has no such memory for KV blocks, or not any more.", stage="copy"
            )
        with memory.used():
            end = memory.lend(fields, payload)
            try:
                yield end
            finally:
                end.blocks.done()

    # ------------------------------------------------------------------ moves

    async def _lend(self, call: Call, lending: AbstractAsyncContextManager[KVSource | KVSink]) -> None:
        """Lend an end of a move until the controller leaves it; its call ends then."""
        async with lending as end, self.lent.lend(end, call.ended) as lent:
            call.answer(
                key=lent.key,
                layout=wire.layout_fields(end.layout),
                num_present_blocks=end.num_present_blocks if isinstance(end, KVSink) else 0,
                address="" if self.peers is None else self.peers.address,
            )
            await lent.left.wait()

    async def _move(self, call: Call, message: Message, payload: bytes) -> None:
        """Do what a call asks for of an end of a move."""
        key, fields, lent = _text(message.fields, "key"), message.fields, self.lent
        match message.verb:
            case "leave":
                await lent.leave(key)
            case "name_pages":
                lent.name_pages(key, payload)
            case "num_tokens":
                call.answer(num_tokens=await lent.source(key).num_tokens())
            case "stop":
                await self._stop(call, key, fields)
            case "release":
                await lent.source(key).release()
            case "reserve":
                await lent.sink(key).reserve(_size(fields, "num_tokens"))
            case "commit":
                await lent.sink(key).commit(await self._tokens(payload))
            case "push":
                first_block, num_tokens = _size(fields, "first_block"), _size(fields, "num_tokens")
                call.answer(num_bytes=await self._push(key, first_block, num_tokens, fields))
            case verb:
                raise ProtocolError(f"the engine was asked to {verb[:40]!r}, which it cannot")

    async def _stop(self, call: Call, key: str, fields: Fields) -> None:
        """Stop a request; if a sink is named, send it what is left, and commit, if it has room by now."""
        source = self.lent.source(key)
        stopped = await source.stop()
        stopped_s, num_bytes = anyio.current_time(), 0
        if is_sent := fields.get("sink") is not None:
            first_block = _size(fields, "first_block")
            num_left = stopped.num_computed - first_block * source.layout.block_tokens
            try:
                if num_left > 0:
                    num_bytes = await self._push(key, first_block, num_left, fields)
                await (await self._peer(key, fields)).commit(stopped.tokens)
            except (MigrationAborted, InstanceLost):  # the controller has it done again
                is_sent, num_bytes = False, 0
        call.answer(
            wire.pack_tokens(stopped.tokens),
            num_computed=stopped.num_computed,
            is_sent=is_sent,
            num_bytes=num_bytes,
            ago_s=anyio.current_time() - stopped_s,
        )

    async def _tokens(self, payload: bytes) -> tuple[int, ...]:
        if len(payload) > self.max_tokens * wire.TOKEN_BYTES:
            raise MigrationAborted(
                f"The request has {len(payload) // wire.TOKEN_BYTES:,} tokens, and the destination's host "
                f"takes {self.max_tokens:,}; raise its max_tokens, or let the request move as tokens.",
                stage="reserve",
            )
        return await tokens_in(payload)

    async def _push(self, key: str, first_block: int, num_tokens: int, fields: Fields) -> int:
        """Copy blocks of a source here to a sink, here or at another host; return how many bytes."""
        source = self.lent.cached(key, _size(fields, "entry"))
        if _text(fields, "to") == "":
            sink: KVSink | PageLink = self.lent.sink(_text(fields, "sink"))
        else:
            sink = await self._peer(key, fields)
        pages = await source.read(first_block, num_tokens)
        await sink.write(pages)
        return len(pages.data)

    async def _peer(self, key: str, fields: Fields) -> PageLink:
        """Return the link of a source here to the sink that a call names."""
        lent, to, sink = self.lent[key], _text(fields, "to"), _text(fields, "sink")
        if self.peers is None:
            raise MigrationAborted("The source's host reaches no other hosts.", stage="copy")
        if lent.peer is None or lent.peer.is_closed:
            try:
                with anyio.fail_after(_CONNECT_S):
                    channel = await self.peers.connect(to)
            except TimeoutError as exc:
                raise no_link(to, f"it gave none within {_CONNECT_S:g} s") from exc
            lent.peer = PageLink(channel, self.lent.source(key).layout)
            await lent.peer.open(sink)
        return lent.peer


def _card(fields: Fields) -> ModelCard:
    with wire.protocol_errors():
        return card_of(fields.record("model"))


def _adapter(fields: Fields) -> Adapter:
    with wire.protocol_errors():
        return adapter_of(fields.record("adapter"))


def _size(fields: Fields, name: str) -> int:
    with wire.protocol_errors():
        return fields.size(name)


def _text(fields: Fields, name: str) -> str:
    with wire.protocol_errors():
        return fields.text(name)
