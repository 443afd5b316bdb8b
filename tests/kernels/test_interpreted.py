"""Kernels run on the CPU by Triton's interpreter, which a process is either given over to or not.

So each file `interpreted/check_*.py` has a process of its own. One that reads or writes out of range, where
it looks for that, ends by a signal.
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
def test_kernels_compute_what_they_should(check: Path) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", str(check)]
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.stdout[-8000:]}\n{done.stderr[-2000:]}"
