"""The benchmark of a killed process, in small: clients wait at that point, and it is reported."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import killed


@pytest.mark.slow
def test_what_clients_wait_is_set_beside_a_prefill(tmp_path: Path) -> None:
    settings = killed.Settings(streams=8, prompt=8, repeats=1, hidden=64, layers=2)
    report = killed.measure(settings, tmp_path)
    (gaps,), (prefills,) = report["gap_s"], report["prefill_s"]
    assert len(gaps) == len(prefills) >= 3
    assert all(gap > 0 for gap in gaps)
    assert report["longest_over_bound"][0] > 0
    assert list(tmp_path.iterdir()) == []
