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

    kind: Literal["torch", "vllm", "llamacpp", "sim"] | None = Field(default=None, description="which engine")
    path: str | None = Field(default=None, description="module:Name of another engine")
    id: str = Field(default="e{n}", description="the name of the instance")
    count: int = Field(default=1, ge=1, description="how many of them")
    options: Options = Field(default={}, description="arguments of the engine, by their names")

    @model_validator(mode="after")
    def _is_one(self) -> EngineConfig:
        if (self.kind is None) == (self.path is None):
            raise ValueError("give kind or path, and not both")
        if self.count > 1 and "{n}" not in self.id:
            raise ValueError("several engines need an id with {n}, so that each has its own")
        return self

    @property
    def ids(self) -> list[str]:
        """The id of each engine."""
        return [self.id.replace("{n}", str(number)) for number in range(self.count)]


class StoreConfig(_Section):
    """A tier of the store, `[[stores]]`, the fastest first."""

    kind: Literal["pinned", "shared", "nvme", "remote", "sim"] = Field(description="which store")
    directory: str | None = Field(default=None, description="of `shared` and `nvme`: where files are")
    budget: str | int | None = Field(default=None, description="the most bytes it holds, such as `200 GiB`")
    url: str | None = Field(default=None, description="of `remote`: where weights are")
    options: Options = Field(default={}, description="more arguments of the store, by their names")


class KVStoreConfig(_Section):
    """Where KV blocks are kept across swaps, `[kv_store]`."""

    kind: Literal["host", "nvme", "tiered", "shared", "node", "sim"] = Field(
        default="host",
        description="memory, a disk, both, memory that processes share, or that of each engine's process",
    )
    budget: str | int = Field(
        description="the most bytes, in memory (`nvme`: on the disk; `node`: of each engine)"
    )
    local_budget: str | int | None = Field(
        default=None, description="of `node`: the most bytes for engines that are in the fleet's process"
    )
    directory: str | None = Field(
        default=None, description="of `nvme`, `tiered` and `shared`: where files are"
    )
    disk_budget: str | int | None = Field(default=None, description="of `tiered`: the most bytes on the disk")
    write_through_s: float | None = Field(
        default=None, description="seconds between saves of requests that run, for when an engine is lost"
    )


class ModelConfig(_Section):
    """A model, `[[models]]`."""

    id: str = Field(description="what requests call it")
    source: str | None = Field(
        default=None, description="a directory, a GGUF file or org/name of the Hugging Face Hub"
    )
    aliases: list[str] = Field(default=[], description="other names of it")
    min_replicas: int = Field(default=0, description="instances that serve it at least")
    weight: float = Field(default=1.0, description="what a request for it counts beside those for others")
    max_context_tokens: int | None = Field(default=None, description="a shorter context than its own")
    on_change: Literal["refuse", "convert", "serve"] = Field(
        default="refuse", description="what is done if the files are others than those imported"
    )
    layout: Literal["modules", "checkpoint"] | None = Field(default=None, description="how a store keeps it")
    tool_format: Literal["hermes", "mistral", "none"] = Field(
        default="hermes", description="how it writes calls of tools"
    )
    reasoning_format: Literal["think", "none"] = Field(
        default="none", description="how it writes its reasoning"
    )
    sampling: dict[str, Any] = Field(default={}, description="fields of Sampling where a request gives none")
    size: str | None = Field(default=None, description="of a simulated model alone: the bytes of its weights")


class AdapterConfig(_Section):
    """An adapter, `[[adapters]]`."""

    id: str = Field(description="what requests call it")
    model: str = Field(description="the model it was trained on")
    source: str | None = Field(default=None, description="a directory in PEFT's format")


class PolicyConfig(_Section):
    """How the fleet decides, `[policy]`; policies are written as in Python: `CostSwap()`."""

    scheduler: str | None = Field(default=None, description="left out, `CostSwap()`")
    router: str | None = Field(default=None, description="left out, `LeastTimeRouter()`")
    interval_s: float = Field(default=1.0, description="seconds between two plans")
    max_waiting: int = Field(
        default=1024, description="requests that may wait; the next one gets `QueueFull`"
    )
    max_load_attempts: int = Field(
        default=3, description="failed loads in a row after which requests for a model are refused"
    )


