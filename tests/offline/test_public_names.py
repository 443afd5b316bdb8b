"""The names of `hotswap.offline`: pinned, there, and free until used."""

from __future__ import annotations

import json
import subprocess
import sys

import hotswap.offline
from tests.house.tree import ROOT

PUBLIC = [
    "Arrival",
    "VirtualTimeDeadlock",
    "VirtualTimeLoop",
    "dump_view",
    "load_view",
    "play",
    "workload",
]


def test_public_names_are_pinned_and_resolve() -> None:
    assert hotswap.offline.__all__ == PUBLIC
    assert all(getattr(hotswap.offline, name).__doc__ for name in PUBLIC)


def test_nothing_is_loaded_before_it_is_used() -> None:
    code = "import hotswap.offline, json, sys; print(json.dumps(sorted(sys.modules)))"
    loaded = subprocess.run(
        [sys.executable, "-I", "-c", f"import sys; sys.path.insert(0, {str(ROOT)!r}); {code}"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert not {"pytest", "hypothesis", "pydantic", "opentelemetry.sdk", "torch"} & set(json.loads(loaded))
