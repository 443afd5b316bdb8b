"""What `import hotswap` costs and brings along."""

import json
import subprocess
import sys

from tests.house.tree import ROOT

HEAVY = frozenset(
    {
        "numpy",
        "opentelemetry.sdk",
        "pydantic",
        "ray",
        "rich",
        "safetensors",
        "starlette",
        "tokenizers",
        "torch",
        "transformers",
        "triton",
        "uvicorn",
        "vllm",
    }
)
LIMIT_S = 0.25

LOADED = "import hotswap, json, sys; print(json.dumps(sorted(sys.modules)))"
# Measured inside the new interpreter, so that its start does not count, and in processor time, so that other
# processes count little.
SECONDS = "from time import process_time as now; start = now(); import hotswap; print(now() - start)"


def _in_new_interpreter(code: str) -> str:
    command = [sys.executable, "-I", "-c", f"import sys; sys.path.insert(0, {str(ROOT)!r}); {code}"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_import_loads_no_heavy_library() -> None:
    loaded = set(json.loads(_in_new_interpreter(LOADED)))
    assert "hotswap" in loaded
    assert sorted(HEAVY & loaded) == []


def test_import_is_quick() -> None:
    # The best of several: a busy machine can only add to a measurement.
    best_s = min(float(_in_new_interpreter(SECONDS)) for _ in range(7))
    assert best_s < LIMIT_S, f"{best_s:.3f} s at best: `python -X importtime -c 'import hotswap'` says why"
