"""Adapters of a fleet: which there are, and that an instance holds a request's before the request runs there.

Adapters come on demand, one at a time on each instance, and go when there is no room for another: the one
that was asked for longest ago first, and never while a request uses it. Instances forget theirs with their
model, and what has gone comes back with the next request for it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import AsyncGenerator, Iterable
from contextlib import asynccontextmanager
from dataclasses import replace
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
    UnknownAdapter,
)
from hotswap.model import Adapter
from hotswap.request import AdapterId, ModelId, Request, RequestId
from hotswap.runtime.instance import Instance
from hotswap.telemetry import Telemetry
from hotswap.view import FleetView, InstanceId, InstanceState

if TYPE_CHECKING:
    from opentelemetry.trace import Span

__all__ = ["Adapters", "seen_by"]


class Adapters:
    """The adapters that a fleet's requests may name, and who uses which of them where."""

    def __init__(self, adapters: Iterable[Adapter], telemetry: Telemetry) -> None:
        self._known: dict[tuple[str, str], Adapter] = {}
        for adapter in adapters:
            self.add(adapter)
        self._shelves: dict[InstanceId, _Shelf] = {}
        self._telemetry = telemetry

    def __len__(self) -> int:
        return len(self._known)

    def add(self, adapter: Adapter) -> None:
        """Let requests name an adapter from now on.

        Raises:
            ConfigError: its model has another of the same name.
        """
        if self._known.setdefault((adapter.model, adapter.id), adapter) != adapter:
            raise ConfigError(
                f"Two adapters of model {adapter.model!r} are called {adapter.id!r}; give each its own name."
            )

    def check_models(self, models: Iterable[ModelId]) -> None:
        """Raise `ConfigError` for an adapter of a model that is not among `models`."""
        known = set(models)
        for adapter in self._known.values():
            if adapter.model not in known:
                raise ConfigError(
                    f"Adapter {adapter.id!r} is of model {adapter.model!r}, which is not registered; add it."
                )

    def check_able(self, instances: Iterable[Instance]) -> None:
        """Raise `ConfigError` if there are adapters and none of the instances can hold one."""
        if self._known and not any(instance.view().max_adapters for instance in instances):
            raise ConfigError(
                "This fleet has adapters and no engine that can hold one; give it an engine that can."
            )

    def check(self, model: ModelId, adapter: str) -> AdapterId:
        """Return the id of an adapter of a model.

        Raises:
            UnknownAdapter: the model has none of that name.
        """
        if (model, adapter) not in self._known:
            others = ", ".join(repr(of) for of, name in self._known if name == adapter)
            has = ", ".join(repr(name) for of, name in self._known if of == model) or "none"
            elsewhere = f" It is an adapter of {others}." if others else ""
            raise UnknownAdapter(
                f"Model {model!r} has no adapter {adapter!r}; it has {has}.{elsewhere} Register it first."
            )
        return AdapterId(adapter)

    @asynccontextmanager
    async def held(self, request: Request, instance: Instance, span: Span) -> AsyncGenerator[None]:
        """Have the instance hold the request's adapter, if it names one, for as long as the block runs.

        Waits while every adapter that could make room is in use. Loads are recorded under `span`.

        Raises:
            RequestEvicted: the instance turns to another model, or away from this one.
            UnsupportedAdapter, StoreError: the adapter cannot be had; nothing was dropped for it.
            OutOfMemory: the instance has no room for it even after it has dropped all others.
            InstanceLost: the instance is gone.
        """
        if request.adapter is None:
            yield
            return
        shelf = self._shelves.setdefault(instance.id, _Shelf(instance, self._telemetry))
        await shelf.take(self._known[request.model, request.adapter], request.id, span)
        try:
            yield
        finally:
            shelf.give_back(request.adapter, request.id)

    def forget(self, instance: InstanceId) -> None:
        """Forget an instance that has left the fleet."""
        self._shelves.pop(instance, None)

    def __repr__(self) -> str:
        return f"<Adapters [{len(self._known)} known]>"


