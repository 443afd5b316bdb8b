"""What moves cost is learned from moves, and the fastest method is chosen."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotswap import InstanceId, InstanceState, InstanceView, MigrationRecord, RequestId
from hotswap.abc import MoveView
from hotswap.errors import ConfigError
from hotswap.policies import MoveCosts
from hotswap.policies.linear_fit import LinearFit

VIEW = InstanceView(id=InstanceId("e0"), state=InstanceState.SERVING)
MOVE = MoveView(
    num_tokens=1000,
    num_remaining=1000,
    kv_bytes_per_token=100_000,
    source=VIEW,
    destination=VIEW,
    kv_possible=True,
)
DONE = MigrationRecord(
    request=RequestId("r"),
    source=InstanceId("e0"),
    destination=InstanceId("e1"),
    method="tokens",
    outcome="done",
    reason="",
    started_s=0.0,
    seconds=1.0,
    num_tokens=1000,
    downtime_s=0.1,
)


@given(
    slope=st.floats(1e-6, 1e-2),
    intercept=st.floats(0.001, 1.0),
    points=st.lists(st.integers(1, 8192), min_size=2, max_size=20, unique=True),
)
def test_a_line_finds_the_line_that_points_lie_on(slope: float, intercept: float, points: list[int]) -> None:
    line = LinearFit(1e-4, 0.01, span=1024.0)
    for _ in range(400):
        for x in points:
            line.learn(x, slope * x + intercept)
    for x in points:
        assert line.at(x) == pytest.approx(slope * x + intercept, rel=1e-3)
    assert line.mean_error < 0.01


@given(st.lists(st.tuples(st.floats(0, 1e9), st.floats(0, 1e4)), max_size=50))
def test_a_line_never_expects_less_than_nothing(points: list[tuple[float, float]]) -> None:
    line = LinearFit(1e-4, 0.01)
    for x, y in points:
        line.learn(x, y)
    assert line.slope >= 0
    assert line.intercept >= 0
    assert line.at(1e9) >= line.at(0) >= 0


def test_the_fastest_method_is_chosen() -> None:
    slow_link, fast_link = MoveCosts(byte_s=1e-6), MoveCosts(byte_s=1e-12)
    assert slow_link.choose(MOVE).method == "tokens"
    assert fast_link.choose(MOVE).method == "kv"
    assert fast_link.choose(replace(MOVE, kv_possible=False)).method == "tokens"


def test_a_request_that_ends_before_it_could_have_moved_stays() -> None:
    costs = MoveCosts(start_s=0.5, tpot_s=0.05)
    assert costs.choose(replace(MOVE, num_remaining=9)).method == "wait"
    assert costs.choose(replace(MOVE, num_remaining=900)).method != "wait"


def test_a_method_that_proves_slow_is_avoided() -> None:
    costs = MoveCosts(byte_s=1e-10)
    assert costs.choose(MOVE).method == "kv"
    for _ in range(50):
        costs.learn(replace(DONE, method="kv", copied_bytes=100_000_000, seconds=30.0))
    assert costs.choose(MOVE).method == "tokens"


def test_it_expects_the_pauses_that_it_saw() -> None:
    costs = MoveCosts()
    for _ in range(200):
        costs.learn(replace(DONE, seconds=0.2, downtime_s=0.125))
    assert costs.choose(replace(MOVE, kv_possible=False)).estimated_s == pytest.approx(0.125, rel=0.02)
    assert costs.errors["tokens"] < 0.05


def test_moves_that_came_to_nothing_teach_nothing() -> None:
    costs = MoveCosts()
    before = repr(costs)
    costs.learn(replace(DONE, outcome="aborted", seconds=100.0))
    assert repr(costs) == before


def test_costs_below_zero_are_refused() -> None:
    with pytest.raises(ConfigError, match="line of costs"):
        MoveCosts(token_s=-1.0)
    with pytest.raises(ConfigError, match="tpot_s"):
        MoveCosts(tpot_s=-1.0)
