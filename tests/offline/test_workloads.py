"""Workloads: the same seed, the asked rate and shares, and arrivals played at their times."""

from __future__ import annotations

from collections import Counter
from itertools import islice
from random import Random
from statistics import fmean, pstdev

import anyio
import pytest

from hotswap import ModelId
from hotswap.errors import ConfigError
from hotswap.offline.virtual_time import virtual_time
from hotswap.offline.workloads import Arrival, gamma_gaps, log_normal_lengths, play, workload, zipf_mix

MIX = {"a": 3.0, "b": 1.0}


def test_the_same_seed_gives_the_same_workload() -> None:
    one, two, other = (workload(seed, models=MIX, rate_per_s=5, seconds=20) for seed in (1, 1, 2))
    assert one == two
    assert one != other


def test_arrivals_come_in_order_at_the_rate_and_in_the_shares_asked_for() -> None:
    arrivals = workload(0, models=MIX, rate_per_s=10, seconds=400, start_s=100)
    times = [arrival.arrive_s for arrival in arrivals]
    assert times == sorted(times)
    assert times[0] >= 100
    assert times[-1] <= 500
    assert len(arrivals) == pytest.approx(4000, rel=0.1)
    shares = Counter(arrival.model for arrival in arrivals)
    assert shares[ModelId("a")] / len(arrivals) == pytest.approx(0.75, abs=0.05)


def test_lengths_are_what_was_asked_for() -> None:
    arrivals = workload(
        0,
        models=MIX,
        rate_per_s=5,
        seconds=20,
        prompt_tokens=lambda _: 7,
        output_tokens=lambda _: 9,
        vocabulary=50,
    )
    assert {len(arrival.prompt) for arrival in arrivals} == {7}
    assert {arrival.sampling.max_tokens for arrival in arrivals} == {9}
    assert max(max(arrival.prompt) for arrival in arrivals) < 50


@pytest.mark.parametrize("cv", [0.5, 1.0, 4.0])
def test_gamma_gaps_have_the_rate_and_the_variation(cv: float) -> None:
    gaps = list(islice(gamma_gaps(Random(5), rate_per_s=2.0, cv=cv), 50_000))
    assert fmean(gaps) == pytest.approx(0.5, rel=0.1)
    assert pstdev(gaps) / fmean(gaps) == pytest.approx(cv, rel=0.1)


def test_log_normal_lengths_have_the_median_and_the_bounds() -> None:
    draw, random = log_normal_lengths(100, sigma=2.0, most=500), Random(0)
    lengths = sorted(draw(random) for _ in range(5001))
    assert lengths[2500] == pytest.approx(100, rel=0.1)
    assert lengths[0] >= 1
    assert lengths[-1] == 500


def test_zipf_shares_fall_with_rank() -> None:
    assert zipf_mix(["a", "b", "c"], exponent=2.0) == {"a": 1.0, "b": 0.25, "c": pytest.approx(1 / 9)}


def test_a_workload_without_models_is_refused() -> None:
    with pytest.raises(ConfigError, match="give weights"):
        workload(0, models={}, rate_per_s=1, seconds=1)


@virtual_time
async def test_arrivals_are_played_at_their_times() -> None:
    arrivals = workload(3, models=MIX, rate_per_s=2, seconds=30)
    await anyio.sleep(11)
    began_s = anyio.current_time()
    served: list[tuple[float, Arrival]] = []

    async def serve(arrival: Arrival) -> None:
        served.append((anyio.current_time() - began_s, arrival))
        await anyio.sleep(5)

    await play(list(reversed(arrivals)), serve)
    assert [arrival for _, arrival in served] == arrivals
    assert [at_s for at_s, _ in served] == pytest.approx([arrival.arrive_s for arrival in arrivals])
    assert anyio.current_time() == pytest.approx(began_s + arrivals[-1].arrive_s + 5)
