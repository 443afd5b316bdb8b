"""The benchmark of what goes between nodes, in small: figures of every part are reported."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import kv_moves, peer_weights, process_tokens, status_load


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


@pytest.mark.slow
def test_tokens_of_a_child_are_set_beside_those_of_the_same_engine_here() -> None:
    report = process_tokens.measure(process_tokens.Settings(streams=2, tokens=10, repeats=2))
    found = report["process_us_per_token"]
    assert [len(found[name]) for name in ("here", "child", "added")] == [2, 2, 2]
    assert min(found["here"]) > 0
    assert found["added"] == [there - near for near, there in zip(found["here"], found["child"], strict=True)]
    assert len(process_tokens.rows(report)) == 3


@pytest.mark.slow
def test_moves_between_nodes_are_set_beside_moves_in_one_process(tmp_path: Path) -> None:
    settings = kv_moves.Settings(context=48, repeats=1, hidden=64, layers=2)
    report = kv_moves.measure(settings, tmp_path)
    gaps = report["kv_gap_s"]
    assert {way: len(found) for way, found in gaps.items()} == {"local": 2, "remote": 2, "recompute": 2}
    assert min(min(found) for found in gaps.values()) > 0
    assert len(kv_moves.rows(report)) == 5
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_the_status_of_many_engines_is_counted_with_what_it_costs() -> None:
    report = status_load.measure(status_load.Settings(engines=3, repeats=2, seconds=0.5))
    assert len(report["status"]["of_a_core"]) == len(report["status"]["per_s"]) == 2
    assert min(report["status"]["per_s"]) > 0, "they are told"
    assert len(status_load.rows(report)) == 2
