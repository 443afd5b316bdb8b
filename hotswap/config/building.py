"""What a file describes, made: engines, a store, models and policies as a fleet, and its door."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

from starlette.applications import Starlette

from hotswap import Adapter, Fleet, Model
from hotswap.config.reading import secret_of
from hotswap.config.schema import (
    DoorConfig,
    EngineConfig,
    FleetConfig,
    KVStoreConfig,
    ModelConfig,
    StoreConfig,
)
from hotswap.door import ApiKey, Limits, PrometheusMetrics, Served, create_app
from hotswap.engine import Engine
from hotswap.errors import BackendMissing, ConfigError
from hotswap.kv_store import KVStore
from hotswap.policies.by_name import router_named, scheduler_named
from hotswap.store import WeightStore

__all__ = ["Serving", "build"]

_ENGINES: Mapping[str, tuple[str, str]] = {
    "torch": ("hotswap.backends.torch", "TorchEngine"),
    "vllm": ("hotswap.backends.vllm", "VllmEngine"),
    "llamacpp": ("hotswap.backends.llamacpp", "LlamaCppEngine"),
    "sim": ("hotswap.backends.sim", "SimEngine"),
}


_KV_STORES: Mapping[str, tuple[str, str]] = {
    "host": ("hotswap.backends.kv_stores", "HostKVStore"),
    "sim": ("hotswap.backends.sim", "SimKVStore"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """What a file describes.

    Attributes:
        fleet: The fleet, not open yet.
        aliases: Pairs of another name and its model, for `fleet.models.alias` once it is open.
        app: Its door.
        door: Where it listens, and how it ends.
    """

    fleet: Fleet
    aliases: tuple[tuple[str, str], ...]
    app: Starlette
    door: DoorConfig = field(repr=False)


def build(config: FleetConfig) -> Serving:
    """Make what a file describes; nothing is started, and no weights are read.

    Raises:
        ConfigError: something cannot be made as it is described, by its place.
        BackendMissing: an engine's or a store's library is not installed.
    """
    metrics = PrometheusMetrics() if config.door.metrics else None
    policy = config.policy
    aliases = tuple((name, model.id) for model in config.models for name in model.aliases)
    if twice := {name for name, _ in aliases if [one for one, _ in aliases].count(name) > 1}:
        raise ConfigError(f"models: {min(twice)!r} is another name of two models; give it to one.")
    with _at("policy"):
        fleet = Fleet(
            engines=[engine for at, of in enumerate(config.engines) for engine in _engines(at, of)],
            store=_store(config),
            kv_store=_kv_store(config.kv_store),
            models=[_model(at, model) for at, model in enumerate(config.models)],
            adapters=[Adapter(one.id, one.model, one.source) for one in config.adapters],
            scheduler=None if policy.scheduler is None else scheduler_named(policy.scheduler),
            router=None if policy.router is None else router_named(policy.router),
            interval_s=policy.interval_s,
            max_waiting=policy.max_waiting,
            max_load_attempts=policy.max_load_attempts,
            meter_provider=None if metrics is None else metrics.meter_provider,
        )
    return Serving(
        fleet=fleet,
        aliases=aliases,
        app=create_app(
            fleet,
            limits=_limits(config.door),
            served={model.id: _served(model) for model in config.models},
            keys=_keys(config.door),
            hosts=_hosts(config.door),
            metrics=metrics,
        ),
        door=config.door,
    )


# ---------------------------------------------------------------------------------------------- parts


def _engines(at: int, config: EngineConfig) -> Generator[Engine]:
    with _at(f"engines[{at}]"):
        module, name = _ENGINES[config.kind] if config.kind else _split(config.path or "")
        make = _found(module, name)
        for number in range(config.count):
            options = {key: _numbered(value, number) for key, value in config.options.items()}
            yield cast("Engine", make(_numbered(config.id, number), **options))


def _numbered(value: Any, number: int) -> Any:
    return value.replace("{n}", str(number)) if isinstance(value, str) else value


def _split(path: str) -> tuple[str, str]:
    module, separator, name = path.partition(":")
    if not separator:
        raise ConfigError(f"path is {path!r}; give module:Name.")
    return module, name


def _found(module: str, name: str) -> Callable[..., object]:
    try:
        found: object = getattr(importlib.import_module(module), name, None)
    except BackendMissing:
        raise
    except ImportError as exc:
        raise BackendMissing(f"{module} cannot be imported ({exc}); install what it needs.") from exc
    if not callable(found):
        raise ConfigError(f"{module} has no {name}.")
    return found


def _store(config: FleetConfig) -> WeightStore:
    tiers = [_tier(at, tier, config) for at, tier in enumerate(config.stores)]
    if len(tiers) == 1:
        return tiers[0]
    with _at("stores"):
        return cast("WeightStore", _found("hotswap.backends.stores", "TieredStore")(*tiers))


def _kv_store(config: KVStoreConfig | None) -> KVStore | None:
    if config is None:
        return None
    with _at("kv_store"):
        module, name = _KV_STORES[config.kind]
        return cast("KVStore", _found(module, name)(config.budget))


def _tier(at: int, tier: StoreConfig, config: FleetConfig) -> WeightStore:
    stores = "hotswap.backends.stores"
    with _at(f"stores[{at}]"):
        match tier.kind:
            case "pinned":
                made = _found(stores, "PinnedStore")(_given(tier, "budget"), **tier.options)
            case "shared":
                directory, budget = _given(tier, "directory"), _given(tier, "budget")
                made = _found(stores, "SharedStore")(directory, budget, **tier.options)
            case "nvme":
                options = {**tier.options, "budget": tier.budget}
                made = _found(stores, "NvmeStore")(_given(tier, "directory"), **options)
            case "remote":
                made = _found(stores, "RemoteStore")(_given(tier, "url"), **tier.options)
            case "sim":
                sizes = {model.id: model.size or "1 GB" for model in config.models}
                made = _found("hotswap.backends.sim", "SimStore")(sizes, **tier.options)
        return cast("WeightStore", made)


def _given(tier: StoreConfig, name: str) -> str | int:
    value: str | int | None = getattr(tier, name)
    if value is None:
        raise ConfigError(f"{name} is missing; a store of kind {tier.kind!r} has one.")
    return value


def _model(at: int, model: ModelConfig) -> Model:
    with _at(f"models[{at}]"):
        return Model(
            model.id,
            model.source,
            min_replicas=model.min_replicas,
            weight=model.weight,
            max_context_tokens=model.max_context_tokens,
            on_change=model.on_change,
            layout=model.layout,
        )


def _served(model: ModelConfig) -> Served:
    return Served(
        tool_format=None if model.tool_format == "none" else model.tool_format,
        reasoning_format=None if model.reasoning_format == "none" else model.reasoning_format,
        sampling=model.sampling,
    )


def _limits(door: DoorConfig) -> Limits:
    with _at("door"):
        return Limits(
            body_bytes=door.body_bytes,
            body_s=door.body_s,
            request_s=door.request_s,
            commit_after_s=door.commit_after_s,
            stream_interval_s=door.stream_interval_s,
            choices=door.choices,
        )


def _keys(door: DoorConfig) -> list[ApiKey]:
    keys = list[ApiKey]()
    for at, key in enumerate(door.keys):
        place = f"door.keys[{at}]"
        with _at(place):
            keys.append(
                ApiKey(
                    secret=secret_of(key.secret, f"{place}.secret"),
                    name=key.name,
                    admin=key.admin,
                    models=None if key.models is None else tuple(key.models),
                    priority=key.priority,
                    requests=key.requests,
                )
            )
    return keys


def _hosts(door: DoorConfig) -> list[str] | None:
    """The names of the server; of one that listens on this machine alone, those of this machine."""
    local = ["localhost", "127.0.0.1", "::1"]
    return door.hosts if door.hosts is not None or door.host not in local else local


@contextmanager
def _at(place: str) -> Generator[None]:
    """Have errors of a block begin with a place of the file."""
    try:
        yield
    except BackendMissing:
        raise
    except ConfigError as exc:
        text = str(exc)
        raise ConfigError(text if text.startswith(place) else f"{place}: {text}") from exc
    except (TypeError, ValueError) as exc:  # an argument that there is not, or of a wrong type
        raise ConfigError(f"{place}: {exc}.") from exc
