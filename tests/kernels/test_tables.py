"""Tuning tables: a look-up returns the nearest measured point, or nothing."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hotswap.errors import ConfigError
from hotswap.kernels import targets
from hotswap.kernels.tables import Record, Table, load, write
from hotswap.kernels.targets import TARGETS, Device, device_of, runs_triton, target_of

KIND = "bfloat16/g128"


def table(*points: tuple[tuple[int, ...], int], kind: str = KIND, path: Path) -> Table:
    """Return a table of one device; each choice identifies its point."""
    records = [
        Record(kind, shape, rows, {"block_m": rows, "block_n": shape[0]}, {"us": 1.5})
        for shape, rows in points
    ]
    write(path, "GPU A", "sm_90", {"triton": "0"}, records)
    return Table(load_json(path))


def load_json(path: Path) -> dict[str, object]:
    parsed: dict[str, object] = json.loads(path.read_text(encoding="utf-8"))
    return parsed


@given(
    rows=st.integers(1, 5000),
    measured=st.lists(st.integers(1, 4096), min_size=1, max_size=6, unique=True),
)
def test_the_next_larger_number_of_rows_is_used_else_the_largest(
    rows: int, measured: list[int], tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("table") / "table.json"
    found = table(*(((512, 256), m) for m in measured), path=path).find(
        "GPU A", "sm_90", KIND, (512, 256), rows
    )
    assert found is not None
    assert found["block_m"] == min((m for m in measured if m >= rows), default=max(measured))


def test_the_exact_shape_is_used_else_the_nearest_within_an_octave(tmp_path: Path) -> None:
    made = table(((4096, 4096), 16), ((6144, 4096), 16), path=tmp_path / "t.json")

    def block_n(*shape: int) -> object:
        found = made.find("GPU A", "sm_90", KIND, shape, 16)
        return None if found is None else found["block_n"]

    assert block_n(6144, 4096) == 6144
    assert block_n(5900, 4096) == 6144
    assert block_n(3000, 4096) == 4096
    assert block_n(12289, 4096) is None, "more than an octave away"
    assert block_n(8192, 8192) is None, "an octave in each of two sizes is two octaves"
    assert block_n(4096) is None


def test_the_exact_device_is_used_else_one_of_the_same_target(tmp_path: Path) -> None:
    made = table(((64, 64), 1), path=tmp_path / "t.json")
    assert made.find("GPU B", "sm_90", KIND, (64, 64), 1) is not None
    assert made.find("GPU B", "sm_80", KIND, (64, 64), 1) is None
    assert made.find("GPU A", "sm_90", "float16/g128", (64, 64), 1) is None


def test_a_sweep_of_one_device_keeps_the_others(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    table(((64, 64), 1), path=path)
    write(path, "GPU C", "sm_80", {}, [Record(KIND, (32, 32), 8, {"block_m": 8}, {"us": 2.0})])
    write(path, "GPU A", "sm_90", {}, [Record(KIND, (128, 128), 8, {"block_m": 8}, {"us": 2.0})])
    found = {(target, record.shape) for target, record in Table(load_json(path)).records()}
    assert found == {("sm_80", (32, 32)), ("sm_90", (128, 128))}


def test_a_missing_file_is_an_empty_table_and_another_schema_is_refused(tmp_path: Path) -> None:
    assert load(tmp_path / "none.json").find("GPU A", "sm_90", KIND, (64, 64), 1) is None
    with pytest.raises(ConfigError, match="schema 7"):
        Table({"schema": 7, "devices": {}})


def test_a_newer_gpu_uses_the_next_older_target_and_an_unknown_gpu_none() -> None:
    assert {name: target_of(name) for name in TARGETS} == dict(TARGETS)
    assert target_of("sm_87") is TARGETS["sm_86"]
    assert target_of("sm_103") is TARGETS["sm_100"]
    assert target_of("sm_61") is None
    assert target_of("gfx1100") is None


def test_a_gpu_where_compilation_fails_logs_one_warning_and_runs_no_kernels(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """PyTorch's CUDA wheels install Triton also in images without a C compiler."""
    tried: list[torch.device] = []

    def launch(device: torch.device) -> None:
        tried.append(device)
        if device.index == 90:
            raise RuntimeError("Failed to find C compiler. Please specify via CC environment variable.")

    known = Device("a test GPU", TARGETS["sm_90"], 132)
    monkeypatch.setattr(targets, "device_of", lambda device: known)
    monkeypatch.setattr(targets, "_has_triton", lambda: True)
    monkeypatch.setattr(targets, "import_module", lambda name: SimpleNamespace(launch=launch))
    broken, good = torch.device("cuda:90"), torch.device("cuda:91")
    assert [runs_triton(broken), runs_triton(good), runs_triton(broken)] == [False, True, False]
    assert tried == [broken, good]
    (record,) = caplog.records
    assert "cuda:90" in record.getMessage()
    assert "C compiler" in record.getMessage()


def test_a_cpu_runs_triton_kernels_only_with_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert not runs_triton(cpu)
    assert device_of(cpu).target is None
