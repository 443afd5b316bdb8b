"""The benchmark of swaps beside streams, in small: both go on, and all of it is reported."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import beside


@pytest.mark.slow
def test_streams_and_swaps_take_turns(tmp_path: Path) -> None:
    settings = beside.Settings(
        streams=2, size_bytes=4_000_000, served_bytes=4_000_000, pause_s=0.01, phase_s=0.4, repeats=2
    )
    report = beside.measure(settings, tmp_path)
    assert len(report["quiet_p99_s"]) == len(report["swapping_p99_s"]) == len(report["rise"]) == 2
    assert len(report["swap_s"]) >= 2
    assert all(rise > 0 for rise in report["rise"])
    assert list(tmp_path.iterdir()) == []
