"""The benchmark of a fitted engine, in small: both engines are asked the same, and both are reported."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import fit
from hotswap.profiling import Shapes


@pytest.mark.slow
@pytest.mark.parametrize("processor", [False, True])
def test_a_simulated_engine_is_set_beside_the_one_it_was_fitted_to(tmp_path: Path, processor: bool) -> None:
    """By the clock, and in virtual time that goes on as the processor works."""
    shapes = Shapes(batches=(1, 4), contexts=(16,), steps=3, repeats=1, rounds=1, loads=1)
    settings = fit.Settings(hidden=64, layers=2, seconds=2.0, rounds=2, shapes=shapes, processor=processor)
    report = fit.measure(settings, tmp_path)
    assert report["num_requests"] > 3
    for name in ("ttft_s", "tpot_s"):
        assert len(report["real"][name]) == len(report["simulated"][name]) == 2
        assert min(report["real"][name]) > 0
        # A fit to so few steps may well come out as none at all.
        assert min(report["simulated"][name]) >= 0
        assert report["over_real"][name][0] == report["simulated"][name][0] / report["real"][name][0]
    assert report["num_steps"] >= 10
    assert list(tmp_path.iterdir()) == []
