"""Mutation tests: the kernel checks detect planted faults."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.house.tree import ROOT
from tests.kernels.mutants import MUTANTS, mutants_of

pytest.importorskip("triton", reason="Triton is made for Linux alone")


KERNELS = sorted({mutant.file.split("/")[0] for mutant in MUTANTS})


@pytest.mark.slow
@pytest.mark.parametrize("kernel", KERNELS)
def test_every_planted_fault_is_detected(kernel: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.mutation", kernel],
        cwd=ROOT,
        env=os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    told = [json.loads(line) for line in done.stdout.splitlines()]
    found = {line["name"] for line in told if line["found"]}
    assert {name for name in found if name.startswith("sound: ")} == set(), "sound kernels pass"
    assert [mutant.name for mutant in mutants_of(kernel) if mutant.name not in found] == []


def test_there_are_many_kinds_of_fault() -> None:
    assert len(MUTANTS) >= 12
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
