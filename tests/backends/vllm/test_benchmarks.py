"""The benchmarks of vLLM, in small: everything is measured, and reported."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import vllm_migrate, vllm_swap
from hotswap.model import Layout


@pytest.mark.parametrize("layout", ["modules", "checkpoint"])
def test_all_three_methods_of_a_model_change_are_measured(tmp_path: Path, layout: Layout) -> None:
    settings = vllm_swap.Settings(repeats=1, restarts=1, hidden=128, layers=1, layout=layout)
    report = vllm_swap.measure(settings, tmp_path)
    assert all(len(report[name]) == 1 for name in ("in_place_s", "vllm_reload_s", "restart_s"))
    assert report["ratios"]["restart_over_in_place"] > 0
    assert list(tmp_path.iterdir()) == []


def test_both_methods_of_a_core_change_are_measured(tmp_path: Path) -> None:
    settings = vllm_migrate.Settings(context=90, generated=40, repeats=1, hidden=128, layers=1)
    report = vllm_migrate.measure(settings, tmp_path)
    assert all(len(report[name]) == 1 for name in ("kv_gap_s", "resume_gap_s"))
    assert report["copied_bytes"] > 0
    assert list(tmp_path.iterdir()) == []
