"""The benchmark of moves, in small: each way is measured, and all of it is reported."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import migrate


@pytest.mark.slow
def test_every_way_moves_every_context(tmp_path: Path) -> None:
    settings = migrate.Settings(contexts=(64, 128), repeats=1, hidden=64, layers=2, before=4)
    report = migrate.measure(settings, tmp_path)
    assert {way: set(gaps) for way, gaps in report["gap_s"].items()} == {
        way: {"64", "128"} for way in ("kv", "tokens", "blocking", "recompute")
    }
    assert all(len(gaps) == 1 and gaps[0] > 0 for seen in report["gap_s"].values() for gaps in seen.values())
    assert report["copied_bytes"]["128"] > report["copied_bytes"]["64"] > 0
    assert report["step_s"]["normal"]
    assert report["ratios"]["recompute_over_kv_at_longest"] > 0
    assert list(tmp_path.iterdir()) == []
