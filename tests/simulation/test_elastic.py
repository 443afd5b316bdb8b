"""Engines that share the memory of a device: never over budget, nothing admitted and then refused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import TypeVar

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from hotswap import FleetView
from hotswap.abc import Action, Resize, Scheduler
from hotswap.backends.sim import SimEngine
from hotswap.errors import ConfigError
from hotswap.offline.workloads import power_law_lengths
from hotswap.policies import ElasticMemory, LeastLoadedRouter, RestoreMinReplicas
from hotswap.profiling import PROFILES
from hotswap.simulation import Cluster, Outcome, Slo, Trace, TraceRequest, simulate
from hotswap.simulation.arrivals import Arrivals, generate_each
from hotswap.simulation.run import Driver
from tests.simulation.test_drivers import assert_same

_E = TypeVar("_E", bound=SimEngine)

A10 = PROFILES["a10-llama-7b"]
# 64 KV blocks an engine, of which it lends half.
SMALL = replace(A10, kv_blocks=64)
CLUSTER = Cluster(num_engines=2, profile=SMALL, min_replicas=1, engines_per_device=2, kv_floor=0.5)
LEAST_TOKENS = 32 * 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Watched(Cluster):
    """Adds up what its engines hold whenever a pool has been resized."""

    held: list[int] = field(default_factory=list)

    def engines(self, kind: type[_E]) -> list[_E]:
        made: list[_E] = []
        held = self.held

        class Noting(kind):  # type: ignore[valid-type, misc]
            def _state_changed(self) -> None:
                super()._state_changed()
                if made:
                    views = [engine.status() for engine in made]
                    held.append(sum(v.weight_bytes + v.num_kv_blocks * v.kv_block_bytes for v in views))

        made += super(Watched, self).engines(Noting)
        return made


@dataclass(frozen=True, slots=True)
class ResizesAtRandom(Scheduler):
    """Resizes every pool to any size, within bounds or not, once a second."""

    seed: int

    def plan(self, fleet: FleetView) -> Sequence[Action]:
        random = Random(self.seed * 1009 + round(fleet.now_s))
        sizes = [(instance, random.randint(1, 200)) for instance in fleet.instances]
        return (
            *RestoreMinReplicas().plan(fleet),
            *(Resize(instance=i.id, kv_blocks=size) for i, size in sizes if i.most_kv_blocks),
        )


SCHEDULERS = [RestoreMinReplicas(), ElasticMemory(RestoreMinReplicas()), ResizesAtRandom(1)]


def moving_load(rate_per_s: float, seed: int = 1) -> Trace:
    """Load that is on `a` for ten seconds, then on `b`, and so on."""
    lengths = power_law_lengths(128, most=LEAST_TOKENS // 2)
    return generate_each(
        seed,
        {
            "a": Arrivals(rate_per_s=rate_per_s, parts=(1.9, 0.1, 1.9, 0.1)),
            "b": Arrivals(rate_per_s=rate_per_s, parts=(0.1, 1.9, 0.1, 1.9)),
        },
        seconds=40,
        prompt_tokens=lengths,
        output_tokens=lengths,
    )


def check(trace: Trace, outcome: Outcome) -> None:
    """No request that was admitted has failed; those that could outgrow the floor were refused at once."""
    for asked, served in zip(trace.requests, outcome.requests, strict=True):
        if asked.prompt_tokens + asked.output_tokens - 1 <= LEAST_TOKENS:
            assert not served.error, served
        else:
            assert served.error == "PromptTooLong", served
            assert served.ended_s == pytest.approx(served.arrived_s), (
                f"refused after it was admitted: {served}"
            )


@pytest.mark.parametrize("scheduler", SCHEDULERS, ids=repr)
@pytest.mark.parametrize("rate_per_s", [1.0, 3.0])
def test_both_drivers_lend_and_give_back_at_the_same_times(scheduler: Scheduler, rate_per_s: float) -> None:
    trace = moving_load(rate_per_s)
    check(trace, assert_same(trace, CLUSTER, router=LeastLoadedRouter(), scheduler=scheduler))


@pytest.mark.parametrize("driver", ["clients", "events"])
def test_memory_that_moves_with_the_load_has_more_requests_on_time(driver: Driver) -> None:
    trace, slo = moving_load(1.2), Slo(ttft_s=1.0, tpot_s=0.1)
    on_time = [
        simulate(
            trace,
            replace(CLUSTER, engines_per_device=sharing),
            router=LeastLoadedRouter(),
            scheduler=ElasticMemory(RestoreMinReplicas()),
            driver=driver,
        ).attainment(slo)
        for sharing in (1, 2)
    ]
    assert on_time[1] > 1.2 * on_time[0], on_time


arrivals = st.lists(
    st.builds(
        TraceRequest,
        arrive_s=st.floats(0, 5),
        model=st.sampled_from("ab"),
        prompt_tokens=st.integers(1, LEAST_TOKENS),
        output_tokens=st.integers(1, LEAST_TOKENS // 2),
        priority=st.integers(0, 1),
    ),
    min_size=1,
    max_size=40,
    unique_by=lambda request: request.arrive_s,
)


@settings(max_examples=15, deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(
    arrivals,
    st.sampled_from(["clients", "events"]),
    st.sampled_from([*SCHEDULERS, ResizesAtRandom(2)]),
    st.booleans(),
    st.sampled_from([(), ((3.1, "e0"),), ((2.0, "e1"), (4.0, "e0"))]),
)
def test_nothing_is_over_budget_and_nothing_that_was_admitted_is_refused(
    requests: list[TraceRequest],
    driver: Driver,
    scheduler: Scheduler,
    prefix_reuse: bool,
    losses: tuple[tuple[float, str], ...],
) -> None:
    held: list[int] = []
    cluster = Watched(
        num_engines=2,
        profile=SMALL,
        min_replicas=1,
        engines_per_device=2,
        kv_floor=0.5,
        held=held,
        prefix_reuse=prefix_reuse,
        losses=losses,
    )
    trace = Trace.of(requests)
    check(trace, simulate(trace, cluster, router=LeastLoadedRouter(), scheduler=scheduler, driver=driver))
    budget_bytes = 2 * (SMALL.weight_bytes + SMALL.kv_blocks * 16 * SMALL.kv_bytes_per_token)
    assert max(held, default=0) <= budget_bytes


def test_a_cluster_whose_engines_share_nothing_sensible_is_refused() -> None:
    with pytest.raises(ConfigError, match="engines_per_device is 0"):
        Cluster(engines_per_device=0)
    with pytest.raises(ConfigError, match="kv_floor is 0"):
        Cluster(engines_per_device=2, kv_floor=0)
