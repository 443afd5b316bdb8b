"""The names of `hotswap.profiling`: pinned, there, and free until used."""

from __future__ import annotations

import json
import subprocess
import sys

import hotswap.profiling
from tests.house.tree import ROOT

PUBLIC = [
    "PROFILES",
    "Fit",
    "Measurements",
    "Profile",
    "Shapes",
    "StepSample",
    "fit_profile",
    "measure_engine",
]


def test_public_names_are_pinned_and_resolve() -> None:
    assert hotswap.profiling.__all__ == PUBLIC
    assert all(getattr(hotswap.profiling, name) is not None for name in PUBLIC)


def test_nothing_is_loaded_before_it_is_used() -> None:
    code = "import hotswap.profiling, json, sys; print(json.dumps(sorted(sys.modules)))"
    loaded = subprocess.run(
        [sys.executable, "-I", "-c", f"import sys; sys.path.insert(0, {str(ROOT)!r}); {code}"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert not {"pydantic", "hotswap.profiling.fit", "hotswap.profiling.profiles"} & set(json.loads(loaded))
