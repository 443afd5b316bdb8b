"""Turns on a real engine: every system answers every request to its end."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.aegaeon_engine import SYSTEMS, Settings, measure


@pytest.mark.slow
def test_every_system_gives_every_token(tmp_path: Path) -> None:
    tiny = Settings(models=2, prompt=70, answer=8, hidden=128, layers=2, turn_steps=2)
    report = measure(tiny, tmp_path)
    assert list(report["systems"]) == list(SYSTEMS)
    for found in report["systems"].values():
        assert 0 <= found["tokens_on_time"][0] <= 1
        assert found["num_tokens"] == [2 * 8]
        assert found["num_swaps"][0] >= 2
