"""Fleets in virtual time: the effect of a policy on a workload, before it runs in production.

`simulate` plays a `Trace` to the `Fleet` that runs in production, on simulated engines, in a clock that
jumps, and returns an `Outcome`: latencies, swaps, moves and what every instance held when. The same trace,
cluster and policies give the same outcome to the last byte. Names load what they need when first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hotswap.simulation.arrivals import Arrivals, generate_each
    from hotswap.simulation.cluster import Cluster
    from hotswap.simulation.driver import Progress
    from hotswap.simulation.explanation import Candidate, Demand, Explanation, explain
    from hotswap.simulation.least import Fewest, fewest_engines
    from hotswap.simulation.outcome import Outcome, Sample, Served, Slo
    from hotswap.simulation.plots import draw
    from hotswap.simulation.run import Driver, simulate
    from hotswap.simulation.trace import Trace, TraceRequest, generate

__all__ = [
    "Arrivals",
    "Candidate",
    "Cluster",
    "Demand",
    "Driver",
    "Explanation",
    "Fewest",
    "Outcome",
    "Progress",
    "Sample",
    "Served",
    "Slo",
    "Trace",
    "TraceRequest",
    "draw",
    "explain",
    "fewest_engines",
    "generate",
    "generate_each",
    "simulate",
]

_MODULES = {
    "arrivals": ("Arrivals", "generate_each"),
    "cluster": ("Cluster",),
    "driver": ("Progress",),
    "explanation": ("Candidate", "Demand", "Explanation", "explain"),
    "least": ("Fewest", "fewest_engines"),
    "outcome": ("Outcome", "Sample", "Served", "Slo"),
    "plots": ("draw",),
    "run": ("Driver", "simulate"),
    "trace": ("Trace", "TraceRequest", "generate"),
}


def __getattr__(name: str) -> object:
    for home, names in _MODULES.items():
        if name in names:
            return getattr(importlib.import_module(f"{__name__}.{home}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
