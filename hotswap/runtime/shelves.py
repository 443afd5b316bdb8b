"""What instances hold of a fleet's adapters: each is there before a request runs with it.

Adapters come on demand, one at a time on each instance, and go when there is no room for another: the one
that was asked for longest ago first, and never while a request uses it. One that nobody can ask for any more
goes with its last request. Instances forget theirs with their model, and what has gone comes back with the
next request for it.
"""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import AsyncGenerator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING

import anyio

from hotswap import telemetry as tm
from hotswap.engine import SupportsAdapters
from hotswap.errors import (
    InstanceError,
    InstanceLost,
    OutOfMemory,
    RequestEvicted,
)
from hotswap.model import Adapter
from hotswap.request import AdapterId, RequestId
from hotswap.runtime.instance import Instance
from hotswap.telemetry import Telemetry
from hotswap.view import InstanceId, InstanceState

if TYPE_CHECKING:
    from opentelemetry.trace import Span

__all__ = ["Shelves"]

log = logging.getLogger("hotswap")


class Shelves:
    """Who uses which adapter where. What is dropped, is dropped also by tasks that were cancelled.

    Args:
        is_current: Whether new requests can still ask for an adapter.
        telemetry: Records loads.
    """

    def __init__(self, is_current: Callable[[Adapter], bool], telemetry: Telemetry) -> None:
        self._is_current, self._telemetry = is_current, telemetry
        self._shelves: dict[InstanceId, _Shelf] = {}

    @asynccontextmanager
    async def held(
        self, adapter: Adapter | None, user: RequestId, instance: Instance, span: Span
    ) -> AsyncGenerator[None]:
        """Have the instance hold an adapter, if there is one, for as long as the block runs.

        Waits while every adapter that could make room is in use. Loads are recorded under `span`.

        Raises:
            RequestEvicted: the instance turns to another model, or away from this one.
            UnsupportedAdapter, StoreError: the adapter cannot be had; nothing was dropped for it.
            OutOfMemory: the instance has no room for it even after it has dropped all others.
            InstanceLost: the instance is gone.
        """
        if adapter is None:
            yield
            return
        shelf = self._of(instance)
        await shelf.take(adapter, user, span)
        try:
            yield
        finally:
            shelf.give_back(adapter.version, user)
            if not self._is_current(adapter):
                await shelf.retire(adapter.version)

    async def bring(self, adapter: Adapter, instance: Instance, span: Span) -> bool:
        """Have the instance hold an adapter before anybody asks for it; false where that would have to wait.

        Errors are those of `held`, but `OutOfMemory`.
        """
        return await self._of(instance).bring(adapter, span)

    async def retire(self, adapter: AdapterId, instance: Instance) -> None:
        """Drop an adapter that nobody can ask for any more, if nobody uses it there; else it goes later."""
        await self._of(instance).retire(adapter)

    def forget(self, instance: InstanceId) -> None:
        """Forget an instance that has left the fleet."""
        self._shelves.pop(instance, None)

    def _of(self, instance: Instance) -> _Shelf:
        shelf = self._shelves.get(instance.id)
        if shelf is None or shelf.instance is not instance:  # another may have had its name
            shelf = self._shelves[instance.id] = _Shelf(instance, self._telemetry)
        return shelf

    def __repr__(self) -> str:
        return f"<Shelves [{', '.join(map(str, self._shelves.values()))}]>"


