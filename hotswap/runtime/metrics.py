"""Gauges that are read from the fleet's view when a metrics reader asks."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable

from opentelemetry.metrics import CallbackOptions, Observation

from hotswap import telemetry as tm
from hotswap.request import ModelId
from hotswap.runtime.state import FleetState
from hotswap.runtime.views import LiveView
from hotswap.telemetry import Telemetry
from hotswap.view import FleetView, InstanceState, InstanceView

__all__ = ["LastView", "observe_fleet"]


class LastView:
    """The fleet as it was last seen, for a metrics reader on any thread; nothing once it is closed.

    A metrics reader asks from a thread of its own, where the loop has no clock and what it owns may be
    changing. There the answer is the view that the control loop took last, at most one interval old. A meter
    that measures nothing wants no views, so none are taken for it.
    """

    def __init__(self, state: FleetState, *, wanted: bool) -> None:
        self._state: FleetState | None = state
        self._wanted = wanted
        self._thread = threading.get_ident()
        self._last: FleetView | None = None
        self.keep()

    def keep(self) -> None:
        """Take a view for readers on other threads, if there may be any."""
        if self._wanted and self._state is not None:
            self._state.refresh()
            view = LiveView.of(self._state, running=False)
            # What gauges read; the requests that wait are many.
            self._last = FleetView(
                now_s=view.now_s,
                instances=view.instances,
                models=view.models,
                store=view.store,
                kv_store=view.kv_store,
            )

    def seen(self) -> Iterable[FleetView]:
        """Return the view, fresh on the loop's own thread; empty after `close`."""
        if self._last is not None and threading.get_ident() == self._thread:
            self.keep()
        return () if self._last is None else (self._last,)

    def instances(self) -> Iterable[InstanceView]:
        """Return the instances of that view."""
        return (instance for view in self.seen() for instance in view.instances)

    def close(self) -> None:
        """Show nothing from now on, and let go of the fleet: the meter outlives it."""
        self._state = self._last = None


def observe_fleet(telemetry: Telemetry, fleet: LastView) -> None:
    """Register the gauges of one fleet: requests by model, instances by state, KV blocks, bytes by tier."""

    def queue(_: CallbackOptions) -> Iterable[Observation]:
        return [Observation(m.num_waiting, {tm.MODEL: m.id}) for view in fleet.seen() for m in view.models]

    def running(_: CallbackOptions) -> Iterable[Observation]:
        return [Observation(m.num_running, {tm.MODEL: m.id}) for view in fleet.seen() for m in view.models]

    def resident(_: CallbackOptions) -> Iterable[Observation]:
        held: Counter[str] = Counter()  # of all nodes, which have tiers of the same names
        for view in fleet.seen():
            for tier in view.store.tiers:
                held[tier.name] += tier.used_bytes
        return [Observation(used_bytes, {tm.TIER: name}) for name, used_bytes in held.items()]

    def adapters(_: CallbackOptions) -> Iterable[Observation]:
        return [
            Observation(len(i.adapters), {tm.INSTANCE: i.id}) for i in fleet.instances() if i.max_adapters
        ]

    def states(_: CallbackOptions) -> Iterable[Observation]:
        """All states of each instance, 1 for the one that it is in, so that a state that ended reads 0."""
        return [
            Observation(int(i.state is state), {tm.INSTANCE: i.id, tm.INSTANCE_STATE: state})
            for i in fleet.instances()
            for state in InstanceState
        ]

    def kv_blocks(_: CallbackOptions) -> Iterable[Observation]:
        return [Observation(i.num_kv_blocks, {tm.INSTANCE: i.id}) for i in fleet.instances()]

    def kv_usage(_: CallbackOptions) -> Iterable[Observation]:
        return [
            Observation(1.0 - i.num_free_kv_blocks / i.num_kv_blocks, {tm.INSTANCE: i.id})
            for i in fleet.instances()
            if i.num_kv_blocks
        ]

    def kv_stored(_: CallbackOptions) -> Iterable[Observation]:
        kept: Counter[tuple[ModelId, str]] = Counter()  # of all nodes
        for view in fleet.seen():
            if (store := view.kv_store) is not None:
                for stored in store.models:
                    kept[stored.model, store.tier] += stored.size_bytes
        return [
            Observation(size, {tm.MODEL: model, tm.KV_TIER: tier}) for (model, tier), size in kept.items()
        ]

    gauge = telemetry.gauges.create_observable_gauge
    gauge(tm.ADAPTERS_HELD, [adapters], "{adapter}", "Adapters held by instance")
    gauge(tm.QUEUE_LENGTH, [queue], "{request}", "Requests that wait by model")
    gauge(tm.REQUESTS_RUNNING, [running], "{request}", "Requests that are assigned to instances by model")
    gauge(tm.RESIDENT_BYTES, [resident], "By", "Bytes held by tier")
    gauge(tm.INSTANCES, [states], "{instance}", "Instances by state: 1 for the state of each")
    gauge(tm.KV_BLOCKS, [kv_blocks], "{block}", "KV blocks of the pool by instance")
    gauge(tm.KV_STORED, [kv_stored], "By", "Bytes of KV blocks that are kept across swaps, by model")
    gauge(tm.KV_USAGE, [kv_usage], "1", "Share of the KV blocks in use by instance")
