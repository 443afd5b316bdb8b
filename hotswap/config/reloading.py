"""Reading a file again while its fleet is open: what has changed is told, checked, and applied as a whole."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, Generic, TypeVar

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
    settings_of,
)
from hotswap.config.reading import read_config
from hotswap.config.schema import AdapterConfig, DoorConfig, FleetConfig, ModelConfig
from hotswap.door.settings import Settings
from hotswap.engine import Engine
from hotswap.errors import ConfigError, FleetClosed, HotswapError

__all__ = ["FileSetup", "changes_between", "with_overrides"]

log = logging.getLogger("hotswap")

C = TypeVar("C")

# What cannot change while a fleet is open.
_FIXED = ("engines", "stores", "kv_store", "policy", "telemetry")
_FIXED_OF_DOOR = ("host", "port", "metrics", "vllm_metrics")
_FREE_OF_MODELS = ("aliases", "tool_format", "reasoning_format", "sampling")


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
        # What files have no more and could not be removed yet.
        self._left_models: dict[str, ModelConfig] = {}
        self._left_adapters: dict[str, AdapterConfig] = {}

    @property
    def config(self) -> FleetConfig:
        """What the file describes, as it was applied last."""
        return self._config

    def changes(self) -> list[str]:
        """Return what the next `reload` would change; errors are those of `Setup.reload`."""
        return changes_between(self._config, self._read()) + _left(self._left_models, self._left_adapters)

    async def reload(self) -> Sequence[str]:
        """Read the file, log what has changed, apply all of it, and return it; errors are those of `Setup`.

        Models and adapters that are new come first; an error there takes back what was done. Then the rest
        changes at once. Models and adapters that are gone are removed last, each once its requests have
        ended. One that could not be removed stays and is told of, and the next call tries it again.
        """
        async with self._lock:
            old, new = self._config, self._read()
            changes = changes_between(old, new)
            log.info("%s has changed: %s.", self._path, "; ".join(changes) or "in nothing")
            if not changes and not self._left_models and not self._left_adapters:
                return changes
            return changes + await self._apply(old, new)

    def _read(self) -> FleetConfig:
        return with_overrides(read_config(self._path), self._door_fields)

    def engine_for(self, instance: str) -> Engine:
        """Return an engine as one of an instance is described; errors are those of `Setup`."""
        ids = engine_ids(self._config)
        base = instance if instance in ids else instance.rpartition("-")[0]
        if base not in ids:
            raise ConfigError(f"instance is {instance!r}, which {self._path} does not describe.")
        at, number = ids[base]
        taken = {*ids, *(held.id for held in self._serving.fleet.view().instances)}
        id = next(id for again in self._numbers if (id := f"{base}-{again}") not in taken)
        return engine_of(at, self._config.engines[at], number, id)

    async def _apply(self, old: FleetConfig, new: FleetConfig) -> list[str]:
        """Apply a file, and return what is to be said beside what has changed in it."""
        fleet, settings, aliases = self._serving.fleet, settings_of(new), aliases_of(new)
        models, adapters = _Compared(_by_id(old.models), _by_id(new.models)), _adapters_compared(old, new)
        made = [model_of(at, one) for at, one in enumerate(new.models) if one.id in models.added]
        _check_names(fleet, new, models.added)
        told = await self._remove_left(models.new, adapters.new)
        async with _Additions(fleet) as additions:
            for model in made:
                if model.id not in self._left_models or not _has_model(fleet, model.id):
                    await additions.model(model)
            for key in adapters.added:
                additions.adapter(_adapter(adapters.new[key]))
            for key in _updated(adapters):
                await additions.update(_adapter(adapters.new[key]))
        self._switch(old, new, settings, aliases)
        for id in models.new:
            self._left_models.pop(id, None)
        for key in adapters.new:
            self._left_adapters.pop(key, None)
        gone_models = {id: models.old[id] for id in models.removed}
        gone_adapters = {key: adapters.old[key] for key in adapters.removed}
        self._left_models |= gone_models
        self._left_adapters |= gone_adapters
        return told + await self._remove(gone_models, gone_adapters)

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

    async def _remove_left(
        self, models: Mapping[str, ModelConfig], adapters: Mapping[str, AdapterConfig]
    ) -> list[str]:
        """Remove what earlier files have left, but for what a new one has again; return what is to be said.

        Raises:
            ConfigError: a model that the new file describes otherwise could not be removed.
        """
        left_models = {
            id: one
            for id, one in self._left_models.items()
            if id not in models or not set(_differing(one, models[id])) <= set(_FREE_OF_MODELS)
        }
        left_adapters = {key: one for key, one in self._left_adapters.items() if adapters.get(key) != one}
        told = await self._remove(left_models, left_adapters)
        if again := [id for id in left_models if id in models and id in self._left_models]:
            raise ConfigError(
                f"model {again[0]!r} is another one than before, which could not be removed yet: "
                f"{'; '.join(told)}. Read the file again later; nothing else was changed."
            )
        gone = _left(
            [id for id in left_models if id not in self._left_models],
            [key for key in left_adapters if key not in self._left_adapters],
        )
        return gone + told

    async def _remove(
        self, models: Mapping[str, ModelConfig], adapters: Mapping[str, AdapterConfig]
    ) -> list[str]:
        """Remove adapters, then models, and return which could not be, and why."""
        fleet, failed = self._serving.fleet, list[str]()
        for key, one in adapters.items():
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
        return failed


class _Additions:
    """Adds models and adapters to a fleet; a block that ends by an error takes back what it has added."""

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


def _left(models: Iterable[str], adapters: Iterable[str]) -> list[str]:
    """Return in words that what an earlier file has left is removed."""
    told = [f"adapter {key}: removed, which has failed before" for key in adapters]
    return told + [f"model {id!r}: removed, which has failed before" for id in models]


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