class _Shelf:
    """The adapters that one instance holds, in the order in which they were last asked for.

    What is held, the engine's view says; here is counted who uses it. A request that finds its adapter held
    uses it at once. Others wait in line, in which one at a time loads, and drops before what is unused. Where
    all is in use, the one that was asked for longest ago takes on nobody more until it has gone; a request
    whose move uses it here already is nobody more.
    """

    def __init__(self, instance: Instance, telemetry: Telemetry) -> None:
        self.instance = instance
        self._telemetry = telemetry
        self._line = anyio.Lock()
        self._users: dict[AdapterId, Counter[RequestId]] = defaultdict(Counter)
        self._asked_for: dict[AdapterId, None] = {}  # the latest last
        self._retired: set[AdapterId] = set()
        self._leaving: AdapterId | None = None
        self._given_back = anyio.Event()
        self._impatient: set[anyio.CancelScope] = set()  # those that would not wait for users in the line

    async def take(self, adapter: Adapter, user: RequestId, span: Span) -> None:
        """Return once the adapter is held, and count a user of it."""
        name = adapter.version
        if self._holds(name) and (name != self._leaving or user in self._users[name]):
            self._count(name, user)
            return
        async with self._in_line():
            while not self._holds(name):
                await self._load(adapter, span)
            self._count(name, user)

    def _count(self, adapter: AdapterId, user: RequestId) -> None:
        self._retired.discard(adapter)
        self._ask_for(adapter)
        self._users[adapter][user] += 1

    def give_back(self, adapter: AdapterId, user: RequestId) -> None:
        """Count a user less."""
        self._users[adapter] -= Counter([user])
        if not self._users[adapter]:
            del self._users[adapter]
        self._given_back.set()

    async def bring(self, adapter: Adapter, span: Span) -> bool:
        """Hold an adapter if what is unused makes room for it; false if users must be waited for."""
        with anyio.CancelScope() as scope:
            if self._leaving is not None and self._users[self._leaving]:
                return False
            self._impatient.add(scope)
            try:
                await self._line.acquire()
            finally:
                self._impatient.discard(scope)
        if scope.cancelled_caught:
            return False
        try:
            while not self._holds(adapter.version):
                await self._load(adapter, span, patient=False)
            self._ask_for(adapter.version)
        except OutOfMemory:
            return False
        finally:
            await self._leave_line()
        return True

    async def retire(self, adapter: AdapterId) -> None:
        """Drop an adapter if nobody uses it; while others load or drop, it goes when they are done."""
        if self._users[adapter]:
            return  # its last user retires it
        self._retired.add(adapter)
        if not self._line.locked():
            with anyio.CancelScope(shield=True):
                async with self._in_line():
                    pass

    @asynccontextmanager
    async def _in_line(self) -> AsyncGenerator[None]:
        async with AsyncExitStack() as stack:
            await self._line.acquire()
            stack.push_async_callback(self._leave_line)
            yield

    async def _leave_line(self) -> None:
        """Drop what was retired, and let the next one in."""
        try:
            with anyio.CancelScope(shield=True):
                while self._retired:
                    await self._drop_retired(self._retired.pop())
        finally:
            self._line.release()

    async def _drop_retired(self, adapter: AdapterId) -> None:
        engine = self.instance.engine
        if self._users[adapter] or not self._holds(adapter) or not isinstance(engine, SupportsAdapters):
            return
        self._asked_for.pop(adapter, None)
        try:
            await self._drop(engine, adapter)
        except Exception:  # of the engine; whoever retired it has nothing to do with that
            log.exception("Instance %r kept adapter %r, which is wanted no more.", self.instance.id, adapter)

    def _ask_for(self, adapter: AdapterId) -> None:
        self._asked_for.pop(adapter, None)
        self._asked_for[adapter] = None

    async def _load(self, adapter: Adapter, span: Span, *, patient: bool = True) -> None:
        engine, started_s = self.instance.engine, anyio.current_time()
        assert isinstance(engine, SupportsAdapters), "no other is asked"
        attributes = {tm.INSTANCE: self.instance.id, tm.ADAPTER: adapter.version, tm.MODEL: adapter.model}
        self._refuse_if_gone(adapter)
        try:
            with self._telemetry.span(tm.SPAN_ADAPTER, attributes, parent=span) as load:
                await engine.load_adapter(adapter)
                seconds = anyio.current_time() - started_s
                load.set_attribute(tm.SECONDS, seconds)
            self._require_held(adapter)
        except OutOfMemory:
            self._refuse_if_gone(adapter)
            if not await self._make_room(engine, patient=patient):
                raise
        except InstanceLost:
            raise
        except InstanceError:
            self._refuse_if_gone(adapter)
            raise
        else:
            # One series for all versions of an adapter.
            self._telemetry.adapter_seconds.record(seconds, {**attributes, tm.ADAPTER: adapter.id})

    async def _make_room(self, engine: SupportsAdapters, *, patient: bool) -> bool:
        """Drop what was asked for longest ago, of the unused if any is; false if nothing is held.

        Where all is in use, wait until the oldest is not; without patience, that is false too.
        """
        held = set(self.instance.engine.view().adapters)
        oldest = [*(held - set(self._asked_for)), *(name for name in self._asked_for if name in held)]
        chosen = next((name for name in oldest if not self._users[name]), oldest[0] if oldest else None)
        if chosen is None or (self._users[chosen] and not patient):
            return False
        await self._drop(engine, chosen)
        return True

    async def _drop(self, engine: SupportsAdapters, adapter: AdapterId) -> None:
        """Drop an adapter once nobody uses it; meanwhile it takes on nobody more."""
        self._leaving = adapter
        try:
            if self._users[adapter]:
                for scope in self._impatient:
                    scope.cancel()
            while self._users[adapter]:
                self._given_back = anyio.Event()
                await self._given_back.wait()
            await engine.drop_adapter(adapter)
        finally:
            self._leaving = None

    def _holds(self, adapter: AdapterId) -> bool:
        return adapter in self.instance.engine.view().adapters

    def _require_held(self, adapter: Adapter) -> None:
        """Raise `InstanceError` if an engine says that it holds what it was given under another name."""
        if not self._holds(adapter.version):
            raise InstanceError(
                f"Instance {self.instance.id!r} took adapter {adapter.version!r} and holds "
                f"{', '.join(self.instance.engine.view().adapters) or 'none'}; engines are to hold adapters "
                "by their version."
            )

    def _refuse_if_gone(self, adapter: Adapter) -> None:
        view = self.instance.engine.view()
        if view.state is not InstanceState.SERVING or view.model != adapter.model:
            raise RequestEvicted(
                f"Instance {self.instance.id!r} is {view.state} with model {view.model!r} and takes no "
                f"adapter of {adapter.model!r}; ask another."
            )

    def __repr__(self) -> str:
        used = sum(1 for users in self._users.values() if users)
        return f"{self.instance.id}: {used} of {len(self.instance.engine.view().adapters)} in use"
