"""A slice of the random simulations: no request stalls twice, and both drivers agree in every record."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.turns import SCHEDULERS, differences, drawn, played
from hotswap.simulation import simulate

# Requests that came in the instant of a swap were counted as evicted by one driver alone.
COUNTED_TWICE = (("CostSwap", 16), ("WeightedLoadSwap", 5), ("StaticPinning", 4), ("Autoscalers", 7))

# Requests that had been evicted after a preload came back to an instance that was preloading in turn.
STALLED_TWICE = (("CostSwap", 44), ("WeightedLoadSwap", 80), ("StaticPinning", 28))

# Requests of one instant were routed after the engine had seen the first, by events alone.
SEEN_TOO_SOON = (("CostSwap", 262), ("KeepAliveSwap", 366), ("StartupTimePlacement", 290))


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("kind", SCHEDULERS)
def test_nothing_is_wrong(kind: str, seed: int) -> None:
    assert played(drawn(kind, seed)) == []


@pytest.mark.parametrize(("kind", "seed"), STALLED_TWICE)
def test_a_preload_ends_no_stay_of_a_request_that_has_stalled(kind: str, seed: int) -> None:
    assert played(drawn(kind, seed)) == []


@pytest.mark.parametrize(("kind", "seed"), COUNTED_TWICE)
def test_a_request_that_comes_with_a_swap_is_counted_alike(kind: str, seed: int) -> None:
    assert played(drawn(kind, seed)) == []


@pytest.mark.parametrize(("kind", "seed"), SEEN_TOO_SOON)
def test_requests_of_one_instant_are_routed_alike(kind: str, seed: int) -> None:
    assert played(drawn(kind, seed)) == []


def test_a_difference_is_told_by_its_record_and_field() -> None:
    simulation = drawn("CostSwap", 0)
    outcome = simulate(
        simulation.trace,
        simulation.cluster,
        router=simulation.router,
        scheduler=simulation.scheduler,
        driver="events",
    )
    other = replace(outcome, requests=(replace(outcome.requests[0], num_hops=9), *outcome.requests[1:]))
    assert list(differences(outcome, outcome)) == []
    assert list(differences(outcome, other)) == ["requests 0 differ in num_hops"]
    assert list(differences(outcome, replace(outcome, swaps=()))) == ["swaps 0 differ in number of records"]
