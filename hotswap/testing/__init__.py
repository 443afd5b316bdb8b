"""What hotswap is tested with, for whoever writes an engine, a store or a policy of their own.

Conformance suites to inherit from, a clock that jumps, cancellation at every point, faults by seed, spans in
memory, workloads, and views as text. Needs the `testing` extra; names load what they need when they are
first used. Tests in virtual time take `run` and `virtual_time` from `hotswap.testing.virtual_time`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hotswap.testing.cancel import cancel_everywhere
    from hotswap.testing.chaos import EngineFaults, StoreFaults, chaotic_engine, chaotic_store
    from hotswap.testing.conformance import (
        ChannelConformance,
        EngineConformance,
        RouterConformance,
        SchedulerConformance,
        WeightStoreConformance,
    )
    from hotswap.testing.replay import dump_view, load_view
    from hotswap.testing.spans import RecordedSpan, SpanRecorder
    from hotswap.testing.virtual_time import VirtualTimeDeadlock, VirtualTimeLoop
    from hotswap.testing.workloads import Arrival, play, workload

__all__ = [
    "Arrival",
    "ChannelConformance",
    "EngineConformance",
    "EngineFaults",
    "RecordedSpan",
    "RouterConformance",
    "SchedulerConformance",
    "SpanRecorder",
    "StoreFaults",
    "VirtualTimeDeadlock",
    "VirtualTimeLoop",
    "WeightStoreConformance",
    "cancel_everywhere",
    "chaotic_engine",
    "chaotic_store",
    "dump_view",
    "load_view",
    "play",
    "workload",
]

_HOMES = {
    "cancel": ("cancel_everywhere",),
    "chaos": ("EngineFaults", "StoreFaults", "chaotic_engine", "chaotic_store"),
    "conformance": (
        "ChannelConformance",
        "EngineConformance",
        "RouterConformance",
        "SchedulerConformance",
        "WeightStoreConformance",
    ),
    "replay": ("dump_view", "load_view"),
    "spans": ("RecordedSpan", "SpanRecorder"),
    "virtual_time": ("VirtualTimeDeadlock", "VirtualTimeLoop"),
    "workloads": ("Arrival", "play", "workload"),
}


def __getattr__(name: str) -> object:
    for home, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(f"{__name__}.{home}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
