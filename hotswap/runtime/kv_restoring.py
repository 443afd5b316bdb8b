"""Restoring the KV blocks of a request: a move whose source is a store."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import anyio

from hotswap import telemetry as tm
from hotswap.loop_time import current_time
from hotswap.migration import KVSink, SupportsMigration
from hotswap.request import ModelId
from hotswap.runtime.active import ActiveRequest
from hotswap.runtime.instance import Instance
from hotswap.runtime.kv_context import CHUNK_BYTES, KVContext, logged
from hotswap.runtime.lifetime import Lifetime

if TYPE_CHECKING:
    from opentelemetry.trace import Span

__all__ = ["NO_RESTORE", "NoRestore", "Restore", "RestoreQueue"]

log = logging.getLogger("hotswap")

# Restores at once on one instance, and how long one may take.
MOST_RESTORES, RESTORE_S = 8, 10.0


@dataclass(frozen=True, slots=True)
class NoRestore(AbstractAsyncContextManager["NoRestore"]):
    """Stands where nothing is restored, from the loop time `since_s` on: adapters are loaded before."""

    since_s: float = 0.0

    async def __aexit__(self, *_: object) -> None:
        return None

    def leave(self) -> None:
        """Do nothing."""


NO_RESTORE = NoRestore()


@dataclass(slots=True, eq=False)
class RestoreQueue:
    """The restores of one instance: a few make room at once, and one copies.

    Of those that share most of what is stored, as samples of one prompt do, one goes first: the others find
    its blocks.
    """

    limiter: anyio.CapacityLimiter = field(default_factory=lambda: anyio.CapacityLimiter(MOST_RESTORES))
    copying: anyio.Lock = field(default_factory=anyio.Lock)
    _filling: dict[bytes, anyio.Event] = field(default_factory=dict[bytes, anyio.Event])
    _asked: set[ModelId] = field(default_factory=set[ModelId])

    def is_first(self, model: ModelId) -> bool:
        """Whether this is asked for a model for the first time."""
        is_first = model not in self._asked
        self._asked.add(model)
        return is_first

    @asynccontextmanager
    async def alone(self, key: bytes) -> AsyncGenerator[None]:
        """Wait until no other restore of a key is in its block."""
        while (other := self._filling.get(key)) is not None:
            await other.wait()
        self._filling[key] = anyio.Event()
        try:
            yield
        finally:
            self._filling.pop(key).set()


@dataclass(slots=True, eq=False)
class Restore:
    """One restore, in a task of its own: the sink is left while the stream goes on.

    Args:
        context: The fleet's store.
        active: The request.
        instance: Where it goes on.
        key: Of a block in the middle of what is stored.
        span: Of the stay.
        queue: Of the instance.
        lifetime: Has the task.
    """

    _context: KVContext
    _active: ActiveRequest
    _instance: Instance
    _key: bytes
    _span: Span
    _queue: RestoreQueue
    _lifetime: Lifetime
    _ready: anyio.Event = field(default_factory=anyio.Event)
    _left: anyio.Event = field(default_factory=anyio.Event)
    _scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)

    async def __aenter__(self) -> Restore:
        self._lifetime.tasks.start_soon(self._run, name=f"restore of {self._active.request.id}")
        try:
            await self._ready.wait()
        except BaseException:
            self._scope.cancel()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        self.leave()

    def leave(self) -> None:
        """Release the blocks: the stream has taken them, or does not come any more."""
        self._left.set()

    async def _run(self) -> None:
        try:
            with self._scope, logged("restored", self._active.request.id):
                await self._restore()
        finally:
            self._ready.set()

    async def _restore(self) -> None:
        request, engine = self._active.remaining, self._instance.engine
        assert isinstance(engine, SupportsMigration), "it was asked before"
        began_s: float | None = None
        with anyio.move_on_after(RESTORE_S) as limit:
            async with self._queue.limiter, AsyncExitStack() as stack:
                async with self._queue.alone(self._key):
                    began_s = current_time()
                    sink = await stack.enter_async_context(engine.import_kv(request))
                    await self._fill(sink, request.tokens)
                limit.deadline = float("inf")
                self._ready.set()
                await self._left.wait()
        if limit.cancelled_caught:
            log.info("Request %r is computed: restoring took over %g s.", request.id, RESTORE_S)
            if began_s is not None:
                self._context.state.times.learn_restore(CHUNK_BYTES, current_time() - began_s)

    async def _fill(self, sink: KVSink, tokens: Sequence[int]) -> None:
        """Copy what is stored and missing to the instance."""
        layout, size = sink.layout, max(1, sink.layout.block_bytes)
        first, step = sink.num_present_blocks, max(1, CHUNK_BYTES // size) * layout.block_tokens
        store = self._context.store.near(self._instance.engine)
        with store.lease(self._context.lookup.prefix(layout, tokens[:-1])) as lease:
            at, end, num_bytes = first * layout.block_tokens, lease.num_tokens, 0
            if at >= end:
                return
            await sink.reserve(end)
            async with self._queue.copying:
                started_s = current_time()
                async with lease.copying_to(sink) as copy:
                    for start in range(at, end, step):
                        num_tokens = min(step, end - start)
                        copied = await copy(start // layout.block_tokens, num_tokens)
                        num_bytes += copied or num_tokens * size // layout.block_tokens
                seconds = current_time() - started_s
            await sink.commit(tokens)
        self._note(end - at, end, num_bytes, seconds)

    def _note(self, num_tokens: int, stored_tokens: int, num_bytes: int, seconds: float) -> None:
        tier, telemetry = self._context.lookup.tier, self._context.telemetry
        self._context.state.times.learn_restore(num_bytes, seconds, num_tokens)
        self._active.note_restored(num_tokens, stored_tokens)
        self._instance.turn.restored(self._active.request.id, num_tokens)
        told: tm.Attributes = {tm.KV_RESTORED_TOKENS: num_tokens, tm.KV_RESTORED_BYTES: num_bytes}
        self._span.set_attributes({**told, tm.KV_TIER: tier})
        telemetry.kv_restored.add(num_tokens, {tm.MODEL: self._active.request.model, tm.KV_TIER: tier})
