"""The adapters that instances hold: each is loaded before a request runs with it, as into a cache.

Adapters are loaded on demand, one at a time on each instance. When there is no room for another, the least
recently used one goes, and never one that a request uses. What a plan pins is loaded ahead of requests, as
far as nothing in use has to go, and is the last to go itself. An outdated version goes with its last request.
An instance drops its adapters with its model, and the next request for one loads it again.
"""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import AsyncGenerator, Container, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING

import anyio

from hotswap import telemetry as tm
from hotswap.engine import SupportsAdapters
from hotswap.errors import (
    ConfigError,
    InstanceError,
    InstanceLost,
    OutOfMemory,
    RequestEvicted,
    SourceChanged,
    StoreError,
)
from hotswap.loop_time import current_time
from hotswap.model import Adapter
from hotswap.request import AdapterId, RequestId
from hotswap.runtime.adapter_files import AdapterFiles
from hotswap.runtime.instance import Instance
from hotswap.runtime.state import FleetState
from hotswap.stray_cancellation import no_stray_cancellation
from hotswap.telemetry import Telemetry
from hotswap.view import InstanceId, InstanceState

if TYPE_CHECKING:
    from opentelemetry.trace import Span

__all__ = ["AdapterCaches"]

log = logging.getLogger("hotswap")


class AdapterCaches:
    """The adapter caches of all instances of a fleet. Adapters are dropped also by tasks that were cancelled.

    Args:
        state: Of the fleet.
        telemetry: Records loads.
    """

    def __init__(self, state: FleetState, telemetry: Telemetry) -> None:
        self._state, self._telemetry = state, telemetry
        self.files = AdapterFiles(state)
        self._caches: dict[InstanceId, _AdapterCache] = {}

    @asynccontextmanager
    async def held(
        self, adapter: Adapter | None, user: RequestId, instance: Instance, span: Span
    ) -> AsyncGenerator[None]:
        """Have the instance hold an adapter, if there is one, for as long as the block runs.

        Waits while every adapter that could make room is in use. Loads are recorded under `span`.

        Raises:
            RequestEvicted: the instance swaps to another model, or is unloaded.
            UnsupportedAdapter, StoreError: the adapter cannot be had; nothing was dropped for it.
            SourceChanged: its files are not those of this version any more.
            OutOfMemory: the instance has no room for it even after it has dropped all others.
            InstanceLost: the instance is gone.
        """
        if adapter is None:
            yield
            return
        cache = self._of(instance)
        await cache.take(adapter, user, span)
        try:
            yield
        finally:
            cache.give_back(adapter.version, user)
            if not self._state.is_latest(adapter):
                await cache.retire(adapter.version)

    async def load(self, adapter: Adapter, instance: Instance, span: Span) -> bool:
        """Have the instance hold an adapter ahead of requests; false if it would have to wait for users.

        Errors are those of `held`, but `OutOfMemory`.
        """
        return await self._of(instance).load(adapter, span)

    async def pin(self, adapters: Sequence[Adapter], instance: Instance, span: Span) -> None:
        """Have the instance hold adapters, the most wanted first, as far as nothing in use must go for them.

        Until the next call they are the last to go when requests need room. Raises nothing: an adapter that
        cannot be loaded is logged, and left to the requests that name it.
        """
        await self._of(instance).pin(adapters, span)

    async def retire(self, adapter: AdapterId, instance: Instance) -> None:
        """Drop an outdated adapter, at once if no request uses it there, else with the last that does."""
        await self._of(instance).retire(adapter)

    def forget(self, instance: InstanceId) -> None:
        """Forget an instance that has left the fleet."""
        self._caches.pop(instance, None)

    def _of(self, instance: Instance) -> _AdapterCache:
        cache = self._caches.get(instance.id)
        if cache is None or cache.instance is not instance:  # another may have had its name
            cache = self._caches[instance.id] = _AdapterCache(
                instance, self.files, self._state, self._telemetry
            )
        return cache

    def __repr__(self) -> str:
        return f"<AdapterCaches [{', '.join(map(str, self._caches.values()))}]>"


