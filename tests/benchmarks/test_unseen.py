"""Unseen loads: what a seed draws of a trace, and how the default is compared."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from benchmarks.trace_loads import AZURE, AZURE_CODE
from benchmarks.unseen import DEFAULT, LOADS, POLICIES, SECONDS, compared


def test_the_default_is_compared_with_the_best_of_the_others_by_seed() -> None:
    """Where no number of engines was enough, one more than the most counts."""
    report = compared({DEFAULT: [4, 5, 6], "one": [5, 4, None], "other": [3, 6, 6]})
    assert report["default_over_best"] == [1, 1, 0]
    assert report["default_needs_more"]["one"]["mean"] == pytest.approx((-1 + 1 - 35) / 3)


def test_a_default_that_is_alone_is_compared_with_nothing() -> None:
    assert compared({DEFAULT: [4, 5]})["default_over_best"] == []


@pytest.mark.parametrize(
    ("load", "file", "factor", "num_models"),
    [("azure", AZURE, 2, 12), ("azure code", AZURE_CODE, 4, 12), ("azure code, L40S", AZURE_CODE, 1, 32)],
)
def test_a_seed_draws_a_window_as_many_times_as_fast(
    tmp_path: Path, load: str, file: str, factor: int, num_models: int
) -> None:
    rows = ["arrival_s,input_tokens,output_tokens", *(f"{second},10,5" for second in range(3000))]
    (tmp_path / file).write_bytes(gzip.compress("\n".join(rows).encode()))
    trace = LOADS[load].make(tmp_path, 1)
    assert trace.seconds <= SECONDS
    assert trace.rate_per_s == pytest.approx(factor, rel=0.01)
    assert trace.models.keys() <= {f"m{number}" for number in range(num_models)}
    assert len(trace.models) > 0.9 * num_models
    assert trace.requests == LOADS[load].make(tmp_path, 1).requests
    assert trace.requests != LOADS[load].make(tmp_path, 2).requests


def test_loads_leave_out_policies_that_there_are_and_never_the_default() -> None:
    for load in LOADS.values():
        assert set(load.without) < POLICIES.keys() - {DEFAULT}
