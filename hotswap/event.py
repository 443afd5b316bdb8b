"""`FleetEvent`: what happened in a fleet, for those that watch it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from hotswap.action import DrainRecord, MigrationRecord, SwapRecord
from hotswap.phase_view import PhaseView
from hotswap.request import AdapterId, ModelId
from hotswap.view import InstanceId

__all__ = ["EventKind", "FleetEvent"]

EventKind: TypeAlias = Literal[
    "swap_started",
    "swap_phase",
    "swap_progress",
    "swap_ended",
    "move_ended",
    "drain_ended",
    "kv_resized",
    "instance_lost",
    "instance_restarted",
    "instance_added",
    "instance_removed",
    "model_added",
    "model_removed",
    "adapter_added",
    "adapter_updated",
    "adapter_removed",
    "fleet_closing",
    "fleet_closed",
    "fleet_reopened",
    "gap",
]
"""What may happen; a `"gap"` stands for events that are not kept any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetEvent:
    """Something that happened in a fleet.

    Attributes:
        number: Its number; the next event of the fleet has the next one. That of a `"gap"` is the number
            before the first event that is still kept.
        at_s: The loop time.
        kind: What happened. An unload is a swap to no model.
        instance: Where; `None` if it happened to no instance.
        model: Of a swap the model that it is to, else the model that came, went, or has the adapter.
        adapter: The version of the adapter that came or went.
        phase: Of a swap, the phase that has begun or goes on.
        reason: Why, for people.
        record: Of what has ended.
    """

    number: int
    at_s: float
    kind: EventKind
    instance: InstanceId | None = None
    model: ModelId | None = None
    adapter: AdapterId | None = None
    phase: PhaseView | None = None
    reason: str = ""
    record: SwapRecord | MigrationRecord | DrainRecord | None = None
