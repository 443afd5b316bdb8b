"""Chan, Zhang, Wang, "Model Hotswapping", Snowflake, 2024: its controller in a fleet in virtual time."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from math import exp

import pytest

from benchmarks.papers import (
    BURST_S,
    CLUSTER,
    COLD_START_S,
    ENGINES,
    MIN_REPLICAS_S,
    active_models,
    autoscaled,
    burst,
)
from hotswap.abc import Scheduler
from hotswap.policies import AffinityRouter, StaticPinning, WeightedLoadSwap
from hotswap.simulation import Cluster, Outcome, simulate
from hotswap.simulation.outcome import percentile

BARE = WeightedLoadSwap(t1=2, t2=50, b=1.5, sigmas=0)
HARDENED = replace(BARE, sigmas=3)


def played(scheduler: Scheduler, *, seconds: float = 240, cluster: Cluster = CLUSTER) -> Outcome:
    return simulate(burst(1, seconds), cluster, router=AffinityRouter(), scheduler=scheduler)


@pytest.fixture(scope="module")
def hardened() -> Outcome:
    return played(HARDENED)


def test_a_tenfold_burst_is_met_and_then_nothing_swaps(hardened: Outcome) -> None:
    """The bursting model has seven of eight replicas ten seconds later, and nothing moves for the rest."""
    begun = [swap for swap in hardened.swaps if swap.started_s >= BURST_S]
    assert begun
    assert all(swap.started_s + swap.seconds < BURST_S + 10 for swap in begun)
    last = max(sample.at_s for sample in hardened.samples)
    held = Counter(sample.model for sample in hardened.samples if sample.at_s == last)
    assert held == {"a": ENGINES - 1, "b": 1}


def test_fixed_engines_that_swap_beat_pinned_ones(hardened: Outcome) -> None:
    """Pinned halves cannot serve the burst: late requests wait over twenty times as long."""
    pinned = played(StaticPinning({f"e{n}": "ab"[n % 2] for n in range(ENGINES)}))
    late = [
        percentile([r.ttft_s for r in outcome.requests if r.model == "a" and r.arrived_s > BURST_S], 99)
        for outcome in (hardened, pinned)
    ]
    assert late[1] > 20 * late[0]


def test_fixed_engines_that_swap_beat_twice_as_many_that_start_cold(hardened: Outcome) -> None:
    """Until new instances are loaded, requests wait behind minutes of earlier ones; then they are idle."""
    cold = autoscaled(1, 240)
    assert not any(request.error for request in cold.requests)
    begun = [swap for swap in cold.swaps if swap.started_s >= MIN_REPLICAS_S + BURST_S]
    assert len(begun) == ENGINES
    assert all(swap.seconds >= COLD_START_S for swap in begun)
    late = [
        percentile([r.ttft_s for r in outcome.requests if r.model == "a" and r.arrived_s > burst_s], 99)
        for outcome, burst_s in ((hardened, BURST_S), (cold, MIN_REPLICAS_S + BURST_S))
    ]
    assert late[1] > 10 * late[0]


def test_chance_makes_the_bare_rule_swap_and_not_the_hardened_one(hardened: Outcome) -> None:
    bare = played(BARE)
    later = [sum(s.started_s > BURST_S + 30 for s in outcome.swaps) for outcome in (bare, hardened)]
    assert later[0] > 5
    assert later[1] == 0


def test_min_replicas_are_restored_within_an_interval_and_a_swap() -> None:
    """Of the two replicas of a model one is lost, and at once another instance turns to it."""
    cluster = replace(CLUSTER, min_replicas=2, losses=((60.0, "e0"),))
    outcome = played(HARDENED, seconds=20, cluster=cluster)
    (lost,) = {s.model for s in outcome.samples if s.instance == "e0" and 50 <= s.at_s < 60}
    others = {"a", "b"} - {lost}
    held = [
        (at_s, Counter(s.model for s in outcome.samples if s.at_s == at_s))
        for at_s in sorted({s.at_s for s in outcome.samples if 60 <= s.at_s < 70})
    ]
    swap_s = max(swap.seconds for swap in outcome.swaps)
    restored = next(
        at_s for at_s, models in held if models[lost] >= 2 and all(models[m] >= 2 for m in others)
    )
    assert restored <= 60 + 1 + swap_s + 0.5  # seen at samples, half a second apart
    assert not any(request.error for request in outcome.requests)


def test_active_models_are_those_of_aegaeons_theorem() -> None:
    """Xiang et al., Aegaeon, SOSP 2025, theorem 3.1: E = M (1 - exp(-lambda T)); 46.55 in its example."""
    simulated = active_models(1, models=100, rate_per_s=0.037, request_s=16.79, seconds=5000)
    assert simulated == pytest.approx(100 * (1 - exp(-0.037 * 16.79)), rel=0.01)
