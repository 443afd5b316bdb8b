"""The adapters that requests may name, while a fleet runs: new ones, new versions, and those that go."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import anyio

from hotswap import telemetry as tm
from hotswap.action import PinAdapters
from hotswap.checks import check_kind, check_strings
from hotswap.errors import ConfigError, InstanceLost, RequestEvicted, UnknownAdapter
from hotswap.event import EventKind
from hotswap.model import Adapter
from hotswap.request import AdapterId, ModelId
from hotswap.runtime.adapter_cache import AdapterCaches
from hotswap.runtime.instance import Instance
from hotswap.runtime.lifetime import Lifetime
from hotswap.runtime.state import FleetState
from hotswap.runtime.texts import Texts
from hotswap.telemetry import Telemetry

if TYPE_CHECKING:
    from opentelemetry.trace import Span

__all__ = ["Adapters"]


class Adapters:
    """What a fleet's requests may name beside their model; a `Fleet` has it as `adapters`.

    An adapter has versions, of which new requests get the latest. A request keeps its version to its end,
    wherever it goes; so versions are held side by side for a while, and an outdated one goes with its last
    request.

    Args:
        state: Of the fleet.
        caches: What instances hold.
        lifetime: Of the fleet.
        telemetry: Records updates and loads ahead of requests.
        texts: Reads the text files of new versions.
    """

    def __init__(
        self,
        state: FleetState,
        caches: AdapterCaches,
        lifetime: Lifetime,
        telemetry: Telemetry,
        texts: Texts,
    ) -> None:
        self._state, self._caches = state, caches
        self._lifetime, self._telemetry, self._texts = lifetime, telemetry, texts
        self._num_versions: dict[tuple[str, str], int] = {}
        self._updating = anyio.Lock()

    def __len__(self) -> int:
        return len(self._state.adapters)

    def __iter__(self) -> Iterator[Adapter]:
        """The latest versions."""
        return iter(tuple(self._state.adapters.values()))

    def add(self, adapter: Adapter) -> None:
        """Let requests name an adapter from now on; again changes nothing.

        Its files are read when the first request for it is there. Texts of such requests are encoded by its
        own tokenizer, and chats written by its own template, if it has them. From now on they must stay as
        they are: later loads of a version whose files have changed end by `SourceChanged`.

        Raises:
            ConfigError: its model has another of the same name, is not registered or was rolled to another,
                or no engine can hold adapters.
        """
        check_kind(ConfigError, "adapter", adapter, Adapter)
        self._refuse_rolled(adapter.model)
        known = self._state.adapters.get(_key(adapter))
        if known is not None and not _same_place(known, adapter):
            raise ConfigError(
                f"Two adapters of model {adapter.model!r} are called {adapter.id!r}; give each its own name, "
                "or update the one there is."
            )
        if ModelId(adapter.model) not in self._state.registered:
            raise ConfigError(
                f"Adapter {adapter.id!r} is of model {adapter.model!r}, which is not registered; add it."
            )
        if self._lifetime.is_open:
            self._check_held()
        if known is None:
            self._install(self._next(adapter), "adapter_added")

    def check_engines(self) -> None:
        """Check adapters that a fleet opens with: engines elsewhere have not told before what they can.

        Raises:
            ConfigError: there are some, and no engine can hold adapters.
        """
        if self._state.adapters:
            self._check_held()

    def _check_held(self) -> None:
        self._state.refresh()
        if not any(view.max_adapters for view in self._state.index.instances()):
            raise ConfigError(
                "This fleet has adapters and no engine that can hold one; give it an engine that can."
            )

    async def update(self, adapter: Adapter) -> Adapter:
        """Give an adapter new weights while it is served; return it with its new `epoch`.

        Instances that hold the old version load the new one first (one that serves the model, if none does);
        so bad files are found before a request names them, and no request waits. Where there is no room for
        both now, and where no instance serves the model, the first request that wants it there loads it. From
        then on new requests get the new version. Those under way keep the old one, which goes with the last
        of them.

        Failure or cancellation leaves the old version the latest. Updates go one after the other.

        Args:
            adapter: Of the same name and model, from another directory: requests under way may have to read
                the old one again, elsewhere.

        Raises:
            UnknownAdapter: the model has none of that name, or it was removed meanwhile; add it.
            ConfigError: it has the source that the old version has, or its model was rolled to another.
            UnsupportedAdapter, StoreError, SourceChanged: the new version cannot be had.
            InstanceError: an engine failed to take it.
            FleetClosed: the fleet is not open, or closed meanwhile.
        """
        return await self._lifetime.run(self._update(adapter), "the update of an adapter")

    async def _update(self, adapter: Adapter) -> Adapter:
        check_kind(ConfigError, "adapter", adapter, Adapter)
        self._refuse_rolled(adapter.model)
        async with self._updating:
            old = self.named(ModelId(adapter.model), adapter.id)
            if adapter.source is not None and _same_place(adapter, old):
                raise ConfigError(
                    f"Adapter {adapter.id!r} has its old version in {str(old.source)!r}, which requests "
                    "under way may read again; write the new one into a directory of its own."
                )
            new = self._next(adapter)
            attributes = {tm.ADAPTER: new.version, tm.MODEL: new.model}
            with self._telemetry.span(tm.SPAN_ADAPTER_UPDATE, attributes) as span:
                try:
                    await self._texts.of_adapter(new)
                    await self._load(new, old, span)
                    if self._state.adapters.get(_key(old)) is not old:
                        raise UnknownAdapter(
                            f"Adapter {old.id!r} of model {old.model!r} was removed while its update was "
                            "read; add it."
                        )
                except BaseException:
                    await self._retire(new)
                    raise
                self._install(new, "adapter_updated")
                await self._retire(old)
            return new

    async def remove(self, model: str, adapter: str) -> None:
        """Let no new request name an adapter; those under way keep it, and it goes with the last of them.

        Raises:
            UnknownAdapter: the model has none of that name.
            ConfigError: the model was rolled to another.
        """
        check_strings(ConfigError, model=model, adapter=adapter)
        self._refuse_rolled(model)
        old = self.named(ModelId(model), adapter)
        self._forget(old)
        self._texts.forget_adapter(old)
        await self._retire(old)

    def forget(self, model: ModelId) -> None:
        """Forget all adapters of a model that is gone."""
        for key, adapter in tuple(self._state.adapters.items()):
            if key[0] == model:
                self._forget(adapter)

    def named(self, model: ModelId, adapter: str) -> Adapter:
        """Return the latest version of an adapter of a model.

        Raises:
            UnknownAdapter: the model has none of that name.
        """
        found = self._state.adapters.get((model, adapter))
        if found is None:
            others = ", ".join(repr(of) for of, name in self._state.adapters if name == adapter)
            has = ", ".join(repr(name) for of, name in self._state.adapters if of == model) or "none"
            elsewhere = f" It is an adapter of {others}." if others else ""
            raise UnknownAdapter(
                f"Model {model!r} has no adapter {adapter!r}; it has {has}.{elsewhere} Add it first."
            )
        return found

    def check_roll(self, old: ModelId, new: ModelId) -> None:
        """Raise `UnknownAdapter` if a model lacks an adapter that another has, whose place it takes."""
        for adapter in self:
            if adapter.model == old:
                self.named(new, adapter.id)

    def counterpart(self, adapter: Adapter, model: ModelId) -> Adapter | None:
        """Return a model's adapter of the same name; `None` if it has none."""
        return self._state.adapters.get((model, adapter.id))

    async def pin(self, action: PinAdapters) -> None:
        """Carry out what a plan asks for; what cannot be loaded now is left to requests."""
        instance = self._state.instances.get(action.instance)
        if instance is None or instance not in self._serving(action.model):
            return
        wanted = [found for name in action.adapters if (found := self._version(action.model, name))]
        attributes = {tm.INSTANCE: instance.id, tm.MODEL: action.model}
        with self._telemetry.span(tm.SPAN_ADAPTER_PIN, attributes) as span:
            await self._caches.pin(wanted, instance, span)

    def _version(self, model: ModelId, version: AdapterId) -> Adapter | None:
        """The adapter of this version, if that is its latest."""
        found = self._state.adapters.get((model, re.sub(r"@\d+$", "", version)))
        return found if found is not None and found.version == version else None

    async def _load(self, new: Adapter, old: Adapter, span: Span) -> None:
        """Load a new version where the old one is; where there is no room now, requests will load it."""
        serving = self._serving(ModelId(old.model))
        for instance in [i for i in serving if old.version in i.status().adapters] or serving[:1]:
            with suppress(InstanceLost, RequestEvicted):
                await self._caches.load(new, instance, span)

    async def _retire(self, adapter: Adapter) -> None:
        """Drop a version wherever no request uses it. Cannot be interrupted."""
        with anyio.CancelScope(shield=True):
            for instance in self._serving(ModelId(adapter.model)):
                await self._caches.retire(adapter.version, instance)

    def _refuse_rolled(self, model: str) -> None:
        self._lifetime.check_loop()
        now = self._state.aliases.get(ModelId(model))
        if now is not None:
            raise ConfigError(f"Model {model!r} was rolled to {now!r}, which serves its requests; name that.")

    def _serving(self, model: ModelId) -> list[Instance]:
        """Return the instances that serve a model and can hold adapters."""
        self._state.refresh()
        return [self._state.instances[view.id] for view in self._state.index.hosts(model, adapters=True)]

    def _next(self, adapter: Adapter) -> Adapter:
        """Return the next version; a number is never given twice, or an old version would be taken for it."""
        epoch = self._num_versions.get(_key(adapter), 0)
        self._num_versions[_key(adapter)] = epoch + 1
        version = replace(adapter, epoch=epoch)
        self._caches.files.note(version)
        return version

    def _install(self, adapter: Adapter, event: EventKind) -> None:
        self._state.adapters[_key(adapter)] = adapter
        self._note(event, adapter)

    def _forget(self, adapter: Adapter) -> None:
        del self._state.adapters[_key(adapter)]
        self._state.demand.forget(adapter)
        self._note("adapter_removed", adapter)

    def _note(self, event: EventKind, adapter: Adapter) -> None:
        self._state.events.note(event, model=ModelId(adapter.model), adapter=adapter.version)

    def __repr__(self) -> str:
        return f"<Adapters [{', '.join(f'{a.model}/{a.version}' for a in self) or 'none'}]>"


def _same_place(one: Adapter, other: Adapter) -> bool:
    if one.source is None or other.source is None:
        return one.source is other.source
    return Path(one.source).resolve() == Path(other.source).resolve()


def _key(adapter: Adapter) -> tuple[str, str]:
    return adapter.model, adapter.id
