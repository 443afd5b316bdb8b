"""A slice of the soak, counted and not timed, and what it says of growth."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import soak
from benchmarks.resource_usage import Allowance, describe
from benchmarks.soak_clients import ClientPool
from benchmarks.soak_operations import OperationRates
from benchmarks.soak_scenario import FINDINGS, Scenario

NUM_REQUESTS = 200


@pytest.mark.slow
def test_every_stream_is_right_among_faults_and_nothing_is_left(tmp_path: Path) -> None:
    scenario = Scenario(
        clients=ClientPool(size=12, think_s=0.02),
        rates=OperationRates(resize_every_s=0.2),
        num_requests=NUM_REQUESTS,
    )
    settings = soak.Settings(
        scenario=scenario, distinct_requests=30, kv_store="8 MiB", device_budget="20 MiB"
    )
    report = soak.measure(settings, tmp_path)
    assert {finding: report[finding] for finding in FINDINGS} == {finding: [] for finding in FINDINGS}
    ends = report["disturbed"]["requests"]
    assert sum(ends.values()) == NUM_REQUESTS
    assert ends["done"] > NUM_REQUESTS / 2
    assert sum(report["faults"].values()) > 10
    assert report["moves"].get("kv done", 0) + report["moves"].get("tokens done", 0) > 0
    assert report["swaps"]["done"] > 2
    assert report["num_resizes"] > 2
    assert set(report["resources"]) == {"memory_bytes", "descriptors", "threads"}
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_every_stream_is_right_while_processes_of_engines_are_killed(tmp_path: Path) -> None:
    scenario = Scenario(
        clients=ClientPool(size=8, think_s=0.02),
        rates=OperationRates(replace_every_s=30.0),
        num_requests=NUM_REQUESTS,
    )
    settings = soak.Settings(
        scenario=scenario, engines=3, distinct_requests=30, kv_store="8 MiB", processes=True
    )
    report = soak.measure(settings, tmp_path)
    assert {finding: report[finding] for finding in FINDINGS} == {finding: [] for finding in FINDINGS}
    assert report["disturbed"]["requests"]["done"] > NUM_REQUESTS / 2
    assert report["swaps"]["done"] > 2


@pytest.mark.parametrize(
    ("samples", "flat"),
    [
        ([5], True),
        ([10, 20, 100, 100, 101, 99, 105, 106], True),
        ([10, 20, 100, 100, 150, 150, 110, 112], True),
        ([100, 100, 100, 100, 110, 110, 112, 113], False),
    ],
)
def test_a_figure_is_flat_if_its_last_third_is_not_over_its_first(samples: list[int], flat: bool) -> None:
    assert describe(samples, Allowance(0.1, 1))["flat"] is flat
