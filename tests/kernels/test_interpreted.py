"""Runs the kernel checks under Triton's interpreter, which applies to a whole process.

So each file `interpreted/check_*.py` runs in a process of its own. An access out of range in a check for it
ends the process by a signal.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.house.tree import ROOT

pytest.importorskip("triton", reason="Triton is made for Linux alone")

CHECKS = sorted((Path(__file__).parent / "interpreted").glob("check_*.py"))


@pytest.mark.slow
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.stem)
def test_the_checks_pass_under_the_interpreter(check: Path) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", str(check)]
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.stdout[-8000:]}\n{done.stderr[-2000:]}"
