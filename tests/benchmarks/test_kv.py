"""The benchmark of KV blocks that survive a swap, in small: every figure is there, and blocks come back."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import kv, kv_process


@pytest.mark.slow
def test_every_context_is_restored_and_computed_again(tmp_path: Path) -> None:
    settings = kv.Settings(
        contexts=(64, 128), streams=2, short=64, repeats=1, prefills=1, hidden=256, layers=4
    )
    report = kv.measure(settings, tmp_path / "work")
    for figure in ("restore_cpu_s", "reprefill_cpu_s", "save_cpu_s", "step_cpu_s_at"):
        assert set(report[figure]) == {"64", "128"}
        assert all(figures for figures in report[figure].values())
    assert report["step_cpu_s"]
    assert all(blocks > 0 for again in report["again_blocks"].values() for blocks in again)
    assert report["streams"]["restore_cpu_s"]
    assert "reprefill_over_restore_at_128" in report["ratios"]
    assert list((tmp_path / "work").iterdir()) == []


@pytest.mark.slow
def test_blocks_of_processes_come_back_from_either_store(tmp_path: Path) -> None:
    settings = kv_process.Settings(contexts=(128,), turns=1, hidden=256, layers=2)
    report = kv_process.measure(settings, tmp_path / "work")
    for way in ("same", "other"):
        for kind in ("fleet", "node"):
            assert len(report["by_context"]["128"][way][kind]["wall_s"]) == 1
    assert list((tmp_path / "work").iterdir()) == []