class KeyConfig(_Section):
    """A key, `[[door.keys]]`; its secret is `env:NAME` or `file:PATH`, so that the file has none."""

    secret: str = Field(pattern=r"^(env|file):.+", description="where the secret is")
    name: str = Field(default="", description="what logs call it")
    admin: bool = Field(default=False, description="of an operator, who may do everything")
    models: list[str] | None = Field(default=None, description="those that it may name; left out, all")
    priority: int = Field(default=0, description="the highest of its requests")
    requests: int | None = Field(default=None, description="under way at once")
    tokens_per_minute: int | None = Field(default=None, description="of prompts and answers")


class TelemetryConfig(_Section):
    """Where spans and metrics go, `[telemetry]`."""

    otlp_endpoint: str | None = Field(
        default=None, description="a server of OTLP over HTTP for spans, such as http://localhost:4318"
    )
    otlp_metrics: bool = Field(default=False, description="metrics go there, too, once a minute")
    service_name: str = Field(default="hotswap", description="`service.name` of spans")

    @model_validator(mode="after")
    def _has_a_server(self) -> TelemetryConfig:
        if self.otlp_metrics and self.otlp_endpoint is None:
            raise ValueError("otlp_metrics takes an otlp_endpoint")
        return self


class DoorConfig(_Section):
    """Where and for whom it listens, `[door]`."""

    host: str = Field(default="127.0.0.1", description="the address to listen on")
    port: int = Field(default=8000, ge=0, le=65535, description="the port; 0 is a free one")
    hosts: list[str] | None = Field(default=None, description="names by which it may be called")
    keys: list[KeyConfig] = Field(default=[], description="of clients and operators")
    metrics: bool = Field(default=True, description="whether `/metrics` is served")
    vllm_metrics: bool = Field(default=False, description="/metrics has vLLM's names as well, for gateways")
    body_bytes: int = Field(default=16 << 20, description="the longest body")
    body_s: float = Field(default=30.0, description="seconds within which a body must have come")
    request_s: float = Field(default=600.0, description="seconds after which a request ends")
    commit_after_s: float = Field(
        default=10.0, description="seconds after which a stream begins without a token"
    )
    stream_interval_s: float = Field(default=0.0, description="seconds between two writes of a stream")
    choices: int = Field(default=128, description="the most choices of a request")
    stale_s: float = Field(
        default=60.0, description="seconds without a decision after which `/ready` says 503"
    )
    adapter_roots: list[str] = Field(default=[], description="directories that operators may load from")
    grace_s: float = Field(default=30.0, ge=0, description="for requests under way, once it is told to end")

    @model_validator(mode="after")
    def _has_metrics(self) -> DoorConfig:
        if self.vllm_metrics and not self.metrics:
            raise ValueError("vllm_metrics takes metrics = true")
        return self


class FleetConfig(_Section):
    """A whole file."""

    engines: list[EngineConfig] = Field(min_length=1, description="what serves")
    stores: list[StoreConfig] = Field(min_length=1, description="where weights are, the fastest first")
    kv_store: KVStoreConfig | None = Field(
        default=None, description="where KV blocks are kept; left out, nowhere"
    )
    models: list[ModelConfig] = Field(min_length=1, description="what is served")
    adapters: list[AdapterConfig] = Field(default=[], description="low-rank adapters of single requests")
    policy: PolicyConfig = Field(default=PolicyConfig(), description="how the fleet decides")
    door: DoorConfig = Field(default=DoorConfig(), description="where and for whom it listens")
    telemetry: TelemetryConfig = Field(default=TelemetryConfig(), description="where spans go")

    @model_validator(mode="after")
    def _has_each_once(self) -> FleetConfig:
        ids = [model.id for model in self.models]
        adapters = [f"{one.model}:{one.id}" for one in self.adapters]
        engines = [(at, id) for at, of in enumerate(self.engines) for id in of.ids]
        for number, (section, id) in enumerate(engines):
            if id in (other for _, other in engines[:number]):
                raise ValueError(f"engines[{section}] has a second {id!r}; give each an id of its own")
        for kind, names in (("models", ids), ("adapters", adapters)):
            if (at := next((at for at, name in enumerate(names) if name in names[:at]), None)) is not None:
                raise ValueError(f"{kind}[{at}] is a second {names[at]!r}; give each an id of its own")
        return self


def schema() -> dict[str, Any]:
    """Return the JSON schema of a file, for editors."""
    return FleetConfig.model_json_schema()
