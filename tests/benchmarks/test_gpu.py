"""The run for GPUs goes through on a CPU, in small, and finds nothing wrong; and it needs little."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu.session import Session
from hotswap.kernels import tables
from hotswap.kernels.fp8_gemm import Tile as Fp8Tile
from hotswap.kernels.segmented_lora import Tile
from tests.house.tree import ROOT

pytest.importorskip("triton", reason="Triton is made for Linux alone")

RUN = ROOT / "benchmarks" / "gpu" / "run.sh"
PHASES = ("ceilings", "check", "attention", "lora", "kv", "swap", "tokens", "fp8")


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("out")
    done = subprocess.run([RUN, "--dry", "--out", out], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return out


@pytest.fixture(scope="module")
def report(out: Path) -> dict[str, Any]:
    report: dict[str, Any] = json.loads((out / "gpu-dry.json").read_text())
    return report


pytestmark = pytest.mark.slow


def test_every_phase_runs_and_finds_nothing_wrong(report: dict[str, Any]) -> None:
    assert tuple(report["phases_s"]) == PHASES
    assert "faults" not in report
    assert "left_out" not in report


def test_a_dry_run_is_not_taken_for_another(out: Path, report: dict[str, Any]) -> None:
    assert report["dry"] is True
    assert report["device"].startswith("none")
    assert sorted(path.name for path in out.iterdir()) == [
        "fp8_gemm.table.json",
        "gpu-dry.json",
        "segmented_lora.table.json",
    ]


def test_what_it_measures_has_a_rival_or_a_limit(report: dict[str, Any]) -> None:
    assert {"us", "bf16_us", "dense_us", "published_us", "floor_us"} <= set(report["fp8"][0])
    assert {"us", "loop_us", "floor_us"} <= set(report["lora"][0])
    assert {"us", "gathered_us", "sdpa_us", "limit_us", "mask_us"} <= set(report["attention"][0])
    assert {"plain copy, PyTorch's memory, s", "as an engine loads, 16 MiB at a time, s"} <= set(
        report["swap"]
    )
    assert {each["weights"] for each in report["tokens"]} == {"bf16", "fp8"}
    assert {"unload_s", "load_s", "first_token_s", "tokens_per_s"} <= set(report["tokens"][0])
    assert "a call for each layer" in {each["method"] for each in report["kv_blocks"]}


def test_its_tables_can_be_put_in_place(out: Path) -> None:
    for name, kind in (("fp8_gemm", Fp8Tile), ("segmented_lora", Tile)):
        records = list(tables.load(out / f"{name}.table.json").records())
        assert records
        for _, record in records:
            choice: dict[str, Any] = dict(record.choice)
            assert kind(**choice).choice == record.choice


@pytest.mark.parametrize("size_bytes", [1 << 20, 10 << 20, 40 << 20, 1 << 30])
def test_weights_in_turns_fill_three_caches(size_bytes: int) -> None:
    session = Session(torch.device("cpu"), is_dry=False, ends_at=0.0, l2_bytes=50 << 20)
    copies = session.copies(size_bytes)
    assert copies >= 2
    assert copies * size_bytes >= 3 * session.l2_bytes


def test_kernels_are_found_where_the_rest_cannot_be_imported() -> None:
    """A machine lent for its GPU has PyTorch and Triton, and perhaps nothing else."""
    code = (
        "from benchmarks.gpu import bare\n"
        "bare.lacking = lambda: ['anyio']\n"
        "bare.prepare()\n"
        "from benchmarks.gpu import blocks, ceilings, fp8, lora\n"
        "import sys; print(sorted({'anyio', 'opentelemetry', 'pydantic', 'transformers'} & set(sys.modules)))"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr


def test_without_a_gpu_it_says_what_would_run() -> None:
    hidden = os.environ | {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}
    done = subprocess.run([RUN], env=hidden, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "--dry" in done.stderr
