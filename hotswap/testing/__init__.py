"""Test tools for an engine, a store or a policy of your own.

Conformance suites to inherit from, cancellation at every checkpoint, faults by seed, spans in memory, and
strategies for views. Needs the `testing` extra; names load what they need when they are first used. Virtual
time, workloads and views as text are in `hotswap.offline`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hotswap.testing.cancel import cancel_everywhere
    from hotswap.testing.chaos import (
        ChaosEngine,
        ChaosStore,
        EngineFaults,
        StoreFaults,
        chaotic_engine,
        chaotic_store,
    )
    from hotswap.testing.conformance import (
        ChannelConformance,
        EngineConformance,
        KVStoreConformance,
        RouterConformance,
        SchedulerConformance,
        WeightStoreConformance,
    )
    from hotswap.testing.spans import RecordedSpan, SpanRecorder

__all__ = [
    "ChannelConformance",
    "ChaosEngine",
    "ChaosStore",
    "EngineConformance",
    "EngineFaults",
    "KVStoreConformance",
    "RecordedSpan",
    "RouterConformance",
    "SchedulerConformance",
    "SpanRecorder",
    "StoreFaults",
    "WeightStoreConformance",
    "cancel_everywhere",
    "chaotic_engine",
    "chaotic_store",
]

_HOMES = {
    "cancel": ("cancel_everywhere",),
    "chaos": ("ChaosEngine", "ChaosStore", "EngineFaults", "StoreFaults", "chaotic_engine", "chaotic_store"),
    "conformance": (
        "ChannelConformance",
        "EngineConformance",
        "KVStoreConformance",
        "RouterConformance",
        "SchedulerConformance",
        "WeightStoreConformance",
    ),
    "spans": ("RecordedSpan", "SpanRecorder"),
}


def __getattr__(name: str) -> object:
    for home, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(f"{__name__}.{home}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
