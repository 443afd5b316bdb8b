"""What has changed between two files: what an open fleet is to do, in words, and what it cannot."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from pydantic import BaseModel

from hotswap.config.building import described_engines
from hotswap.config.schema import AdapterConfig, FleetConfig, ModelConfig
from hotswap.errors import ConfigError

__all__ = ["FREE_OF_MODELS", "Compared", "Difference", "changes_between", "differing", "left"]

C = TypeVar("C")

# What cannot change while a fleet is open.
_FIXED = ("stores", "kv_store", "telemetry")
_FIXED_OF_DOOR = ("host", "port", "metrics", "vllm_metrics")
_FREE_OF_POLICY = ("scheduler", "router")
FREE_OF_MODELS = ("aliases", "tool_format", "reasoning_format", "sampling")
"""The fields of a model that may change while it is served."""


@dataclass(frozen=True, slots=True)
class Compared(Generic[C]):
    """What a file described before and does now, by ids."""

    old: Mapping[str, C]
    new: Mapping[str, C]

    @property
    def added(self) -> list[str]:
        """What it has now alone."""
        return [key for key in self.new if key not in self.old]

    @property
    def removed(self) -> list[str]:
        """What it had before alone."""
        return [key for key in self.old if key not in self.new]

    @property
    def kept(self) -> list[str]:
        """What it has now and had before."""
        return [key for key in self.new if key in self.old]

    @property
    def changed(self) -> list[str]:
        """What of that is described otherwise now."""
        return [key for key in self.kept if self.old[key] != self.new[key]]


@dataclass(frozen=True, slots=True)
class Difference:
    """Two files, part by part.

    Attributes:
        engines: Engines by their ids, each as it is described.
        models: Models by their ids.
        adapters: Adapters by `model:id`.
    """

    engines: Compared[object]
    models: Compared[ModelConfig]
    adapters: Compared[AdapterConfig]

    @classmethod
    def of(cls, old: FleetConfig, new: FleetConfig) -> Difference:
        """Compare two files."""
        return cls(
            Compared(described_engines(old), described_engines(new)),
            Compared(*({model.id: model for model in config.models} for config in (old, new))),
            Compared(*({f"{one.model}:{one.id}": one for one in config.adapters} for config in (old, new))),
        )


def changes_between(old: FleetConfig, new: FleetConfig) -> list[str]:
    """Return in words what an open fleet is to change.

    Raises:
        ConfigError: something has changed that takes a restart; all of that, each by its place.
    """
    parts, changes = Difference.of(old, new), list[str]()
    fixed = [f"{name} has changed" for name in _FIXED if getattr(old, name) != getattr(new, name)]
    for name in differing(old.policy, new.policy):
        told = f"policy.{name}: {getattr(old.policy, name)!r} -> {getattr(new.policy, name)!r}"
        (changes if name in _FREE_OF_POLICY else fixed).append(told)
    for name in differing(old.door, new.door):
        before, after = getattr(old.door, name), getattr(new.door, name)
        told = "changed" if name == "keys" else f"{before!r} -> {after!r}"
        (fixed if name in _FIXED_OF_DOOR else changes).append(f"door.{name}: {told}")
    fixed += [f"engine {id!r} is described otherwise" for id in parts.engines.changed]
    for id in parts.models.changed:
        fields = differing(parts.models.old[id], parts.models.new[id])
        fixed += [f"{name} of model {id!r} has changed" for name in fields if name not in FREE_OF_MODELS]
        changes += [f"model {id!r}: {name} changed" for name in fields if name in FREE_OF_MODELS]
    for kind, part in (("engine", parts.engines), ("model", parts.models)):
        changes += [f"{kind} {id!r}: added" for id in part.added]
        changes += [f"{kind} {id!r}: removed" for id in part.removed]
    changes += [f"adapter {key}: added" for key in parts.adapters.added]
    changes += [f"adapter {key}: removed" for key in parts.adapters.removed]
    changes += [f"adapter {key}: another source" for key in parts.adapters.changed]
    if fixed:
        raise ConfigError(
            f"{'; '.join(fixed)}. That takes a restart, so nothing was changed: restart the server, or take "
            "it back in the file."
        )
    return changes


def differing(old: BaseModel, new: BaseModel) -> list[str]:
    """Return the fields in which two sections of one kind differ."""
    return [name for name in type(old).model_fields if getattr(old, name) != getattr(new, name)]


def left(engines: Iterable[str], models: Iterable[str], adapters: Iterable[str]) -> list[str]:
    """Return in words that what an earlier file has left is removed."""
    told = [f"adapter {key}: removed, which has failed before" for key in adapters]
    told += [f"model {id!r}: removed, which has failed before" for id in models]
    return told + [f"engine {id!r}: removed, which has failed before" for id in engines]
