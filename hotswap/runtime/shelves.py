"""What instances hold of a fleet's adapters: each is there before a request runs with it.

Adapters come on demand, one at a time on each instance, and go when there is no room for another: the one
that was asked for longest ago first, and never while a request uses it. What a plan wants to be held comes
before anybody asks, as far as nothing in use has to go, and is the last to go itself. One that nobody can ask
for any more goes with its last request. Instances forget theirs with their model, and what has gone comes
back with the next request for it.
"""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import AsyncGenerator, Callable, Container, Sequence
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
from hotswap.request import AdapterId, ModelId, RequestId
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
        is_needed: Whether a request of the fleet has a version of a model's adapter, or waits for a place.
        telemetry: Records loads.
    """

    def __init__(
        self,
        is_current: Callable[[Adapter], bool],
        is_needed: Callable[[ModelId, AdapterId], bool],
        telemetry: Telemetry,
    ) -> None:
        self._is_current, self._is_needed, self._telemetry = is_current, is_needed, telemetry
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

    async def hold(self, adapters: Sequence[Adapter], instance: Instance, span: Span) -> None:
        """Have the instance hold adapters, the most wanted first, as far as nothing in use must go for them.

        Until the next call they are the last to go when requests need room. Raises nothing: what could not be
        had is logged, and left to the requests that want it.
        """
        await self._of(instance).hold(adapters, span)

    async def retire(self, adapter: AdapterId, instance: Instance) -> None:
        """Drop an adapter that nobody can ask for any more, if nobody uses it there; else it goes later."""
        await self._of(instance).retire(adapter)

    def forget(self, instance: InstanceId) -> None:
        """Forget an instance that has left the fleet."""
        self._shelves.pop(instance, None)

    def _of(self, instance: Instance) -> _Shelf:
        shelf = self._shelves.get(instance.id)
        if shelf is None or shelf.instance is not instance:  # another may have had its name
            shelf = self._shelves[instance.id] = _Shelf(instance, self._is_needed, self._telemetry)
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

    def __init__(
        self, instance: Instance, is_needed: Callable[[ModelId, AdapterId], bool], telemetry: Telemetry
    ) -> None:
        self.instance = instance
        self._is_needed = is_needed
        self._telemetry = telemetry
        self._line = anyio.Lock()
        self._users: dict[AdapterId, Counter[RequestId]] = defaultdict(Counter)
        self._asked_for: dict[AdapterId, None] = {}  # the latest last
        self._retired: set[AdapterId] = set()
        self._leaving: AdapterId | None = None
        self._given_back = anyio.Event()
        self._impatient: set[anyio.CancelScope] = set()  # those that would not wait for users in the line
        self._wanted: dict[AdapterId, Adapter] = {}  # by the latest plan, the most wanted first
        self._failed: set[AdapterId] = set()  # of these, what could not be had before anybody asked
        self._is_filling = False

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
        self._failed.discard(adapter)
        self._ask_for(adapter)
        self._users[adapter][user] += 1

    def give_back(self, adapter: AdapterId, user: RequestId) -> None:
        """Count a user less."""
        self._users[adapter] -= Counter([user])
        if not self._users[adapter]:
            del self._users[adapter]
        self._given_back.set()

    async def hold(self, adapters: Sequence[Adapter], span: Span) -> None:
        """Load what is missing of these, each once at most; of several calls at a time the first one does."""
        self._wanted = {adapter.version: adapter for adapter in adapters}
        if self._is_filling:
            return
        self._is_filling, tried = True, set[AdapterId]()
        try:
            while (adapter := self._missing(tried)) is not None:
                tried.add(adapter.version)
                if not await self._fill(adapter, span) and adapter.version in self._wanted:
                    return
        finally:
            self._is_filling = False

    def _missing(self, tried: Container[AdapterId]) -> Adapter | None:
        """The most wanted that is not held."""
        names = (name for name in self._wanted if name not in tried and name not in self._failed)
        return next((self._wanted[name] for name in names if not self._holds(name)), None)

    async def _fill(self, adapter: Adapter, span: Span) -> bool:
        """Load what a plan wants; false if no more of it can be had now."""
        try:
            return await self.bring(adapter, span, ahead=True)
        except (InstanceLost, RequestEvicted):
            return False
        except Exception as exc:  # an engine's or a store's own faults as well
            self._failed.add(adapter.version)
            log.warning("Adapter %r was not loaded ahead on %r: %s", adapter.version, self.instance.id, exc)
            return True

    async def bring(self, adapter: Adapter, span: Span, *, ahead: bool = False) -> bool:
        """Hold an adapter if what is unused makes room for it; false if users must be waited for.

        `ahead` of need, nothing that is wanted makes room either.
        """
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
                if ahead and (adapter.version not in self._wanted or self._is_full()):
                    return False
                await self._load(adapter, span, patient=False, ahead=ahead)
            self._ask_for(adapter.version)
        except OutOfMemory:
            return False
        finally:
            await self._leave_line()
        return True

    async def retire(self, adapter: AdapterId) -> None:
        """Drop an adapter if nobody uses it; while others load or drop, it goes when they are done."""
        self._wanted.pop(adapter, None)
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

    async def _load(self, adapter: Adapter, span: Span, *, patient: bool = True, ahead: bool = False) -> None:
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
            if not await self._make_room(engine, patient=patient, ahead=ahead):
                raise
        except InstanceLost:
            raise
        except InstanceError:
            self._refuse_if_gone(adapter)
            raise
        else:
            # One series for all versions of an adapter.
            self._telemetry.adapter_seconds.record(seconds, {**attributes, tm.ADAPTER: adapter.id})

    async def _make_room(self, engine: SupportsAdapters, *, patient: bool, ahead: bool) -> bool:
        """Drop what is unused, of it what is worth least; false if nothing can go.

        With patience, where all is in use, wait until what was asked for longest ago is not.
        """
        oldest = self._oldest()
        unused = self._unused(oldest, ahead=ahead)
        chosen = min(unused, key=self._worth, default=oldest[0] if oldest and patient else None)
        if chosen is None:
            return False
        await self._drop(engine, chosen)
        return True

    def _oldest(self) -> list[AdapterId]:
        """What is held, that which was asked for longest ago first."""
        held = self.instance.engine.status().adapters
        never = [name for name in held if name not in self._asked_for]
        return never + [name for name in self._asked_for if name in held]

    def _unused(self, held: Sequence[AdapterId], *, ahead: bool) -> list[AdapterId]:
        """What of it no request uses here; ahead of need, what is worth nothing besides."""
        unused = [name for name in held if not self._users[name]]
        return [name for name in unused if self._worth(name) == (False, 0)] if ahead else unused

    def _worth(self, adapter: AdapterId) -> tuple[bool, int]:
        """Whether a request has it or waits for it anywhere, then how much a plan wants it: 0 not at all."""
        model = self.instance.engine.status().model
        needed = model is not None and self._is_needed(model, adapter)
        wanted = self._wanted.get(adapter)
        if wanted is None or wanted.model != model:
            return needed, 0
        return needed, len(self._wanted) - list(self._wanted).index(adapter)

    def _is_full(self) -> bool:
        """Whether every place is taken by what may not go ahead of need."""
        view = self.instance.engine.status()
        return len(view.adapters) >= view.max_adapters and not self._unused(view.adapters, ahead=True)

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
        return adapter in self.instance.engine.status().adapters

    def _require_held(self, adapter: Adapter) -> None:
        """Raise `InstanceError` if an engine says that it holds what it was given under another name."""
        if not self._holds(adapter.version):
            raise InstanceError(
                f"Instance {self.instance.id!r} took adapter {adapter.version!r} and holds "
                f"{', '.join(self.instance.engine.status().adapters) or 'none'}; engines are to hold "
                "adapters by their version."
            )

    def _refuse_if_gone(self, adapter: Adapter) -> None:
        view = self.instance.engine.status()
        if view.state is not InstanceState.SERVING or view.model != adapter.model:
            raise RequestEvicted(
                f"Instance {self.instance.id!r} is {view.state} with model {view.model!r} and takes no "
                f"adapter of {adapter.model!r}; ask another."
            )

    def __repr__(self) -> str:
        used = sum(1 for users in self._users.values() if users)
        return f"{self.instance.id}: {used} of {len(self.instance.engine.status().adapters)} in use"
