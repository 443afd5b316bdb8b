"""Runs tests of kernels in Triton's interpreter: in a process of its own, since Triton asks once."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

__all__ = ["interpret"]

_HERE = Path(__file__).parent
_ROOT = _HERE.parents[2]


def interpret(cases: str, *, root: Path = _ROOT) -> None:
    """Run the tests of a file beside this one; fail with what it says, skip where Triton is not installed."""
    pytest.importorskip("triton")
    ended = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-x",
            "-p",
            "no:cacheprovider",
            f"tests/kernels/interpreted/{cases}",
        ],
        cwd=root,
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, (
        f"{cases} ended with {ended.returncode}:\n{ended.stdout[-4000:]}{ended.stderr[-2000:]}"
    )
