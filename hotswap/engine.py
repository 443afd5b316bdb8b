"""The `Engine` interface: one instance that serves at most one base model at a time.

EMPTY --load--> LOADING --ok--> SERVING --evict--> DRAINING --all gone--> unload --> EMPTY
                LOADING --error or cancel--> EMPTY     DRAINING --cancelled before eviction--> SERVING
any --> LOST --unload, where the engine can come back--> EMPTY
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Protocol, Self, runtime_checkable

from anyio import AsyncContextManagerMixin

from hotswap.model import Adapter, ModelCard
from hotswap.request import AdapterId, Request
from hotswap.store import WeightStore
from hotswap.stream import TokenStream
from hotswap.view import EngineStatus, InstanceId

__all__ = [
    "Engine",
    "StatusListener",
    "SupportsAdapters",
    "SupportsGrammars",
    "SupportsKVLimit",
    "SupportsModelCheck",
    "SupportsModelTrial",
    "SupportsPreload",
    "SupportsResize",
    "WrapperEngine",
]


class Engine(AsyncContextManagerMixin, ABC):
    """One instance: a fixed slice of devices and the batcher that runs on it.

    `async with engine` brackets its life; leaving it stops its workers and frees its memory. The runtime
    never calls `load`, `unload` or `evict` concurrently on one engine; `stream` and `status` may be called at
    any time from the event loop. An engine never calls the fleet: it can only end a stream.
    """

    id: InstanceId

    @asynccontextmanager
    async def __asynccontextmanager__(self) -> AsyncGenerator[Self]:
        """Start the engine EMPTY and stop it afterwards; override to hold workers."""
        yield self

    @abstractmethod
    async def load(self, model: ModelCard, store: WeightStore) -> None:
        """Bring an EMPTY engine to SERVING `model`; on failure or cancellation it is EMPTY again.

        Raises:
            OutOfMemory: the weights and the least KV pool do not fit.
            UnsupportedModel: the architecture cannot be served exactly.
            StoreError: the weights could not be read.
            InstanceLost: the engine is gone.
            InstanceError: the engine is not EMPTY.
        """

    @abstractmethod
    async def unload(self) -> None:
        """Return once the device memory is really free and the engine is EMPTY; at once if it already is.

        Requests still running are evicted first. The fleet also calls it on a LOST engine, where it restarts
        what can be restarted, and on one that an error left DRAINING. A cancellation is honoured only once
        the engine is EMPTY.

        Raises:
            MemoryNotReclaimed: the device still holds what should have been freed.
            InstanceLost: the engine cannot come back.
        """

    @abstractmethod
    def stream(self, request: Request) -> AbstractAsyncContextManager[TokenStream]:
        """Run a request: prefill `prompt + generated`, then yield position `len(generated)` and onwards.

        Tokens come without text. Leaving the block aborts the request, and its KV blocks are free within one
        step.

        Raises:
            RequestEvicted: the engine stopped admitting, or gave the request back (on entering, or from the
            stream). InstanceLost: the engine is gone (likewise).
            PromptTooLong: the request can never fit this engine's KV blocks or the model's context.
            UnknownAdapter: the request names an adapter that this engine does not hold.
        """

    @abstractmethod
    async def evict(self, *, deadline_s: float) -> int:
        """Admit none, wait at most `deadline_s`, then evict what still runs; return how many were evicted.

        Evicted streams raise `RequestEvicted` after the tokens they hold. The engine is DRAINING from the
        call on. Cancelled before the eviction, it goes back to SERVING with nothing lost. `deadline_s=0`
        evicts at once.

        Raises:
            InstanceLost: the engine is gone.
            InstanceError: the engine is not SERVING.
        """

    @abstractmethod
    def status(self) -> EngineStatus:
        """Return state, load and memory. Synchronous, cheap and frozen; true at the moment of the call."""

    def watch(self, listener: StatusListener) -> bool:
        """Have a listener told whenever `status` would return something else; return whether it will be.

        The engine calls the listener on the event loop, just before or after the change and without an await
        between, so the listener asks for the `status` later. Calls without a change do no harm. There is one
        listener; a second takes the place of the first. An engine that returns false, which is the default,
        is polled: its `status` is asked for whenever the fleet makes a view.
        """
        return False

    def __repr__(self) -> str:
        status = self.status()
        model = f" {status.model}" if status.model else ""
        requests = f"{status.num_running} running, {status.num_waiting} waiting"
        return f"<{type(self).__name__} {self.id} {status.state}{model} [requests: {requests}]>"


class StatusListener(Protocol):
    """What an engine tells that its status has changed."""

    def load_changed(self) -> None:
        """Requests came, went on or ended, and nothing else has changed.

        Of `EngineStatus` that is `num_running`, `num_waiting`, `num_prefill_tokens`, `num_free_kv_blocks`,
        `num_next_kv_blocks`, `kept_since_s` and `preempted`.
        """
        ...

    def state_changed(self) -> None:
        """Anything else has changed, as the state, the model, the adapters or the memory."""
        ...


@runtime_checkable
class SupportsPreload(Protocol):
    """An engine that can stage the next model beside the one it serves: the swap is a pointer flip."""

    def can_preload(self, model: ModelCard) -> bool:
        """Whether the model would fit now beside what is loaded."""
        ...

    async def preload(self, model: ModelCard, store: WeightStore) -> None:
        """Stage `model`, so that the next `load` of it takes what was staged.

        Failure or cancellation leaves nothing staged.
        Staging another model drops the one staged before. Serving goes on undisturbed.
        """
        ...

    async def drop_preload(self) -> None:
        """Free what is staged; at once if nothing is."""
        ...


@runtime_checkable
class SupportsAdapters(Protocol):
    """An engine that can hold low-rank adapters beside the model it serves; requests have one or none.

    `status` says which it holds, by their `Adapter.version`, which requests name too, and how many it may;
    versions of one adapter are adapters side by side. It drops none by itself, save all of them on `unload`.
    Serving goes on undisturbed by either verb, and both may be called concurrently.
    """

    async def load_adapter(self, adapter: Adapter) -> None:
        """Hold an adapter of the model that is served; at once if it is held.

        Failure or cancellation leaves what was held before, or that and the adapter.

        Raises:
            UnsupportedAdapter: it does not fit the model, is of a kind that the engine does not know, or is
                too large for an engine that holds no other.
            StoreError: its files are missing, damaged or unsafe.
            OutOfMemory: there is no room beside those that are held; drop one.
            InstanceLost: the engine is gone.
            InstanceError: the engine does not serve the adapter's model.
        """
        ...

    async def drop_adapter(self, adapter: AdapterId) -> None:
        """Forget an adapter and free its room; at once if it is not held.

        Raises:
            InstanceError: a request uses it.
        """
        ...


@runtime_checkable
class SupportsGrammars(Protocol):
    """An engine that holds requests to grammars, and can say of one that is wrong for every model."""

    def check_grammar(self, field: str, grammar: str) -> None:
        """Refuse a grammar that no model could be held to; called in worker threads, and at any time.

        Args:
            field: The field of `Sampling` that has it.
            grammar: The field's value.

        Raises:
            InvalidRequest: the grammar cannot be used.
            BackendMissing: what it takes is not installed.
            InstanceError: the engine's process cannot check it now.
        """
        ...


@runtime_checkable
class SupportsKVLimit(Protocol):
    """An engine that can say beforehand how long a request of a model may become."""

    def most_kv_tokens(self, model: ModelCard) -> int | None:
        """Return how many tokens of one request its KV blocks could hold; `None` if that is not known.

        Synchronous and cheap; once it is known, the same at any time. The last token of a request takes no
        place.
        """
        ...


@runtime_checkable
class SupportsModelCheck(Protocol):
    """An engine that can say of a model beforehand that it will never serve it, by what its card tells."""

    def check_model(self, model: ModelCard) -> None:
        """Refuse a model, before a swap to it is planned. Synchronous, cheap, and the same at any time.

        Raises:
            UnsupportedModel: naming what to do instead.
        """
        ...


@runtime_checkable
class SupportsModelTrial(Protocol):
    """An engine that can find out of a model, while it serves another, that it will never serve it."""

    async def try_model(self, model: ModelCard, store: WeightStore) -> None:
        """Refuse a model, before a swap to it evicts any request.

        May take seconds, and as long as a load on a busy machine; a cancellation ends it. What is served goes
        on undisturbed.

        Raises:
            UnsupportedModel: naming what to do instead.
            StoreError: what the store has of the model could not be read.
        """
        ...


@runtime_checkable
class SupportsResize(Protocol):
    """An engine whose KV pool can grow and shrink while it serves, under a `DeviceBudget`."""

    async def resize_kv(self, num_blocks: int) -> int:
        """Bring the KV pool as near to `num_blocks` as is possible now; return the number reached.

        The pool keeps its least number of blocks, and grows no further than its most and the budget allow. To
        shrink takes free and cached blocks first. Then running requests wait again, those admitted last
        first, and compute their tokens again; the first is not interrupted. Later the pool changes again as
        requests need blocks; but one that shrank does not grow while other holders of the budget lack memory.

        A call that is cancelled may have resized the pool.

        Raises:
            InstanceError: the engine serves no model, or its pool keeps its size.
            InstanceLost: the engine is gone.
        """
        ...


class WrapperEngine(Engine):
    """Forwards everything to another engine: subclass it and override what should differ.

    It has no optional ability, save that the fleet asks the wrapped engine for `SupportsModelCheck`,
    `SupportsModelTrial`, `SupportsKVLimit` and `SupportsResize` where a subclass has not got it.
    """

    def __init__(self, engine: Engine) -> None:
        self.wrapped = engine
        self.id = engine.id

    @asynccontextmanager
    async def __asynccontextmanager__(self) -> AsyncGenerator[Self]:
        async with self.wrapped:
            yield self

    async def load(self, model: ModelCard, store: WeightStore) -> None:
        await self.wrapped.load(model, store)

    async def unload(self) -> None:
        await self.wrapped.unload()

    def stream(self, request: Request) -> AbstractAsyncContextManager[TokenStream]:
        return self.wrapped.stream(request)

    async def evict(self, *, deadline_s: float) -> int:
        return await self.wrapped.evict(deadline_s=deadline_s)

    def status(self) -> EngineStatus:
        return self.wrapped.status()

    def watch(self, listener: StatusListener) -> bool:
        """Forward to the wrapped engine; a subclass with a `status` of its own is polled."""
        return type(self).status is WrapperEngine.status and self.wrapped.watch(listener)
