"""Reading a file again while its fleet is open: what has changed is told, checked, and applied as a whole."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, Generic, TypeVar

from anyio import Lock

from hotswap import Adapter, Fleet, Model
from hotswap.config.building import (
    Serving,
    aliases_of,
    engine_ids,
    engine_of,
    model_of,
    settings_of,
)
from hotswap.config.reading import read_config
from hotswap.config.schema import AdapterConfig, FleetConfig, ModelConfig
from hotswap.door.settings import Settings
from hotswap.engine import Engine
from hotswap.errors import ConfigError

__all__ = ["FileSetup", "changes_between", "with_overrides"]

log = logging.getLogger("hotswap")

C = TypeVar("C")

# What cannot change while a fleet is open.
_FIXED = ("engines", "stores", "kv_store", "policy", "telemetry")
_FIXED_OF_DOOR = ("host", "port", "metrics")
_FREE_OF_MODELS = ("aliases", "tool_format", "reasoning_format", "sampling")


def with_overrides(config: FleetConfig, door: Mapping[str, Any]) -> FleetConfig:
    """Return what a file describes, with fields of `[door]` that a command line gives."""
    return config.model_copy(update={"door": config.door.model_copy(update=door)})


def changes_between(old: FleetConfig, new: FleetConfig) -> list[str]:
    """Return in words what an open fleet is to change.

    Raises:
        ConfigError: something has changed that takes a new start; all of that, each by its place.
    """
    fixed = [f"{name} has changed" for name in _FIXED if getattr(old, name) != getattr(new, name)]
    changes = list[str]()
    for name in type(old.door).model_fields:
        before, after = getattr(old.door, name), getattr(new.door, name)
        if before != after and name in _FIXED_OF_DOOR:
            fixed.append(f"door.{name} was {before!r} and is {after!r}")
        elif before != after:
            changes.append(f"door.{name}: " + ("changed" if name == "keys" else f"{before!r} -> {after!r}"))
    models, adapters = _Compared(_by_id(old.models), _by_id(new.models)), _adapters_compared(old, new)
    for id in models.kept:
        fields = _differing(models.old[id], models.new[id])
        fixed += [f"{name} of model {id!r} has changed" for name in fields if name not in _FREE_OF_MODELS]
        changes += [f"model {id!r}: {name} changed" for name in fields if name in _FREE_OF_MODELS]
    changes += [f"model {id!r}: added" for id in models.added]
    changes += [f"model {id!r}: removed" for id in models.removed]
    changes += [f"adapter {key}: added" for key in adapters.added]
    changes += [f"adapter {key}: removed" for key in adapters.removed]
    changes += [f"adapter {key}: another source" for key in _updated(adapters)]
    if fixed:
        raise ConfigError(f"{'; '.join(fixed)}. That takes a new start; nothing was changed.")
    return changes


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
        self._left = list[str]()  # models that are to be removed

    @property
    def config(self) -> FleetConfig:
        """What the file describes, as it was applied last."""
        return self._config

    def changes(self) -> list[str]:
        """Return what the next `reload` would change; errors are those of `Setup.reload`."""
        return changes_between(self._config, self._read())

    async def reload(self) -> Sequence[str]:
        """Read the file, log what has changed, and apply all of it; errors are those of `Setup`.

        Models that are new are imported first, and models that are gone are removed last, once their
        requests have ended. An error before that leaves everything as it was. A model that could not be
        removed stays, and the next call tries it again.
        """
        async with self._lock:
            old, new = self._config, self._read()
            changes = changes_between(old, new)
            log.info("%s has changed: %s.", self._path, "; ".join(changes) or "in nothing")
            if changes or self._left:
                await self._apply(old, new)
            return changes

    def _read(self) -> FleetConfig:
        return with_overrides(read_config(self._path), self._door_fields)

    def engine_for(self, instance: str) -> Engine:
        """Return an engine as one of an instance is described; errors are those of `Setup`."""
        ids = engine_ids(self._config)
        base = instance if instance in ids else instance.rpartition("-")[0]
        if base not in ids:
            raise ConfigError(f"instance is {instance!r}, which {self._path} does not describe.")
        at, number = ids[base]
        return engine_of(at, self._config.engines[at], number, f"{base}-{next(self._numbers)}")

    async def _apply(self, old: FleetConfig, new: FleetConfig) -> None:
        fleet, settings, aliases = self._serving.fleet, settings_of(new), aliases_of(new)
        models = _Compared(_by_id(old.models), _by_id(new.models))
        made = [model_of(at, one) for at, one in enumerate(new.models) if one.id in models.added]
        adapters = _adapters_compared(old, new)
        _check_names(old, new)
        async with AsyncExitStack() as undone:
            await _add(fleet, undone, made, [_adapter(adapters.new[key]) for key in adapters.added])
            for key in _updated(adapters):
                await fleet.adapters.update(_adapter(adapters.new[key]))
                undone.push_async_callback(fleet.adapters.update, _adapter(adapters.old[key]))
            undone.pop_all()
        self._switch(old, new, settings, aliases)
        self._left = [*self._left, *models.removed]
        await self._remove(adapters, {model.id for model in new.models})

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

    async def _remove(self, adapters: _Compared[AdapterConfig], wanted: Collection[str]) -> None:
        fleet = self._serving.fleet
        for key in adapters.removed:
            one = adapters.old[key]
            if any((held.model, held.id) == (one.model, one.id) for held in fleet.adapters):
                await fleet.adapters.remove(one.model, one.id)
        for model in self._left:
            if model not in wanted and any(held.id == model for held in fleet.models):
                await fleet.models.remove(model)
            self._left = [other for other in self._left if other != model]


async def _add(
    fleet: Fleet, undone: AsyncExitStack, models: Sequence[Model], adapters: Sequence[Adapter]
) -> None:
    for model in models:
        if all(held.id != model.id for held in fleet.models):
            await fleet.models.add(model)
            undone.push_async_callback(fleet.models.remove, model.id)
    for adapter in adapters:
        fleet.adapters.add(adapter)
        undone.push_async_callback(fleet.adapters.remove, adapter.model, adapter.id)


def _check_names(old: FleetConfig, new: FleetConfig) -> None:
    """Raise `ConfigError` for names that could not be given."""
    ids = {model.id for model in new.models}
    for at, adapter in enumerate(new.adapters):
        if adapter.model not in ids:
            raise ConfigError(f"adapters[{at}].model is {adapter.model!r}, which is no model of the file.")
    before = {model.id for model in old.models}  # those that are removed go after aliases have changed
    for at, model in enumerate(new.models):
        if taken := [name for name in model.aliases if name in ids | before]:
            raise ConfigError(f"models[{at}].aliases has {taken[0]!r}, which is a model; give another name.")


@dataclass(frozen=True, slots=True)
class _Compared(Generic[C]):
    """What a file described before and does now, by ids."""

    old: Mapping[str, C]
    new: Mapping[str, C]

    @property
    def added(self) -> list[str]:
        return [key for key in self.new if key not in self.old]

    @property
    def removed(self) -> list[str]:
        return [key for key in self.old if key not in self.new]

    @property
    def kept(self) -> list[str]:
        return [key for key in self.new if key in self.old]


def _adapters_compared(old: FleetConfig, new: FleetConfig) -> _Compared[AdapterConfig]:
    return _Compared(*({f"{one.model}:{one.id}": one for one in config.adapters} for config in (old, new)))


def _updated(adapters: _Compared[AdapterConfig]) -> list[str]:
    return [key for key in adapters.kept if adapters.old[key].source != adapters.new[key].source]


def _adapter(config: AdapterConfig) -> Adapter:
    return Adapter(config.id, config.model, config.source)


def _by_id(models: Sequence[ModelConfig]) -> dict[str, ModelConfig]:
    return {model.id: model for model in models}


def _differing(old: ModelConfig, new: ModelConfig) -> list[str]:
    return [name for name in type(old).model_fields if getattr(old, name) != getattr(new, name)]