class _AdapterCache:
    """The adapters that one instance holds, the least recently used first.

    The engine's status says which are held; the cache counts which requests use them. A request that finds
    its adapter held uses it at once. The others take turns: one at a time loads, and drops unused ones.
    When all are in use, the least recently used one admits no new users until it has gone. A request whose
    move uses it here already is no new user.
    """

    def __init__(
        self, instance: Instance, files: AdapterFiles, state: FleetState, telemetry: Telemetry
    ) -> None:
        self.instance, self._files = instance, files
        self._state, self._telemetry = state, telemetry
        self._turn = anyio.Lock()
        self._users: dict[AdapterId, Counter[RequestId]] = defaultdict(Counter)
        self._last_used: dict[AdapterId, None] = {}  # the latest last
        self._retired: set[AdapterId] = set()
        self._leaving: AdapterId | None = None
        self._returned = anyio.Event()
        self._impatient: set[anyio.CancelScope] = set()  # loads that do not wait for users
        self._pinned: dict[AdapterId, Adapter] = {}  # by the latest plan, the most wanted first
        self._failed: set[AdapterId] = set()  # of these, what could not be loaded
        self._is_pinning = False

    async def take(self, adapter: Adapter, user: RequestId, span: Span) -> None:
        """Return once the adapter is held, and count a user of it."""
        name = adapter.version
        if self._holds(name) and (name != self._leaving or user in self._users[name]):
            self._count(name, user)
            return
        async with self._in_turn():
            try:
                while not self._holds(name):
                    await self._load(adapter, span)
            except (ConfigError, StoreError) as exc:
                if name not in self._failed:  # which was logged
                    log.warning("Adapter %r was not loaded on %r: %s", name, self.instance.id, exc)
                raise
            self._count(name, user)

    def _count(self, adapter: AdapterId, user: RequestId) -> None:
        self._retired.discard(adapter)
        self._failed.discard(adapter)
        self._note_use(adapter)
        self._users[adapter][user] += 1

    def give_back(self, adapter: AdapterId, user: RequestId) -> None:
        """Count a user less."""
        self._users[adapter] -= Counter([user])
        if not self._users[adapter]:
            del self._users[adapter]
        self._returned.set()

    async def pin(self, adapters: Sequence[Adapter], span: Span) -> None:
        """Load what is missing of these, each once at most; of concurrent calls the first one loads."""
        self._pinned = {adapter.version: adapter for adapter in adapters}
        if self._is_pinning:
            return
        self._is_pinning, tried = True, set[AdapterId]()
        try:
            while (adapter := self._missing(tried)) is not None:
                tried.add(adapter.version)
                if not await self._fill(adapter, span) and adapter.version in self._pinned:
                    return
        finally:
            self._is_pinning = False

    def _missing(self, tried: Container[AdapterId]) -> Adapter | None:
        """The most wanted that is not held."""
        names = (name for name in self._pinned if name not in tried and name not in self._failed)
        return next((self._pinned[name] for name in names if not self._holds(name)), None)

    async def _fill(self, adapter: Adapter, span: Span) -> bool:
        """Load what a plan pins; false if no more of it can be loaded now."""
        try:
            return await self.load(adapter, span, pinning=True)
        except (InstanceLost, RequestEvicted):
            return False
        except Exception as exc:  # an engine's or a store's own faults as well
            self._failed.add(adapter.version)
            log.warning("Adapter %r was not pinned on %r: %s", adapter.version, self.instance.id, exc)
            return True

    async def load(self, adapter: Adapter, span: Span, *, pinning: bool = False) -> bool:
        """Hold an adapter if unused ones can make room for it; false if it would have to wait for users.

        With `pinning`, adapters that a plan pins or a request needs make no room either.
        """
        with anyio.CancelScope() as scope:
            if self._leaving is not None and self._users[self._leaving]:
                return False
            self._impatient.add(scope)
            try:
                await self._turn.acquire()
            finally:
                self._impatient.discard(scope)
        if scope.cancelled_caught:
            return False
        try:
            while not self._holds(adapter.version):
                if pinning and (adapter.version not in self._pinned or self._is_full()):
                    return False
                await self._load(adapter, span, patient=False, pinning=pinning)
            self._note_use(adapter.version)
        except OutOfMemory:
            return False
        finally:
            await self._end_turn()
        return True

    async def retire(self, adapter: AdapterId) -> None:
        """Drop an adapter if no request uses it; while others load or drop, it goes when they are done."""
        self._pinned.pop(adapter, None)
        if self._users[adapter]:
            return  # its last user retires it
        self._retired.add(adapter)
        if not self._turn.locked():
            with anyio.CancelScope(shield=True):
                async with self._in_turn():
                    pass

    @asynccontextmanager
    async def _in_turn(self) -> AsyncGenerator[None]:
        async with AsyncExitStack() as stack:
            await self._turn.acquire()
            stack.push_async_callback(self._end_turn)
            yield

    async def _end_turn(self) -> None:
        """Drop what was retired, and let the next task take its turn."""
        try:
            with anyio.CancelScope(shield=True):
                while self._retired:
                    await self._drop_retired(self._retired.pop())
        finally:
            self._turn.release()

    async def _drop_retired(self, adapter: AdapterId) -> None:
        engine = self.instance.engine
        if self._users[adapter] or not self._holds(adapter) or not isinstance(engine, SupportsAdapters):
            return
        self._last_used.pop(adapter, None)
        try:
            await self._drop(engine, adapter)
        except Exception as exc:  # of the engine, and none of the caller's
            what = "Instance %r kept adapter %r, which is outdated.\n%s"
            log.error(what, self.instance.id, adapter, tm.traceback_of(exc))

    def _note_use(self, adapter: AdapterId) -> None:
        self._last_used.pop(adapter, None)
        self._last_used[adapter] = None

    async def _load(
        self, adapter: Adapter, span: Span, *, patient: bool = True, pinning: bool = False
    ) -> None:
        engine, started_s = self.instance.engine, current_time()
        assert isinstance(engine, SupportsAdapters), "no other is asked"
        attributes = {tm.INSTANCE: self.instance.id, tm.ADAPTER: adapter.version, tm.MODEL: adapter.model}
        self._refuse_if_gone(adapter)
        try:
            with self._telemetry.span(tm.SPAN_ADAPTER, attributes, parent=span) as load:
                async with self._files.unchanged(adapter):
                    with no_stray_cancellation(f"The load of adapter {adapter.version!r}"):
                        await engine.load_adapter(adapter)
                seconds = current_time() - started_s
                load.set_attribute(tm.SECONDS, seconds)
            self._require_held(adapter)
        except OutOfMemory:
            self._refuse_if_gone(adapter)
            if not await self._make_room(engine, patient=patient, pinning=pinning):
                raise
        except InstanceLost:
            raise
        except InstanceError:
            self._refuse_if_gone(adapter)
            raise
        except SourceChanged:  # perhaps while it was read
            with anyio.CancelScope(shield=True):
                await engine.drop_adapter(adapter.version)
            raise
        else:
            log.info("Adapter %r was loaded on %r in %.3f s.", adapter.version, self.instance.id, seconds)
            # One series for all versions of an adapter.
            self._telemetry.adapter_seconds.record(seconds, {**attributes, tm.ADAPTER: adapter.id})

    async def _make_room(self, engine: SupportsAdapters, *, patient: bool, pinning: bool) -> bool:
        """Drop the unused adapter that is worth least; false if none can go.

        With `patient`, when all are in use, wait until the least recently used one is not.
        """
        oldest = self._oldest()
        unused = self._unused(oldest, pinning=pinning)
        chosen = min(unused, key=self._worth, default=oldest[0] if oldest and patient else None)
        if chosen is None:
            return False
        await self._drop(engine, chosen)
        return True

    def _oldest(self) -> list[AdapterId]:
        """Return what is held, the least recently used first."""
        held = self.instance.status().adapters
        never = [name for name in held if name not in self._last_used]
        return never + [name for name in self._last_used if name in held]

    def _unused(self, held: Sequence[AdapterId], *, pinning: bool) -> list[AdapterId]:
        """Return those that no request uses here; with `pinning` those that are worth nothing besides."""
        unused = [name for name in held if not self._users[name]]
        return [name for name in unused if self._worth(name) == (False, 0)] if pinning else unused

    def _worth(self, adapter: AdapterId) -> tuple[bool, int]:
        """Return whether a request of the fleet has it or waits for it, and how much a plan wants it."""
        model = self.instance.status().model
        needed = model is not None and self._state.is_needed(model, adapter)
        wanted = self._pinned.get(adapter)
        if wanted is None or wanted.model != model:
            return needed, 0
        return needed, len(self._pinned) - list(self._pinned).index(adapter)

    def _is_full(self) -> bool:
        """Whether every place is taken by an adapter that pinning another may not drop."""
        view = self.instance.status()
        return len(view.adapters) >= view.max_adapters and not self._unused(view.adapters, pinning=True)

    async def _drop(self, engine: SupportsAdapters, adapter: AdapterId) -> None:
        """Drop an adapter once no request uses it; meanwhile it admits no new users."""
        self._leaving = adapter
        try:
            if self._users[adapter]:
                for scope in self._impatient:
                    scope.cancel()
            while self._users[adapter]:
                self._returned = anyio.Event()
                await self._returned.wait()
            with no_stray_cancellation(f"The drop of adapter {adapter!r}"):
                await engine.drop_adapter(adapter)
        finally:
            self._leaving = None

    def _holds(self, adapter: AdapterId) -> bool:
        return adapter in self.instance.status().adapters

    def _require_held(self, adapter: Adapter) -> None:
        """Raise `InstanceError` if the engine holds the adapter under another name."""
        if not self._holds(adapter.version):
            raise InstanceError(
                f"Instance {self.instance.id!r} took adapter {adapter.version!r} and holds "
                f"{', '.join(self.instance.status().adapters) or 'none'}; engines are to hold "
                "adapters by their version."
            )

    def _refuse_if_gone(self, adapter: Adapter) -> None:
        view = self.instance.status()
        if view.state is not InstanceState.SERVING or view.model != adapter.model:
            raise RequestEvicted(
                f"Instance {self.instance.id!r} is {view.state} with model {view.model!r} and takes no "
                f"adapter of {adapter.model!r}; ask another."
            )

    def __repr__(self) -> str:
        used = sum(1 for users in self._users.values() if users)
        return f"{self.instance.id}: {used} of {len(self.instance.status().adapters)} in use"
