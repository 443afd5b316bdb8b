"""What a file may say: types are checked here, the rest by what values are given to."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

__all__ = [
    "AdapterConfig",
    "DoorConfig",
    "EngineConfig",
    "FleetConfig",
    "KVStoreConfig",
    "KeyConfig",
    "ModelConfig",
    "PolicyConfig",
    "StoreConfig",
    "TelemetryConfig",
    "schema",
]

Options = dict[str, str | int | float | bool]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, protected_namespaces=())


class EngineConfig(_Section):
    """Engines of one kind, `[[engines]]`; `{n}` in `id` and `options` is the number of each, from 0."""

    kind: Literal["torch", "vllm", "llamacpp", "sim"] | None = None
    path: str | None = Field(default=None, description="module:Name of another engine")
    id: str = "e{n}"
    count: int = Field(default=1, ge=1)
    options: Options = Field(default={}, description="arguments of the engine, by their names")

    @model_validator(mode="after")
    def _is_one(self) -> EngineConfig:
        if (self.kind is None) == (self.path is None):
            raise ValueError("give kind or path, and not both")
        if self.count > 1 and "{n}" not in self.id:
            raise ValueError("several engines need an id with {n}, so that each has its own")
        return self


class StoreConfig(_Section):
    """A tier of the store, `[[stores]]`, the fastest first."""

    kind: Literal["pinned", "shared", "nvme", "remote", "sim"]
    directory: str | None = None
    budget: str | int | None = None
    url: str | None = None
    options: Options = Field(default={}, description="more arguments of the store, by their names")


class KVStoreConfig(_Section):
    """Where KV blocks are kept across swaps, `[kv_store]`."""

    kind: Literal["host", "nvme", "tiered", "sim"] = "host"
    budget: str | int
    directory: str | None = None
    disk_budget: str | int | None = None


class ModelConfig(_Section):
    """A model, `[[models]]`."""

    id: str
    source: str | None = None
    aliases: list[str] = []
    min_replicas: int = 0
    weight: float = 1.0
    max_context_tokens: int | None = None
    on_change: Literal["refuse", "convert", "serve"] = "refuse"
    layout: Literal["modules", "checkpoint"] | None = None
    tool_format: Literal["hermes", "mistral", "none"] = "hermes"
    reasoning_format: Literal["think", "none"] = "none"
    sampling: dict[str, Any] = Field(default={}, description="fields of Sampling where a request gives none")
    size: str | None = Field(default=None, description="of a simulated model alone: the bytes of its weights")


class AdapterConfig(_Section):
    """An adapter, `[[adapters]]`."""

    id: str
    model: str
    source: str | None = None


class PolicyConfig(_Section):
    """How the fleet decides, `[policy]`; policies are written as in Python: `CostSwap()`."""

    scheduler: str | None = None
    router: str | None = None
    interval_s: float = 1.0
    max_waiting: int = 1024
    max_load_attempts: int = 3


class KeyConfig(_Section):
    """A key, `[[door.keys]]`; its secret is `env:NAME` or `file:PATH`, so that the file has none."""

    secret: str = Field(pattern=r"^(env|file):.+")
    name: str = ""
    admin: bool = False
    models: list[str] | None = None
    priority: int = 0
    requests: int | None = None
    tokens_per_minute: int | None = None


class TelemetryConfig(_Section):
    """Where spans and metrics go, `[telemetry]`."""

    otlp_endpoint: str | None = Field(
        default=None, description="a server of OTLP over HTTP for spans, such as http://localhost:4318"
    )
    otlp_metrics: bool = Field(default=False, description="metrics go there, too, once a minute")
    service_name: str = "hotswap"

    @model_validator(mode="after")
    def _has_a_server(self) -> TelemetryConfig:
        if self.otlp_metrics and self.otlp_endpoint is None:
            raise ValueError("otlp_metrics takes an otlp_endpoint")
        return self


class DoorConfig(_Section):
    """Where and for whom it listens, `[door]`."""

    host: str = "127.0.0.1"
    port: int = Field(default=8000, ge=0, le=65535)
    hosts: list[str] | None = None
    keys: list[KeyConfig] = []
    metrics: bool = True
    vllm_metrics: bool = Field(default=False, description="/metrics has vLLM's names as well, for gateways")
    body_bytes: int = 16 << 20
    body_s: float = 30.0
    request_s: float = 600.0
    commit_after_s: float = 10.0
    stream_interval_s: float = 0.0
    choices: int = 128
    stale_s: float = 60.0
    adapter_roots: list[str] = Field(default=[], description="directories that operators may load from")
    grace_s: float = Field(default=30.0, ge=0, description="for requests under way, once it is told to end")

    @model_validator(mode="after")
    def _has_metrics(self) -> DoorConfig:
        if self.vllm_metrics and not self.metrics:
            raise ValueError("vllm_metrics takes metrics = true")
        return self


class FleetConfig(_Section):
    """A whole file."""

    engines: list[EngineConfig] = Field(min_length=1)
    stores: list[StoreConfig] = Field(min_length=1)
    kv_store: KVStoreConfig | None = None
    models: list[ModelConfig] = Field(min_length=1)
    adapters: list[AdapterConfig] = []
    policy: PolicyConfig = PolicyConfig()
    door: DoorConfig = DoorConfig()
    telemetry: TelemetryConfig = TelemetryConfig()

    @model_validator(mode="after")
    def _has_each_once(self) -> FleetConfig:
        ids = [model.id for model in self.models]
        adapters = [f"{one.model}:{one.id}" for one in self.adapters]
        for kind, names in (("models", ids), ("adapters", adapters)):
            if (at := next((at for at, name in enumerate(names) if name in names[:at]), None)) is not None:
                raise ValueError(f"{kind}[{at}] is a second {names[at]!r}; give each an id of its own")
        return self


def schema() -> dict[str, Any]:
    """Return the JSON schema of a file, for editors."""
    return FleetConfig.model_json_schema()
