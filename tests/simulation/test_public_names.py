"""The names of `hotswap.simulation`: pinned, there, and free until used."""

from __future__ import annotations

import json
import subprocess
import sys

import hotswap.simulation
from tests.house.tree import ROOT

PUBLIC = [
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


def test_public_names_are_pinned_and_resolve() -> None:
    assert hotswap.simulation.__all__ == PUBLIC
    assert all(getattr(hotswap.simulation, name) is not None for name in PUBLIC)


def test_nothing_is_loaded_before_it_is_used() -> None:
    code = "import hotswap.simulation, json, sys; print(json.dumps(sorted(sys.modules)))"
    loaded = subprocess.run(
        [sys.executable, "-I", "-c", f"import sys; sys.path.insert(0, {str(ROOT)!r}); {code}"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert not {"matplotlib", "pydantic", "hotswap.backends.sim"} & set(json.loads(loaded))
