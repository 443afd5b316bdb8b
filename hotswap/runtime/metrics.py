"""Gauges that are read from the fleet's view when a metrics reader asks."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from opentelemetry.metrics import CallbackOptions, Observation

from hotswap import telemetry as tm
from hotswap.telemetry import Telemetry
from hotswap.view import FleetView

__all__ = ["observe_fleet"]


def observe_fleet(telemetry: Telemetry, view: Callable[[], FleetView]) -> None:
    """Register the gauges of one fleet: queue length by model, resident bytes by tier."""

    def queue(_: CallbackOptions) -> Iterable[Observation]:
        return [Observation(model.num_waiting, {tm.MODEL: model.id}) for model in view().models]

    def resident(_: CallbackOptions) -> Iterable[Observation]:
        return [Observation(tier.used_bytes, {tm.TIER: tier.name}) for tier in view().store.tiers]

    telemetry.meter.create_observable_gauge(tm.QUEUE_LENGTH, [queue], "{request}", "Requests that wait")
    telemetry.meter.create_observable_gauge(tm.RESIDENT_BYTES, [resident], "By", "Bytes held by tier")
