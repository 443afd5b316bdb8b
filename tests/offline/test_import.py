"""The import of `hotswap.offline` loads no optional library."""

from __future__ import annotations

import json
import subprocess
import sys

from tests.house.tree import ROOT


def test_nothing_is_loaded_before_it_is_used() -> None:
    code = "import hotswap.offline, json, sys; print(json.dumps(sorted(sys.modules)))"
    loaded = subprocess.run(
        [sys.executable, "-I", "-c", f"import sys; sys.path.insert(0, {str(ROOT)!r}); {code}"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert not {"pytest", "hypothesis", "pydantic", "opentelemetry.sdk", "torch"} & set(json.loads(loaded))
