"""The names of `hotswap.testing`: pinned, there, and free until used."""

from __future__ import annotations

import json
import subprocess
import sys

import hotswap.testing
from tests.house.tree import ROOT

PUBLIC = [
    "ChannelConformance",
    "EngineConformance",
    "EngineFaults",
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


def test_public_names_are_pinned_and_resolve() -> None:
    assert hotswap.testing.__all__ == PUBLIC
    assert all(getattr(hotswap.testing, name).__doc__ for name in PUBLIC)


def test_nothing_is_loaded_before_it_is_used() -> None:
    code = "import hotswap.testing, json, sys; print(json.dumps(sorted(sys.modules)))"
    loaded = subprocess.run(
        [sys.executable, "-I", "-c", f"import sys; sys.path.insert(0, {str(ROOT)!r}); {code}"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert not {"pytest", "hypothesis", "pydantic", "opentelemetry.sdk", "torch"} & set(json.loads(loaded))
