"""The benchmark of moves, in small: each way is measured, and all of it is reported."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import migrate


@pytest.mark.slow
def test_every_way_moves_every_context(tmp_path: Path) -> None:
    settings = migrate.Settings(contexts=(64, 128), repeats=1, hidden=64, layers=2, before=4)
    kept: list[int] = []

    def keep(report: dict[str, Any]) -> None:
        kept.append(sum(map(len, report["gap_s"].values())))

    report = migrate.measure(settings, tmp_path, keep=keep)
    assert kept == list(range(1, 9))
    assert {way: set(gaps) for way, gaps in report["gap_s"].items()} == {
        way: {"64", "128"} for way in ("kv", "tokens", "blocking", "recompute")
    }
    assert all(len(gaps) == 1 and gaps[0] > 0 for seen in report["gap_s"].values() for gaps in seen.values())
    assert report["copied_bytes"]["128"] > report["copied_bytes"]["64"] > 0
    assert report["step_s"]["normal"]
    assert set(report["own_step_s"]) == {"64", "128"}
    assert {"recompute_over_kv_at_longest", "kv_over_own_step_at_longest"} <= report["ratios"].keys()
    assert list(tmp_path.iterdir()) == []
    # A report that broke off is gone on with, and what it has is left as it is.
    broken = json.loads(json.dumps(report))
    del broken["gap_s"]["blocking"]["128"]
    del kept[:]
    whole = migrate.measure(settings, tmp_path, keep=keep, begun=broken)
    assert kept == [8]
    assert whole["gap_s"]["kv"] == report["gap_s"]["kv"]
    assert set(whole["gap_s"]["blocking"]) == {"64", "128"}
