"""The benchmark of moves, in small: each method is measured, and all of it is reported."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import migrate
from benchmarks.partial import PartialResults


@pytest.mark.slow
def test_a_hybrid_moves_with_its_states(tmp_path: Path) -> None:
    settings = migrate.Settings(
        contexts=(64,), methods=("kv",), repeats=1, hidden=64, layers=3, before=4, hybrid=True
    )
    report = migrate.measure(settings, tmp_path / "work")
    (gap_s,) = report["gap_s"]["kv"]["64"]
    assert gap_s > 0
    assert report["copied_bytes"]["64"] > 0


@pytest.mark.slow
def test_every_method_moves_every_context(tmp_path: Path) -> None:
    settings = migrate.Settings(contexts=(64, 128), repeats=1, hidden=64, layers=2, before=4)
    path = tmp_path / "report.part"
    report = migrate.measure(settings, tmp_path / "work", PartialResults(path))
    assert {method: set(gaps) for method, gaps in report["gap_s"].items()} == {
        method: {"64", "128"} for method in ("kv", "tokens", "blocking", "recompute")
    }
    assert all(len(gaps) == 1 and gaps[0] > 0 for seen in report["gap_s"].values() for gaps in seen.values())
    assert report["copied_bytes"]["128"] > report["copied_bytes"]["64"] > 0
    assert report["step_s"]["normal"]
    assert set(report["own_step_s"]) == {"64", "128"}
    assert {"recompute_over_kv_at_longest", "kv_over_own_step_at_longest"} <= report["ratios"].keys()
    assert list((tmp_path / "work").iterdir()) == []
    # A run that was interrupted measures what is missing, and leaves the rest as it is.
    results = json.loads(path.read_text())
    assert len(results) == 8
    del results["blocking 128"]
    path.write_text(json.dumps(results))
    again = migrate.measure(settings, tmp_path / "work", PartialResults(path))
    assert again["gap_s"]["kv"] == report["gap_s"]["kv"]
    assert again["gap_s"]["blocking"]["128"] != report["gap_s"]["blocking"]["128"]
