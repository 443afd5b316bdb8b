"""What a file describes, made: engines, a store, models and policies as a fleet, and its door."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from starlette.applications import Starlette

from hotswap import Adapter, Fleet, Model
from hotswap.config.exporting import readers_of, tracer_of
from hotswap.config.policies import ReplaceableRouter, ReplaceableScheduler
from hotswap.config.reading import secret_of
from hotswap.config.schema import (
    DoorConfig,
    EngineConfig,
    FleetConfig,
    KVStoreConfig,
    ModelConfig,
    PolicyConfig,
    StoreConfig,
)
from hotswap.door import ApiKey, Limits, PrometheusMetrics, Served
from hotswap.door.app import app_of
from hotswap.door.generation import Door
from hotswap.door.settings import Settings
from hotswap.engine import Engine
from hotswap.errors import BackendMissing, ConfigError
from hotswap.kv_store import KVStore
from hotswap.policies.by_name import router_named, scheduler_named
from hotswap.policies.defaults import default_router, default_scheduler
from hotswap.router import Router
from hotswap.scheduler import Scheduler
from hotswap.store import WeightStore

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

__all__ = [
    "Serving",
    "aliases_of",
    "at_place",
    "build",
    "described_engines",
    "engine_ids",
    "engine_of",
    "model_of",
    "policies_of",
    "settings_of",
]

_ENGINES: Mapping[str, tuple[str, str]] = {
    "torch": ("hotswap.backends.torch", "TorchEngine"),
    "vllm": ("hotswap.backends.vllm", "VllmEngine"),
    "llamacpp": ("hotswap.backends.llamacpp", "LlamaCppEngine"),
    "sim": ("hotswap.backends.sim", "SimEngine"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """What a file describes.

    Attributes:
        fleet: The fleet, not open yet.
        aliases: Pairs of another name and its model, for `fleet.models.alias` once it is open.
        app: The application of its door.
        front: The door itself.
        door: Where it listens, and how it ends.
        scheduler: What the fleet plans by.
        router: What it routes by.
        metrics: What metrics are recorded by; shut it down once the fleet has closed.
        tracer_provider: Where spans go; likewise.
    """

    fleet: Fleet
    aliases: tuple[tuple[str, str], ...]
    app: Starlette
    front: Door
    door: DoorConfig = field(repr=False)
    scheduler: ReplaceableScheduler
    router: ReplaceableRouter
    metrics: PrometheusMetrics | None = field(default=None, repr=False)
    tracer_provider: TracerProvider | None = field(default=None, repr=False)


def build(config: FleetConfig) -> Serving:
    """Make what a file describes; nothing is started, and no weights are read.

    Raises:
        ConfigError: something cannot be made as it is described, by its place.
        BackendMissing: an engine's or a store's library is not installed.
    """
    metrics = _metrics(config)
    policy, tracer_provider = config.policy, tracer_of(config.telemetry)
    made_scheduler, made_router = policies_of(policy)
    scheduler, router = ReplaceableScheduler(made_scheduler), ReplaceableRouter(made_router)
    with at_place("policy"):
        fleet = Fleet(
            engines=[engine for at, of in enumerate(config.engines) for engine in _engines(at, of)],
            store=_store(config),
            kv_store=_kv_store(config.kv_store),
            kv_write_through_s=config.kv_store.write_through_s if config.kv_store else None,
            models=[model_of(at, model) for at, model in enumerate(config.models)],
            adapters=[Adapter(one.id, one.model, one.source) for one in config.adapters],
            scheduler=scheduler,
            router=router,
            interval_s=policy.interval_s,
            max_waiting=policy.max_waiting,
            max_load_attempts=policy.max_load_attempts,
            meter_provider=None if metrics is None else metrics.meter_provider,
            tracer_provider=tracer_provider,
        )
    door = Door(fleet, settings_of(config))
    shown = metrics if config.door.metrics else None
    return Serving(
        fleet=fleet,
        aliases=aliases_of(config),
        app=app_of(door, shown),
        front=door,
        door=config.door,
        scheduler=scheduler,
        router=router,
        metrics=metrics,
        tracer_provider=tracer_provider,
    )


def policies_of(policy: PolicyConfig) -> tuple[Scheduler, Router]:
    """Return the policies of a section; those of a fleet that names none where it has none.

    Raises:
        ConfigError: one cannot be made as it is written.
    """
    with at_place("policy"):
        scheduler = default_scheduler() if policy.scheduler is None else scheduler_named(policy.scheduler)
        return scheduler, default_router() if policy.router is None else router_named(policy.router)


def aliases_of(config: FleetConfig) -> tuple[tuple[str, str], ...]:
    """Return pairs of another name and its model.

    Raises:
        ConfigError: two models have one.
    """
    aliases = tuple((name, model.id) for model in config.models for name in model.aliases)
    names = [name for name, _ in aliases]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ConfigError(f"models: {min(twice)!r} is another name of two models; give it to one.")
    return aliases


def settings_of(config: FleetConfig) -> Settings:
    """Return what the door serves by.

    Raises:
        ConfigError: a limit is out of range, or a key has no secret.
    """
    hosts = _hosts(config.door)
    return Settings(
        limits=_limits(config.door),
        served={model.id: _served(model) for model in config.models},
        keys=tuple(_keys(config.door)),
        hosts=None if hosts is None else tuple(hosts),
        adapter_roots=tuple(Path(root) for root in config.door.adapter_roots),
    )


# ---------------------------------------------------------------------------------------------- parts


def _metrics(config: FleetConfig) -> PrometheusMetrics | None:
    """Return what metrics are recorded by; `None` if a file wants none, here or elsewhere."""
    with at_place("telemetry"):
        readers = readers_of(config.telemetry)
    if not config.door.metrics and not readers:
        return None
    named = config.telemetry.service_name if readers else None
    return PrometheusMetrics(vllm_names=config.door.vllm_metrics, readers=readers, service_name=named)


def _engines(at: int, config: EngineConfig) -> Generator[Engine]:
    for number, id in enumerate(config.ids):
        yield engine_of(at, config, number, id)


def engine_of(at: int, config: EngineConfig, number: int, id: str) -> Engine:
    """Return one engine of a section, which is the `at`th of its file.

    Raises:
        ConfigError: it cannot be made as it is described.
        BackendMissing: its library is not installed.
    """
    with at_place(f"engines[{at}]"):
        module, name = _ENGINES[config.kind] if config.kind else _split(config.path or "")
        options = {key: _numbered(value, number) for key, value in config.options.items()}
        return cast("Engine", _found(module, name)(id, **options))


def engine_ids(config: FleetConfig) -> dict[str, tuple[int, int]]:
    """Return the ids of all engines, each with the number of its section and its own in that."""
    return {id: (at, number) for at, of in enumerate(config.engines) for number, id in enumerate(of.ids)}


def described_engines(config: FleetConfig) -> dict[str, object]:
    """Return how each engine is described, by its id, without the section that does."""
    return {
        id: (of.kind, of.path, {name: _numbered(value, number) for name, value in of.options.items()})
        for id, (at, number) in engine_ids(config).items()
        for of in (config.engines[at],)
    }


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
    with at_place("stores"):
        return cast("WeightStore", _found("hotswap.backends.stores", "TieredStore")(*tiers))


def _kv_store(config: KVStoreConfig | None) -> KVStore | None:
    if config is None:
        return None
    with at_place("kv_store"):
        stores = "hotswap.backends.kv_stores"
        match config.kind:
            case "host":
                made = _found(stores, "HostKVStore")(config.budget)
            case "nvme":
                made = _found(stores, "NvmeKVStore")(_given(config, "directory"), config.budget)
            case "tiered":
                disk = _given(config, "directory"), _given(config, "disk_budget")
                tiers = _found(stores, "HostKVStore")(config.budget), _found(stores, "NvmeKVStore")(*disk)
                made = _found(stores, "TieredKVStore")(*tiers)
            case "shared":
                made = _found(stores, "SharedKVStore")(_given(config, "directory"), config.budget)
            case "node":
                local = config.local_budget and _found(stores, "HostKVStore")(config.local_budget)
                made = _found(stores, "NodeKVStore")(config.budget, local=local or None)
            case "sim":
                made = _found("hotswap.backends.sim", "SimKVStore")(config.budget)
        return cast("KVStore", made)


def _tier(at: int, tier: StoreConfig, config: FleetConfig) -> WeightStore:
    stores = "hotswap.backends.stores"
    with at_place(f"stores[{at}]"):
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


def _given(tier: StoreConfig | KVStoreConfig, name: str) -> str | int:
    value: str | int | None = getattr(tier, name)
    if value is None:
        raise ConfigError(f"{name} is missing; a store of kind {tier.kind!r} has one.")
    return value


def model_of(at: int, model: ModelConfig) -> Model:
    """Return a model of a file, which is its `at`th.

    Raises:
        ConfigError: it says something wrong.
    """
    with at_place(f"models[{at}]"):
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
    with at_place("door"):
        return Limits(
            body_bytes=door.body_bytes,
            body_s=door.body_s,
            request_s=door.request_s,
            commit_after_s=door.commit_after_s,
            stream_interval_s=door.stream_interval_s,
            choices=door.choices,
            stale_s=door.stale_s,
        )


def _keys(door: DoorConfig) -> list[ApiKey]:
    keys = list[ApiKey]()
    for at, key in enumerate(door.keys):
        place = f"door.keys[{at}]"
        with at_place(place):
            keys.append(
                ApiKey(
                    secret=secret_of(key.secret, f"{place}.secret"),
                    name=key.name,
                    admin=key.admin,
                    models=None if key.models is None else tuple(key.models),
                    priority=key.priority,
                    requests=key.requests,
                    tokens_per_minute=key.tokens_per_minute,
                )
            )
    return keys


def _hosts(door: DoorConfig) -> list[str] | None:
    """The names of the server; of one that listens on this machine alone, those of this machine."""
    local = ["localhost", "127.0.0.1", "::1"]
    return door.hosts if door.hosts is not None or door.host not in local else local


@contextmanager
def at_place(place: str) -> Generator[None]:
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
