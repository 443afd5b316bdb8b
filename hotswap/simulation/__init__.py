"""Fleets in virtual time: the effect of a policy on a workload, before it runs in production.

`simulate` plays a `Trace` to the `Fleet` that runs in production, on simulated engines, in a clock that
jumps, and returns an `Outcome`: latencies, swaps, moves and what every instance held when. The same trace,
cluster and policies give the same outcome to the last byte. Names load what they need when first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hotswap.simulation.by_name import router_named, scheduler_named
    from hotswap.simulation.cluster import Cluster
    from hotswap.simulation.explanation import explain
    from hotswap.simulation.fit import Fit, Measurements, StepSample, fit_profile
    from hotswap.simulation.measuring import Shapes, measure_engine
    from hotswap.simulation.outcome import Outcome, Sample, Served, Slo
    from hotswap.simulation.plots import draw
    from hotswap.simulation.profiles import PROFILES, Profile
    from hotswap.simulation.run import simulate
    from hotswap.simulation.trace import Trace, TraceRequest, generate

__all__ = [
    "PROFILES",
    "Cluster",
    "Fit",
    "Measurements",
    "Outcome",
    "Profile",
    "Sample",
    "Served",
    "Shapes",
    "Slo",
    "StepSample",
    "Trace",
    "TraceRequest",
    "draw",
    "explain",
    "fit_profile",
    "generate",
    "measure_engine",
    "router_named",
    "scheduler_named",
    "simulate",
]

_MODULES = {
    "cluster": ("Cluster",),
    "explanation": ("explain",),
    "fit": ("Fit", "Measurements", "StepSample", "fit_profile"),
    "measuring": ("Shapes", "measure_engine"),
    "by_name": ("router_named", "scheduler_named"),
    "outcome": ("Outcome", "Sample", "Served", "Slo"),
    "plots": ("draw",),
    "profiles": ("PROFILES", "Profile"),
    "run": ("simulate",),
    "trace": ("Trace", "TraceRequest", "generate"),
}


def __getattr__(name: str) -> object:
    for home, names in _MODULES.items():
        if name in names:
            return getattr(importlib.import_module(f"{__name__}.{home}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
