"""Reading a file again while its fleet is open: what has changed is told, checked, and applied as a whole."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from contextlib import AsyncExitStack
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from anyio import CancelScope, Lock
from pydantic import ValidationError

from hotswap import Adapter, Fleet, Model
from hotswap.checks import shown
from hotswap.config.building import (
    Serving,
    aliases_of,
    engine_ids,
    engine_of,
    model_of,
    policies_of,
    settings_of,
)
from hotswap.config.differences import FREE_OF_MODELS, Difference, changes_between, differing, left
from hotswap.config.reading import read_config
from hotswap.config.schema import AdapterConfig, DoorConfig, FleetConfig, ModelConfig
from hotswap.door.settings import Settings
from hotswap.engine import Engine
from hotswap.errors import ConfigError, FleetClosed, HotswapError

__all__ = ["FileSetup", "with_overrides"]

log = logging.getLogger("hotswap")


def with_overrides(config: FleetConfig, door: Mapping[str, Any]) -> FleetConfig:
    """Return what a file describes, with fields of `[door]` that a command line gives.

    Raises:
        ConfigError: a field may not have its value.
    """
    try:
        changed = DoorConfig.model_validate({**config.door.model_dump(), **door})
    except ValidationError as exc:
        first = exc.errors(include_url=False, include_context=False)[0]
        name = ".".join(map(str, first["loc"]))
        raise ConfigError(f"{name} is {shown(first['input'])}: {first['msg']}.") from exc
    return config.model_copy(update={"door": changed})


class FileSetup:
    """The file that a fleet was made by, which may be read again while the fleet is open.

    Args:
        path: The file.
        door: Fields of `[door]` that go before the file's.
        config: What it has described.
        serving: What was made of that.
    """

    def __init__(self, path: Path, door: Mapping[str, Any], config: FleetConfig, serving: Serving) -> None:
        self._path, self._door_fields = path, dict(door)
        self._config, self._serving = config, serving
        self._lock = Lock()
        self._numbers = count(2)
        # What files have no more and could not be removed yet.
        self._left_engines: dict[str, object] = {}
        self._left_models: dict[str, ModelConfig] = {}
        self._left_adapters: dict[str, AdapterConfig] = {}

    @property
    def config(self) -> FleetConfig:
        """What the file describes, as it was applied last."""
        return self._config

    def changes(self) -> list[str]:
        """Return what the next `reload` would change; errors are those of `Setup.reload`."""
        return changes_between(self._config, self._read()) + left(
            self._left_engines, self._left_models, self._left_adapters
        )

    async def reload(self) -> Sequence[str]:
        """Read the file, log what has changed, apply all of it, and return it; errors are those of `Setup`.

        Models, adapters and engines that are new come first; an error there takes back what was done. Then
        the rest changes at once. Adapters and models that are gone are removed last, each once its requests
        have ended, and then engines, whose requests move. What could not be removed stays and is told of, and
        the next call tries it again.
        """
        async with self._lock:
            old, new = self._config, self._read()
            changes = changes_between(old, new)
            log.info("%s has changed: %s.", self._path, "; ".join(changes) or "in nothing")
            if not (changes or self._left_engines or self._left_models or self._left_adapters):
                return changes
            return changes + await self._apply(old, new)

    def _read(self) -> FleetConfig:
        return with_overrides(read_config(self._path), self._door_fields)

    def engine_for(self, instance: str) -> Engine:
        """Return an engine as one of an instance is described; errors are those of `Setup`."""
        ids = engine_ids(self._config)
        base = instance if instance in ids else _replaced(instance)
        if base not in ids:
            raise ConfigError(f"instance is {instance!r}, which {self._path} does not describe.")
        at, number = ids[base]
        taken = {*ids, *(held.id for held in self._serving.fleet.view().instances)}
        id = next(id for again in self._numbers if (id := f"{base}-{again}") not in taken)
        return engine_of(at, self._config.engines[at], number, id)

    async def _apply(self, old: FleetConfig, new: FleetConfig) -> list[str]:
        """Apply a file, and return what is to be said beside what has changed in it."""
        fleet, settings, aliases = self._serving.fleet, settings_of(new), aliases_of(new)
        parts, policies = Difference.of(old, new), policies_of(new.policy)
        models = [model_of(at, one) for at, one in enumerate(new.models) if one.id in parts.models.added]
        engines = [
            engine_of(at, new.engines[at], number, id)
            for id, (at, number) in engine_ids(new).items()
            if id in parts.engines.added
        ]
        _check_names(fleet, new, parts.models.added)
        told = await self._remove_left(parts, new)
        async with _Additions(fleet) as additions:
            for model in models:
                if model.id not in self._left_models or not _has_model(fleet, model.id):
                    await additions.model(model)
            for key in parts.adapters.added:
                additions.adapter(_adapter(parts.adapters.new[key]))
            for key in parts.adapters.changed:
                await additions.update(_adapter(parts.adapters.new[key]))
            for engine in engines:  # last, as schedulers use them at once
                if engine.id not in self._left_engines or not self._instances_of(engine.id, new):
                    await additions.engine(engine)
        self._switch(old, new, settings, aliases)
        self._serving.scheduler.use(policies[0])
        self._serving.router.use(policies[1])
        for left_ones, described in (
            (self._left_engines, parts.engines.new),
            (self._left_models, parts.models.new),
            (self._left_adapters, parts.adapters.new),
        ):
            for id in described:
                left_ones.pop(id, None)
        self._left_engines |= {id: parts.engines.old[id] for id in parts.engines.removed}
        self._left_models |= {id: parts.models.old[id] for id in parts.models.removed}
        self._left_adapters |= {key: parts.adapters.old[key] for key in parts.adapters.removed}
        gone = parts.engines.removed, parts.models.removed, parts.adapters.removed
        return told + await self._remove(*gone, new)

    def _instances_of(self, id: str, config: FleetConfig) -> list[str]:
        """Return the instances of an engine's id: its own, or what replaced that."""
        described = engine_ids(config)
        held = [instance.id for instance in self._serving.fleet.view().instances]
        return [one for one in held if one == id or (_replaced(one) == id and one not in described)]

    def _switch(
        self,
        old: FleetConfig,
        new: FleetConfig,
        settings: Settings,
        aliases: Sequence[tuple[str, str]],
    ) -> None:
        """Take over what needs no waiting, at once."""
        fleet, kept = self._serving.fleet, dict(aliases)
        for name, _ in aliases_of(old):
            if name not in kept and name in fleet.models.aliases:
                fleet.models.alias(name, None)
        for name, model in aliases:
            fleet.models.alias(name, model)
        self._serving.front.use(settings)
        self._config = new

    async def _remove_left(self, parts: Difference, new: FleetConfig) -> list[str]:
        """Remove what earlier files have left, but for what a new one has again; return what is to be said.

        Raises:
            ConfigError: a model or engine that the new file describes otherwise could not be removed.
        """
        engines = [id for id, one in self._left_engines.items() if parts.engines.new.get(id) != one]
        models = [
            id
            for id, one in self._left_models.items()
            if id not in parts.models.new
            or not set(differing(one, parts.models.new[id])) <= set(FREE_OF_MODELS)
        ]
        adapters = [key for key, one in self._left_adapters.items() if parts.adapters.new.get(key) != one]
        told = await self._remove(engines, models, adapters, new)
        again = [f"model {id!r}" for id in models if id in parts.models.new and id in self._left_models]
        again += [f"engine {id!r}" for id in engines if id in parts.engines.new and id in self._left_engines]
        if again:
            raise ConfigError(
                f"{again[0]} is another one than before, which could not be removed yet: "
                f"{'; '.join(told)}. Read the file again later; nothing else was changed."
            )
        gone = left(
            [id for id in engines if id not in self._left_engines],
            [id for id in models if id not in self._left_models],
            [key for key in adapters if key not in self._left_adapters],
        )
        return gone + told

    async def _remove(
        self, engines: Collection[str], models: Collection[str], adapters: Collection[str], new: FleetConfig
    ) -> list[str]:
        """Remove adapters, models, then engines that were left, and return which could not be, and why."""
        fleet, failed = self._serving.fleet, list[str]()
        for key in adapters:
            one = self._left_adapters[key]
            try:
                if _held(fleet, one) is not None:
                    await fleet.adapters.remove(one.model, one.id)
                self._left_adapters.pop(key, None)
            except FleetClosed:
                raise
            except HotswapError as exc:
                failed.append(f"adapter {key}: not removed yet ({exc})")
        for id in models:
            try:
                if _has_model(fleet, id):
                    await fleet.models.remove(id)
                self._left_models.pop(id, None)
            except FleetClosed:
                raise
            except HotswapError as exc:
                failed.append(f"model {id!r}: not removed yet ({exc})")
        for id in engines:
            try:
                for instance in self._instances_of(id, new):
                    await fleet.remove(instance, deadline_s=new.door.grace_s, reason="gone from the file")
                self._left_engines.pop(id, None)
            except FleetClosed:
                raise
            except HotswapError as exc:
                failed.append(f"engine {id!r}: not removed yet ({exc})")
        return failed


