"""The benchmark of what goes between nodes, in small: figures of every part are reported."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import peer_weights


@pytest.mark.slow
def test_weights_go_between_processes(tmp_path: Path) -> None:
    settings = peer_weights.Settings(
        size_bytes=4_000_000, repeats=2, spread_bytes=4_000_000, spread_repeats=1, link_bytes_per_s=40e6
    )
    report = peer_weights.measure(settings, tmp_path)
    assert len(report["peer_over_socket"]) == 2
    assert all(ratio > 0 for ratio in report["peer_over_socket"])
    assert len(report["peer_four_over_one"]) == 1
    assert len(peer_weights.rows(report)) == 3
    assert list(tmp_path.iterdir()) == []
