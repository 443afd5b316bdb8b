"""The report of sampling has a time for every step of every kind."""

from __future__ import annotations

from benchmarks.sampling import OURS, measure


def test_the_report_has_every_step() -> None:
    report = measure(rows=2, vocabulary=1000, repeats=3)
    steps = report["step_s"]
    assert steps.keys() >= OURS.keys()
    assert all(len(series) == 3 and min(series) > 0 for series in steps.values())
