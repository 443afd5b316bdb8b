"""What a scheduler may ask for, and the record of a swap that was carried out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from hotswap.request import ModelId
from hotswap.view import InstanceId

__all__ = ["Action", "PhaseRecord", "Prefetch", "Swap", "SwapOutcome", "SwapRecord", "Unload"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Swap:
    """Turn an instance to `model`: evict what runs, unload, load. On an EMPTY instance it is a load alone.

    Running requests get `deadline_s` seconds to finish (0: evict at once); the rest move on elsewhere.
    `reason` is for people: it stands in the span and the record.
    """

    instance: InstanceId
    model: ModelId
    deadline_s: float = 0.0
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unload:
    """Evict what runs on an instance within `deadline_s` and free its weights; it ends EMPTY."""

    instance: InstanceId
    deadline_s: float = 0.0
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefetch:
    """Bring a model's weights to the store's fastest tier before they are needed."""

    model: ModelId
    reason: str = ""


Action: TypeAlias = Swap | Unload | Prefetch

SwapOutcome: TypeAlias = Literal["done", "failed", "cancelled"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseRecord:
    """One phase of a swap, by loop time."""

    name: str
    started_s: float
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SwapRecord:
    """What a swap did: phases in order, requests evicted, bytes loaded and from which tier.

    `model_after` is what the instance serves once the swap ended, whatever its outcome: the new model, the
    old one, or `None` for EMPTY. `downtime_s` runs from the moment the instance stopped admitting to the
    moment it serves again.
    """

    instance: InstanceId
    model_before: ModelId | None
    model: ModelId | None
    model_after: ModelId | None
    outcome: SwapOutcome
    reason: str
    started_s: float
    seconds: float
    downtime_s: float
    phases: tuple[PhaseRecord, ...] = ()
    num_evicted: int = 0
    loaded_bytes: int = 0
    tier: str = ""
    error: str = ""
    trace_id: str = ""

    def phase_s(self, name: str) -> float:
        """Seconds of one phase; 0 if it did not happen."""
        return sum(phase.seconds for phase in self.phases if phase.name == name)

    @property
    def load_bytes_per_s(self) -> float:
        """Bytes over seconds of the load phase; 0 where nothing was read."""
        seconds = self.phase_s("load") + self.phase_s("preload")
        return self.loaded_bytes / seconds if seconds else 0.0
