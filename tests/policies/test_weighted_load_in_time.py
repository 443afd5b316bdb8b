"""`WeightedLoadSwap` over time: what decides a wait, and that models take turns without the guard."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from math import inf
from typing import Any

import pytest

from hotswap import InstanceId, SwapRecord
from hotswap.offline.workloads import log_normal_lengths
from hotswap.policies import LeastLoadedRouter, WeightedLoadSwap
from hotswap.simulation import Cluster, Outcome, Trace, TraceRequest, generate, simulate

INTERVAL_S = 0.5


def played(trace: Trace, rule: WeightedLoadSwap, num_engines: int) -> Outcome:
    cluster = Cluster(num_engines=num_engines, disk_bytes_per_s=50e9)
    router = LeastLoadedRouter()
    return simulate(trace, cluster, router=router, scheduler=rule, interval_s=INTERVAL_S, driver="events")


def a_third_model() -> Trace:
    """Two busy models, and from time to time a request for a third."""
    busy = generate(
        1,
        models={"a": 1, "b": 1},
        rate_per_s=16,
        seconds=50,
        prompt_tokens=log_normal_lengths(400, sigma=1.0),
        output_tokens=log_normal_lengths(150, sigma=0.8),
    )
    third = (TraceRequest(arrive_s=at_s, model="c", prompt_tokens=200, output_tokens=50) for at_s in (20, 40))
    return busy.merge(Trace.of(list(third), "third"))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"t1": 0.0, "t2": inf, "b": 1.0},
        {"t1": 4.0, "t2": 4.0, "b": 1.2},
        {"t1": 8.0, "t2": 6.0, "b": 2.0, "sigmas": 0.0},
    ],
)
def test_a_model_without_a_replica_waits_for_patience_whatever_the_thresholds(
    changes: dict[str, Any],
) -> None:
    trace = a_third_model()
    for patience_s in (1.0, 4.0):
        rule = replace(WeightedLoadSwap(patience_s=patience_s), **changes)
        waits_s = [r.ttft_s for r in played(trace, rule, 2).requests if r.model == "c"]
        # A plan is due after it, and the swap takes 0.6 s.
        assert all(patience_s <= wait_s <= patience_s + INTERVAL_S + 1.0 for wait_s in waits_s)


@pytest.mark.parametrize("num_engines", [1, 2])
def test_without_the_guard_every_turn_that_ends_by_eviction_lasts_for_patience(num_engines: int) -> None:
    """Three models with eight long answers each; without that bound they swapped every second."""
    requests = [
        TraceRequest(arrive_s=1 + 0.01 * n, model="abc"[n % 3], prompt_tokens=2000, output_tokens=2000)
        for n in range(24)
    ]
    trace, rule = Trace.of(requests), WeightedLoadSwap(t1=0, t2=inf, b=1, sigmas=0, guard=False)
    outcome = played(trace, rule, num_engines)
    turns: defaultdict[InstanceId, list[SwapRecord]] = defaultdict(list)
    for swap in outcome.swaps:
        before = turns[swap.instance]
        if before and swap.num_evicted:
            assert rule.patience_s is not None
            assert swap.started_s - (before[-1].started_s + before[-1].seconds) >= rule.patience_s
        before.append(swap)
    assert sum(swap.num_evicted for swap in outcome.swaps)
    assert outcome.seconds <= 2 * played(trace, replace(rule, guard=True), num_engines).seconds
    assert not any(request.error for request in outcome.requests)
