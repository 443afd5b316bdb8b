"""An engine wrapper that injects losses, delays and lack of memory."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from random import Random
from typing import Protocol, Self, TypeVar, cast, runtime_checkable

import anyio
from anyio.lowlevel import checkpoint_if_cancelled

from hotswap.backends.notifier import StatusNotifier
from hotswap.engine import (
    Engine,
    StatusListener,
    SupportsAdapters,
    SupportsPreload,
    SupportsResize,
    WrapperEngine,
)
from hotswap.errors import InstanceLost, MigrationAborted, OutOfMemory
from hotswap.migration import CachedKV, KVSink, KVSource, SupportsKVListing, SupportsMigration
from hotswap.model import Adapter, ModelCard
from hotswap.request import AdapterId, Request, RequestId, Token
from hotswap.store import WeightStore
from hotswap.stream import TokenStream
from hotswap.testing.chaos.injector import EngineFaults, Injector
from hotswap.testing.chaos.moves import ChaosSink, ChaosSource
from hotswap.view import EngineStatus, InstanceState

__all__ = ["ChaosEngine", "chaotic_engine"]

_T = TypeVar("_T")


@runtime_checkable
class _Losable(Protocol):
    """An engine with a method that loses it."""

    def lose(self, reason: str) -> None: ...


def chaotic_engine(engine: Engine, random: Random, faults: EngineFaults | None = None) -> ChaosEngine:
    """Wrap an engine; the wrapper supports exactly the optional abilities of the engine.

    Args:
        engine: Any engine, a wrapper included: abilities that it hides stay hidden.
        random: The source of all chance.
        faults: The faults to inject; none by default.
    """
    bases: list[type[ChaosEngine]] = []
    if isinstance(engine, SupportsPreload):
        bases.append(_Preloading)
    if isinstance(engine, SupportsAdapters):
        bases.append(_Adapting)
    if isinstance(engine, SupportsMigration):
        bases.append(_Migrating)
    if isinstance(engine, SupportsKVListing):
        bases.append(_Listing)
    if isinstance(engine, SupportsResize):
        bases.append(_Resizing)
    made = cast("type[ChaosEngine]", type("ChaosEngine", (*bases, ChaosEngine), {}))
    return made(engine, random, faults)


class ChaosEngine(WrapperEngine):
    """Injects faults into the methods of an engine; `chaotic_engine` makes one with the engine's abilities.

    An engine with a method `lose` is lost by that method. For other engines the wrapper simulates the loss:
    every method and every stream raises `InstanceLost`, until `unload`.
    """

    def __init__(self, engine: Engine, random: Random, faults: EngineFaults | None = None) -> None:
        super().__init__(engine)
        self.faults = faults or EngineFaults()
        self.injector = Injector(random)
        # A generator of its own, so that the number of tokens does not change when losses come.
        self._losses = Random(random.getrandbits(64))
        self._notifier = StatusNotifier()
        self._loss_reason = ""
        self._waits: set[anyio.CancelScope] = set()

    @property
    def injected(self) -> Counter[str]:
        """The number of injected faults by kind."""
        return self.injector.injected

    @asynccontextmanager
    async def __asynccontextmanager__(self) -> AsyncGenerator[Self]:
        async with self.wrapped, anyio.create_task_group() as tasks:
            if self.faults.loss_every_s < math.inf:
                tasks.start_soon(self._lose_at_random, name=f"losses of {self.id}")
            try:
                yield self
            finally:
                tasks.cancel_scope.cancel()

    # ------------------------------------------------------------------ verbs

    async def load(self, model: ModelCard, store: WeightStore) -> None:
        await self.late()
        self.refuse_if_lost()
        self.run_out_of_memory(f"Model {model.id!r}")
        await self.unless_lost(partial(self.wrapped.load, model, store))

    async def unload(self) -> None:
        with anyio.CancelScope(shield=True):
            await self.late()
            lost = self.status().state is InstanceState.LOST
            if lost and self.injector.hits("stuck", self.faults.stuck):
                raise InstanceLost(f"Engine {self.id!r} is stuck, by chance; try again.")
            await self.wrapped.unload()
            self._loss_reason = ""
            self._notifier.state_changed()
        await checkpoint_if_cancelled()

    @asynccontextmanager
    async def stream(self, request: Request) -> AsyncGenerator[TokenStream]:
        await self.late()
        self.refuse_if_lost()
        async with self.wrapped.stream(request) as tokens:
            yield _ChaosTokens(self, tokens)

    async def evict(self, *, deadline_s: float) -> int:
        await self.late()
        return await self.unless_lost(partial(self.wrapped.evict, deadline_s=deadline_s))

    def status(self) -> EngineStatus:
        view = self.wrapped.status()
        if not self._loss_reason:
            return view
        return EngineStatus(
            id=view.id,
            state=InstanceState.LOST,
            max_requests=view.max_requests,
            kv_block_tokens=view.kv_block_tokens,
            memory_bytes=view.memory_bytes,
            max_adapters=view.max_adapters,
        )

    def watch(self, listener: StatusListener) -> bool:
        self._notifier.watch(listener)
        return self.wrapped.watch(self._notifier)

    def __repr__(self) -> str:
        return f"<ChaosEngine of {self.wrapped!r} {self.injector!r}>"

    # ------------------------------------------------------------------ faults

    def lose(self, reason: str = "chaos") -> None:
        """Lose the engine at once."""
        self.injected["loss"] += 1
        if isinstance(self.wrapped, _Losable):
            self.wrapped.lose(reason)
            return
        self._loss_reason = reason
        self._notifier.state_changed()
        for scope in self._waits:
            scope.cancel()

    async def late(self) -> None:
        """Start late, by chance."""
        await self.injector.pause("delay", self.faults.delay, self.faults.delay_s)

    def run_out_of_memory(self, whose: str) -> None:
        """Raise `OutOfMemory`, by chance."""
        if self.injector.hits("no_memory", self.faults.no_memory):
            raise OutOfMemory(f"{whose} finds no memory on engine {self.id!r}, by chance; try elsewhere.")

    def abort_move(self, stage: str) -> None:
        """Raise `MigrationAborted`, by chance."""
        if self.injector.hits("abort", self.faults.abort):
            raise MigrationAborted(f"Engine {self.id!r} aborted a move in {stage!r}, by chance.", stage=stage)

    def refuse_if_lost(self) -> None:
        """Raise `InstanceLost` while the wrapper simulates a loss."""
        if self._loss_reason:
            raise InstanceLost(
                f"Engine {self.id!r} is lost: {self._loss_reason}. Unload it to bring it back."
            )

    async def unless_lost(self, work: Callable[[], Awaitable[_T]]) -> _T:
        """Return the result of `work`; interrupt it by `InstanceLost` when the wrapper simulates a loss."""
        if isinstance(self.wrapped, _Losable):
            return await work()
        self.refuse_if_lost()
        with anyio.CancelScope() as scope:
            self._waits.add(scope)
            try:
                result = await work()
            finally:
                self._waits.discard(scope)
            self.refuse_if_lost()
            return result
        self.refuse_if_lost()
        raise InstanceLost(f"Engine {self.id!r} was lost meanwhile; it has come back.")

    async def _lose_at_random(self) -> None:
        while True:
            await anyio.sleep(self._losses.expovariate(1 / self.faults.loss_every_s))
            if self.injector.armed and self.status().state is not InstanceState.LOST:
                self.lose()


class _ChaosTokens(TokenStream):
    """A stream with injected pauses, which ends when the wrapper simulates a loss."""

    def __init__(self, engine: ChaosEngine, tokens: TokenStream) -> None:
        self._engine, self._tokens = engine, tokens

    async def __anext__(self) -> Token:
        faults = self._engine.faults
        await self._engine.injector.pause("stall", faults.stall, faults.stall_s)
        token = await self._engine.unless_lost(self._tokens.__anext__)
        self.num_reused_tokens = self._tokens.num_reused_tokens
        return token


class _Preloading(ChaosEngine):
    """Preloads models as the wrapped engine does, with injected lack of memory."""

    def can_preload(self, model: ModelCard) -> bool:
        """See `SupportsPreload`."""
        assert isinstance(self.wrapped, SupportsPreload)
        return self.status().state is not InstanceState.LOST and self.wrapped.can_preload(model)

    async def preload(self, model: ModelCard, store: WeightStore) -> None:
        """See `SupportsPreload`."""
        assert isinstance(self.wrapped, SupportsPreload)
        await self.late()
        self.refuse_if_lost()
        try:
            self.run_out_of_memory(f"Model {model.id!r}")
        except OutOfMemory:
            await self.wrapped.drop_preload()  # a failed preload leaves nothing behind
            raise
        await self.unless_lost(partial(self.wrapped.preload, model, store))

    async def drop_preload(self) -> None:
        """See `SupportsPreload`."""
        assert isinstance(self.wrapped, SupportsPreload)
        await self.wrapped.drop_preload()


class _Adapting(ChaosEngine):
    """Holds adapters as the wrapped engine does, with injected lack of memory."""

    async def load_adapter(self, adapter: Adapter) -> None:
        """See `SupportsAdapters`."""
        assert isinstance(self.wrapped, SupportsAdapters)
        await self.late()
        self.refuse_if_lost()
        if set(self.status().adapters) - {adapter.version}:  # a single adapter always fits
            self.run_out_of_memory(f"Adapter {adapter.version!r}")
        await self.unless_lost(partial(self.wrapped.load_adapter, adapter))

    async def drop_adapter(self, adapter: AdapterId) -> None:
        """See `SupportsAdapters`."""
        assert isinstance(self.wrapped, SupportsAdapters)
        await self.unless_lost(partial(self.wrapped.drop_adapter, adapter))


class _Migrating(ChaosEngine):
    """Moves KV blocks as the wrapped engine does, unless a move is given up by chance."""

    @asynccontextmanager
    async def export_kv(self, request: RequestId) -> AsyncGenerator[KVSource]:
        """See `SupportsMigration`."""
        assert isinstance(self.wrapped, SupportsMigration)
        await self.late()
        self.refuse_if_lost()
        self.abort_move("export")
        async with self.wrapped.export_kv(request) as source:
            yield ChaosSource(source, self._with_faults)

    @asynccontextmanager
    async def import_kv(self, request: Request) -> AsyncGenerator[KVSink]:
        """See `SupportsMigration`."""
        assert isinstance(self.wrapped, SupportsMigration)
        await self.late()
        self.refuse_if_lost()
        self.abort_move("reserve")
        async with self.wrapped.import_kv(request) as sink:
            yield ChaosSink(sink, self._with_faults)

    async def _with_faults(self, stage: str, work: Callable[[], Awaitable[_T]]) -> _T:
        await self.late()
        self.refuse_if_lost()
        if stage == "reserve" and self.injector.hits("no_memory", self.faults.no_memory):
            raise MigrationAborted(f"Engine {self.id!r} has too few KV blocks, by chance.", stage=stage)
        self.abort_move(stage)
        return await self.unless_lost(work)


class _Listing(ChaosEngine):
    """Lists what the wrapped engine keeps of ended requests, unless that is given up by chance."""

    async def cached_kv(self) -> Sequence[CachedKV]:
        """See `SupportsKVListing`."""
        assert isinstance(self.wrapped, SupportsKVListing)
        await self.late()
        self.abort_move("export")
        return await self.unless_lost(self.wrapped.cached_kv)


class _Resizing(ChaosEngine):
    """Resizes its KV pool as the wrapped engine does."""

    async def resize_kv(self, num_blocks: int) -> int:
        """See `SupportsResize`."""
        assert isinstance(self.wrapped, SupportsResize)
        await self.late()
        return await self.unless_lost(partial(self.wrapped.resize_kv, num_blocks))