class _Shelf:
    """The adapters that one instance holds, in the order in which they were last asked for.

    What is held, the engine's view says; here is counted who uses it. A request that finds its adapter held
    uses it at once. Others wait in line, in which one at a time loads, and drops before what is unused. Where
    all is in use, the one that was asked for longest ago takes on nobody more until it has gone; a request
    whose move uses it here already is nobody more.
    """

    def __init__(self, instance: Instance, telemetry: Telemetry) -> None:
        self._instance = instance
        self._telemetry = telemetry
        self._line = anyio.Lock()
        self._users: dict[AdapterId, Counter[RequestId]] = defaultdict(Counter)
        self._asked_for: dict[AdapterId, None] = {}  # the latest last
        self._leaving: AdapterId | None = None
        self._given_back = anyio.Event()

    async def take(self, adapter: Adapter, user: RequestId, span: Span) -> None:
        """Return once the adapter is held, and count a user of it."""
        name = AdapterId(adapter.id)
        if not self._holds(name) or (name == self._leaving and user not in self._users[name]):
            async with self._line:
                while not self._holds(name):
                    await self._load(adapter, span)
        self._asked_for.pop(name, None)
        self._asked_for[name] = None
        self._users[name][user] += 1

    def give_back(self, adapter: AdapterId, user: RequestId) -> None:
        """Count a user less."""
        self._users[adapter] -= Counter([user])
        self._given_back.set()

    async def _load(self, adapter: Adapter, span: Span) -> None:
        engine, started_s = self._instance.engine, anyio.current_time()
        assert isinstance(engine, SupportsAdapters), "no other is asked"
        attributes = {tm.INSTANCE: self._instance.id, tm.ADAPTER: adapter.id, tm.MODEL: adapter.model}
        self._refuse_if_gone(adapter)
        try:
            with self._telemetry.span(tm.SPAN_ADAPTER, attributes, parent=span) as load:
                await engine.load_adapter(adapter)
                seconds = anyio.current_time() - started_s
                load.set_attribute(tm.SECONDS, seconds)
        except OutOfMemory:
            self._refuse_if_gone(adapter)
            if not await self._make_room(engine):
                raise
        except InstanceLost:
            raise
        except InstanceError:
            self._refuse_if_gone(adapter)
            raise
        else:
            self._telemetry.adapter_seconds.record(seconds, attributes)

    async def _make_room(self, engine: SupportsAdapters) -> bool:
        """Drop what was asked for longest ago, of the unused if any is; false if nothing is held."""
        held = set(self._instance.engine.view().adapters)
        oldest = [*(held - set(self._asked_for)), *(name for name in self._asked_for if name in held)]
        if not oldest:
            return False
        self._leaving = next((name for name in oldest if not self._users[name]), oldest[0])
        try:
            while self._users[self._leaving]:
                self._given_back = anyio.Event()
                await self._given_back.wait()
            await engine.drop_adapter(self._leaving)
        finally:
            self._leaving = None
        return True

    def _holds(self, adapter: AdapterId) -> bool:
        return adapter in self._instance.engine.view().adapters

    def _refuse_if_gone(self, adapter: Adapter) -> None:
        view = self._instance.engine.view()
        if view.state is not InstanceState.SERVING or view.model != adapter.model:
            raise RequestEvicted(
                f"Instance {self._instance.id!r} is {view.state} with model {view.model!r} and takes no "
                f"adapter of {adapter.model!r}; ask another."
            )


def seen_by(request: Request, fleet: FleetView) -> FleetView:
    """Return what a router may see for a request: one with an adapter goes where adapters can be held."""
    if request.adapter is None or all(instance.max_adapters for instance in fleet.instances):
        return fleet
    return replace(fleet, instances=tuple(i for i in fleet.instances if i.max_adapters))
