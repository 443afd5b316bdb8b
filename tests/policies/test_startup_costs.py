"""What loads and moves take is learned from records, and how wrong it was is told."""

from __future__ import annotations

from dataclasses import replace
from math import inf, nan
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotswap import (
    InstanceId,
    MigrationRecord,
    ModelId,
    PhaseRecord,
    RequestId,
    Residency,
    StoreView,
    SwapRecord,
    TierView,
)
from hotswap.errors import ConfigError
from hotswap.policies import LoadCosts, StartupCosts
from hotswap.policies.startup_costs import QueuedLoads

A, B, C = ModelId("a"), ModelId("b"), ModelId("c")
GB = 10**9
STORE = StoreView(
    tiers=(
        TierView(name="host", bytes_per_s=20 * GB),
        TierView(name="disk", bytes_per_s=4 * GB, queued_bytes=4 * GB),
    ),
    residency=(
        Residency(model=A, tier="disk", size_bytes=8 * GB),
        Residency(model=B, tier="host", size_bytes=8 * GB),
        Residency(model=B, tier="disk", size_bytes=8 * GB),
    ),
)
MOVED = MigrationRecord(
    request=RequestId("r"),
    source=InstanceId("e0"),
    destination=InstanceId("e1"),
    method="tokens",
    outcome="done",
    reason="",
    started_s=0.0,
    seconds=1.0,
    num_tokens=1000,
)


def loaded(num_bytes: int, seconds: float, tier: str = "disk", **changes: Any) -> SwapRecord:
    record = SwapRecord(
        instance=InstanceId("e0"),
        model_before=None,
        model=A,
        model_after=A,
        outcome="done",
        reason="",
        started_s=0.0,
        seconds=seconds,
        downtime_s=seconds,
        phases=(PhaseRecord(name="load", started_s=0.0, seconds=seconds),),
        loaded_bytes=num_bytes,
        tier=tier,
    )
    return replace(record, **changes)


def test_before_any_load_the_store_is_believed() -> None:
    costs = LoadCosts()
    assert costs.load_s(STORE, A) == pytest.approx((4 + 8) / 4)  # queue and model over the disk's bandwidth
    assert costs.load_s(STORE, B) == pytest.approx(8 / 20)
    assert costs.median_error is None


def test_a_bandwidth_is_learned_for_each_tier_by_itself() -> None:
    costs = LoadCosts()
    costs.learn(loaded(8 * GB, 4.0))
    assert costs.bandwidths == {"disk": pytest.approx(2 * GB)}
    assert costs.load_s(STORE, A) == pytest.approx((4 + 8) / 2)
    assert costs.load_s(STORE, B) == pytest.approx(8 / 20)


def test_a_tier_that_becomes_slower_is_followed() -> None:
    costs = LoadCosts()
    for _ in range(20):
        costs.learn(loaded(8 * GB, 2.0))
    for _ in range(20):
        costs.learn(loaded(8 * GB, 8.0))
    assert costs.bandwidths["disk"] == pytest.approx(1 * GB, rel=0.05)


def test_a_preload_counts_as_a_load() -> None:
    costs = LoadCosts()
    phases = tuple(
        PhaseRecord(name=name, started_s=0.0, seconds=2.0) for name in ("preload", "evict", "load")
    )
    costs.learn(loaded(8 * GB, 6.0, phases=phases))
    assert costs.bandwidths["disk"] == pytest.approx(2 * GB)


def test_what_loaded_nothing_teaches_nothing() -> None:
    costs = LoadCosts()
    for record in (loaded(0, 1.0), loaded(GB, 1.0, outcome="failed"), loaded(GB, 0.0), loaded(GB, 1.0, "")):
        costs.learn(record)
    assert costs.bandwidths == {}


def test_a_model_that_lies_nowhere_takes_what_was_said() -> None:
    assert LoadCosts(unknown_s=7.0).load_s(StoreView(), A) == 7.0


def test_the_error_is_that_of_predictions_made_before() -> None:
    costs = LoadCosts(memory=0.0)  # the last load alone counts
    costs.learn(loaded(4 * GB, 1.0))
    assert costs.median_error is None
    costs.learn(loaded(8 * GB, 4.0))  # 2 s were foretold
    assert costs.median_error == pytest.approx(0.5)
    costs.learn(loaded(2 * GB, 1.0))  # at 2 GB/s: exactly
    costs.learn(loaded(2 * GB, 1.0))
    assert costs.median_error == 0.0


@given(
    bandwidth=st.floats(1e8, 5e10),
    loads=st.lists(st.tuples(st.integers(10**8, 10**11), st.floats(-0.1, 0.1)), min_size=3, max_size=30),
)
def test_loads_that_vary_by_a_tenth_are_foretold_within_a_quarter(
    bandwidth: float, loads: list[tuple[int, float]]
) -> None:
    costs = LoadCosts()
    for num_bytes, noise in loads:
        costs.learn(loaded(num_bytes, num_bytes / bandwidth * (1 + noise)))
    assert costs.bandwidths["disk"] == pytest.approx(bandwidth, rel=0.12)
    assert costs.median_error is not None
    assert costs.median_error < 0.25


def test_moves_teach_what_a_token_takes() -> None:
    costs = StartupCosts(token_s=1e-4, start_s=0.02)
    assert costs.resume_s(1000) == pytest.approx(0.12)
    for _ in range(100):
        for num_tokens in (100, 1000, 4000):
            costs.learn_move(replace(MOVED, num_tokens=num_tokens, seconds=0.1 + 0.01 * num_tokens))
            costs.learn_move(replace(MOVED, outcome="aborted", seconds=99.0))
    assert costs.resume_s(2000) == pytest.approx(0.1 + 0.01 * 2000, rel=0.01)
    assert costs.move_error < 0.01


def test_swaps_teach_its_loads() -> None:
    costs = StartupCosts()
    costs.learn_swap(loaded(8 * GB, 4.0))
    assert costs.loads.bandwidths["disk"] == pytest.approx(2 * GB)
    assert "disk: 2 GB/s" in repr(costs)


def test_the_rest_of_a_request_is_its_tokens() -> None:
    assert StartupCosts(tpot_s=0.05).rest_s(40) == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: LoadCosts(memory=1.0), "memory"),
        (lambda: LoadCosts(unknown_s=-1.0), "unknown_s"),
        (lambda: LoadCosts(unknown_s=inf), "unknown_s"),
        (lambda: StartupCosts(tpot_s=nan), "tpot_s"),
    ],
)
def test_a_senseless_setting_is_refused_by_name(make: Any, name: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{name} is "):
        make()


def test_a_load_that_a_plan_begins_is_waited_for_by_the_next_of_another_model() -> None:
    loads = QueuedLoads(LoadCosts(), STORE)
    node = STORE.tiers[1].node
    before_s = loads.load_s(A, node)
    loads.queue(A, node)
    assert loads.load_s(A, node) == pytest.approx(before_s), "its bytes count once"
    more = replace(STORE, residency=(*STORE.residency, Residency(model=C, tier="disk", size_bytes=4 * GB)))
    loads = QueuedLoads(LoadCosts(), more)
    alone_s = loads.load_s(C, node)
    loads.queue(A, node)
    assert loads.load_s(C, node) == pytest.approx(alone_s + 8 * GB / (4 * GB))
