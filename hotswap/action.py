"""What a scheduler may ask for, and the record of a swap that was carried out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from hotswap.request import AdapterId, ModelId, RequestId
from hotswap.view import InstanceId

__all__ = [
    "Action",
    "DrainRecord",
    "Migrate",
    "MigrationMethod",
    "MigrationOutcome",
    "MigrationRecord",
    "PhaseRecord",
    "PinAdapters",
    "Prefetch",
    "Resize",
    "Swap",
    "SwapOutcome",
    "SwapRecord",
    "Unload",
]


MigrationMethod: TypeAlias = Literal["kv", "tokens", "wait"]


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
    """Bring a model's weights to the store's fastest tier before they are needed.

    `node` says on which node, where tiers belong to nodes; `""` leaves it to the store.
    """

    model: ModelId
    reason: str = ""
    node: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Migrate:
    """Move a request to another instance of its model, while it goes on.

    `method=None` leaves the choice to the fleet. An action that cannot be begun is dropped.
    """

    request: RequestId
    destination: InstanceId
    method: MigrationMethod | None = None
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PinAdapters:
    """Have an instance that serves `model` hold adapters of it before requests ask for them.

    `adapters` are named by version, as in `AdapterView.id`, the most wanted first. Those that are missing are
    loaded in that order, one at a time and between the loads of requests. Room for them is made of adapters
    that no request of the fleet has or waits for, and that the action does not name. Until the next one for
    the instance, what it names is the last to go when a request needs room. An action on an instance that
    serves another model is dropped.
    """

    instance: InstanceId
    model: ModelId
    adapters: tuple[AdapterId, ...]
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resize:
    """Bring the KV pool of an instance to `kv_blocks`, as near as its floor, its ceiling and others allow.

    To shrink takes free blocks first, then those of requests, which compute them again. Actions of one plan
    are carried out in their order, so memory that the first gives is there for the next; the pool may change
    again as requests need blocks. An action on an instance that serves no model, or is being swapped, is
    dropped.
    """

    instance: InstanceId
    kv_blocks: int
    reason: str = ""


Action: TypeAlias = Swap | Unload | Prefetch | PinAdapters | Migrate | Resize

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
    old one, or `None` for EMPTY. `load_path` is how the engine came by the new model, in its own words, where
    it has more than one method. `downtime_s` runs from the moment the instance stopped admitting to the
    moment it serves again. `num_saved` of the evicted requests have all their KV blocks in the fleet's KV
    store; `saved_bytes` were copied to it, those of requests that had ended included.
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
    num_saved: int = 0
    saved_bytes: int = 0
    loaded_bytes: int = 0
    tier: str = ""
    load_path: str = ""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainRecord:
    """How an instance was emptied: requests that moved, that ended there, that wait for a place elsewhere.

    One whose instance was lost meanwhile, or whose client left, is none of these.
    """

    instance: InstanceId
    reason: str
    started_s: float
    seconds: float
    num_moved: int = 0
    num_finished: int = 0
    num_evicted: int = 0


MigrationOutcome: TypeAlias = Literal["done", "waited", "finished", "aborted", "cancelled"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MigrationRecord:
    """What became of one move.

    Attributes:
        request: Which request it was.
        source: Where it ran.
        destination: Where it was to go.
        method: With its KV blocks, or as tokens alone, which are computed again.
        outcome: `"finished"` if the request ended on its own meanwhile.
        started_s: Loop time.
        seconds: From there to the first token on the destination, or to the end of the attempt.
        downtime_s: From the last moment at which the source could decode to the first token elsewhere.
        num_tokens: Of the request, when it was handed over.
        num_stages: Copies, or rounds of tokens, the last included.
        copied_bytes: Of KV blocks.
        estimated_s: The `downtime_s` that the `Mover` expected; 0 without an estimate.
        stage: In which stage it ended, if it was not done.
        error: Why, likewise.
    """

    request: RequestId
    source: InstanceId
    destination: InstanceId
    method: MigrationMethod
    outcome: MigrationOutcome
    reason: str
    started_s: float
    seconds: float
    downtime_s: float = 0.0
    num_tokens: int = 0
    num_stages: int = 0
    copied_bytes: int = 0
    estimated_s: float = 0.0
    stage: str = ""
    error: str = ""
    trace_id: str = ""
