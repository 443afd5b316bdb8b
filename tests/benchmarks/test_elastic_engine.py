"""Memory that two real engines share: every request ends, and nothing is over the budget."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import elastic_engine
from benchmarks.elastic_engine import SYSTEMS, Settings


@pytest.mark.slow
def test_no_request_fails_and_neither_leases_nor_resident_blocks_exceed_the_budget(tmp_path: Path) -> None:
    tiny = Settings(
        prompts=(20, 40), answers=(10, 20), at_once=2, hidden=128, layers=2, parts=2, part_requests=2.0
    )
    report = elastic_engine.measure(tiny, tmp_path)
    assert all(
        len(report[name]) == 1 and report[name][0] > 0 for name in ("lent_over_half", "beside_over_half")
    )
    (systems,) = report["by_idle"].values()
    assert list(systems) == list(SYSTEMS)
    for system, of in systems.items():
        assert of["num_failed"] == [0]
        assert 0 < of["peak_kv_bytes"][0] <= report["budget_bytes"]
        assert of["peak_held_bytes"][0] <= report["budget_bytes"]
        assert (of["peak_held_bytes"][0] > 0) is (system != "fixed")
    assert list(tmp_path.iterdir()) == []