class _Additions:
    """Adds models, adapters and engines to a fleet; an error of the block takes back what it has added."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._undo = AsyncExitStack()

    async def __aenter__(self) -> _Additions:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: object
    ) -> None:
        if error is None:
            self._undo.pop_all()
            return
        try:
            with CancelScope(shield=True):
                await self._undo.aclose()
        except HotswapError as exc:
            if not isinstance(error, Exception):  # a cancellation
                log.error("What was added before could not be taken back: %s", exc)
                return
            raise ConfigError(f"{error} What was added before could not be taken back: {exc}") from error

    async def model(self, model: Model) -> None:
        """Add a model; requests that name it end if it is taken back."""
        await self._fleet.models.add(model)
        self._undo.push_async_callback(self._fleet.models.remove, model.id, deadline_s=0.0)

    async def engine(self, engine: Engine) -> None:
        """Start an engine and add it."""
        await self._fleet.add(engine)
        undo = partial(self._fleet.remove, engine.id, deadline_s=0.0, reason="taken back")
        self._undo.push_async_callback(undo)

    def adapter(self, adapter: Adapter) -> None:
        """Add an adapter, unless it is there already from the same place."""
        held = _held(self._fleet, adapter)
        if held is None or held.source != adapter.source:  # which is refused if there is another
            self._fleet.adapters.add(adapter)
            self._undo.push_async_callback(self._fleet.adapters.remove, adapter.model, adapter.id)

    async def update(self, adapter: Adapter) -> None:
        """Give an adapter its new source; one that operators have taken away meanwhile is added."""
        if (held := _held(self._fleet, adapter)) is None:
            self.adapter(adapter)
        elif held.source != adapter.source:
            await self._fleet.adapters.update(adapter)
            before = Adapter(held.id, held.model, held.source)
            self._undo.push_async_callback(self._fleet.adapters.update, before)


def _replaced(instance: str) -> str:
    """Return the id of the engine that an instance has replaced, as far as its own id says; "" if not."""
    base, _, number = instance.rpartition("-")
    return base if number.isdecimal() else ""


def _has_model(fleet: Fleet, id: str) -> bool:
    return any(held.id == id for held in fleet.models)


def _held(fleet: Fleet, one: Adapter | AdapterConfig) -> Adapter | None:
    """Return the adapter that the fleet has by a name."""
    return next((held for held in fleet.adapters if (held.model, held.id) == (one.model, one.id)), None)


def _check_names(fleet: Fleet, new: FleetConfig, added: Sequence[str]) -> None:
    """Raise `ConfigError` for names that could not be given."""
    ids = {model.id for model in new.models}
    for at, adapter in enumerate(new.adapters):
        if adapter.model not in ids:
            raise ConfigError(f"adapters[{at}].model is {adapter.model!r}, which is no model of the file.")
    held = {model.id for model in fleet.models}  # those that are removed go after aliases have changed
    for at, model in enumerate(new.models):
        if taken := [name for name in model.aliases if name in ids | held]:
            raise ConfigError(f"models[{at}].aliases has {taken[0]!r}, which is a model; give another name.")
        if model.id in added and model.id in fleet.models.aliases:
            raise ConfigError(
                f"models[{at}].id is {model.id!r}, which is another name of a model now; take it away first."
            )


def _adapter(config: AdapterConfig) -> Adapter:
    return Adapter(config.id, config.model, config.source)
