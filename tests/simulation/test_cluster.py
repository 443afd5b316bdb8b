"""Simulated fleets: all requests are served, losses are survived, and simulations repeat exactly."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys

import pytest

from hotswap import Fleet, FleetView, InstanceId, ModelId
from hotswap.abc import Scheduler, Swap
from hotswap.backends.sim.load import Reporting
from hotswap.errors import ConfigError
from hotswap.offline.workloads import log_normal_lengths
from hotswap.policies import (
    AffinityRouter,
    Freeness,
    FreenessRouter,
    LeastLoadedRouter,
    RestoreMinReplicas,
    WeightedLoadSwap,
)
from hotswap.simulation import Cluster, Outcome, Slo, Trace, TraceRequest, generate, simulate
from tests.house.tree import ROOT

SWAP = WeightedLoadSwap(t1=2, t2=50, b=1.5, sigmas=0)
CLUSTER = Cluster(num_engines=3, profile="h100-llama-3.1-8b", disk_bytes_per_s=20e9)


def mixed(seed: int = 0, seconds: float = 40) -> Trace:
    shares = {"a": 4.0, "b": 2.0, "c": 1.0, "d": 1.0, "e": 0.5}
    short = log_normal_lengths(12)
    return generate(seed, models=shares, rate_per_s=3, seconds=seconds, cv=3, output_tokens=short)


def played(trace: Trace, cluster: Cluster = CLUSTER) -> Outcome:
    return simulate(trace, cluster, router=AffinityRouter(), scheduler=SWAP)


def test_every_request_gets_all_tokens_on_fewer_engines_than_models() -> None:
    trace = mixed()
    outcome = played(trace)
    assert [r.output_tokens for r in outcome.requests] == [r.output_tokens for r in trace.requests]
    assert [r.arrived_s for r in outcome.requests] == pytest.approx([r.arrive_s for r in trace.requests])
    assert not any(r.error for r in outcome.requests)
    assert all(r.arrived_s < r.first_s <= r.ended_s for r in outcome.requests if r.first_s is not None)
    assert outcome.summary()["num_swaps"] >= 5
    assert {swap.model_after for swap in outcome.swaps} >= {"a", "b", "c", "d", "e"}


def test_lost_engines_cost_time_and_no_request() -> None:
    trace = mixed()
    calm, hurt = played(trace), played(trace, Cluster(num_engines=3, losses=((10.0, "e0"), (20.0, "e1"))))
    assert not any(r.error for r in hurt.requests)
    assert [r.output_tokens for r in hurt.requests] == [r.output_tokens for r in trace.requests]
    assert max(r.num_hops for r in hurt.requests) > 1
    assert any(s.instance == "e0" and not s.model for s in hurt.samples if s.at_s >= 10)
    assert calm != hurt


def test_requests_that_cannot_be_served_are_part_of_the_outcome() -> None:
    too_long = TraceRequest(arrive_s=0, model="a", prompt_tokens=5000, output_tokens=5)
    fine = TraceRequest(arrive_s=1, model="a", prompt_tokens=50, output_tokens=5)
    outcome = played(Trace((too_long, fine)), Cluster(num_engines=1, max_context_tokens=2000))
    assert [r.error for r in outcome.requests] == ["PromptTooLong", ""]
    assert outcome.attainment(Slo(ttft_s=1e9, tpot_s=1e9)) == 0.5
    assert outcome.summary()["num_failed"] == 1
    json.loads(outcome.as_json(), parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


def test_adapters_and_priorities_of_a_trace_reach_the_engines() -> None:
    requests = tuple(
        TraceRequest(
            arrive_s=n / 10,
            model="a",
            adapter=("", "x", "y")[n % 3],
            prompt_tokens=20,
            output_tokens=4,
            priority=n % 2,
        )
        for n in range(12)
    )
    outcome = played(Trace(requests))
    assert [(r.adapter, r.priority, r.error) for r in outcome.requests] == [
        (r.adapter, r.priority, "") for r in requests
    ]


CODE = """
from tests.simulation.test_cluster import mixed, played
import hashlib
print(hashlib.sha256(played(mixed(7, 30)).as_json().encode()).hexdigest())
"""


@pytest.mark.parametrize("hash_seed", ["1", "2"])
def test_the_same_simulation_is_the_same_text_in_any_process(hash_seed: str) -> None:
    env = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(ROOT)}
    run = subprocess.run(
        [sys.executable, "-c", CODE], capture_output=True, text=True, cwd=ROOT, env=env, check=True
    )
    here = hashlib.sha256(played(mixed(7, 30)).as_json().encode()).hexdigest()
    assert run.stdout.strip() == here


class ByTheClock(Scheduler):
    """What is loaded where, and from which second on."""

    table = ((0, "e0", "a"), (20, "e0", "b"), (40, "e0", "a"), (60, "e1", "a"))

    def plan(self, fleet: FleetView) -> list[Swap]:
        due = [(name, model) for at_s, name, model in self.table if at_s <= fleet.now_s < at_s + 10]
        return [Swap(instance=InstanceId(name), model=ModelId(model)) for name, model in due]


@pytest.mark.parametrize(("num_nodes", "last"), [(0, "host"), (1, "host"), (2, "disk")])
def test_engines_load_from_the_memory_of_their_own_node(num_nodes: int, last: str) -> None:
    asked = [("a", 1), ("b", 21), ("a", 41), ("a", 75)]
    trace = Trace(
        tuple(
            TraceRequest(arrive_s=at_s, model=name, prompt_tokens=20, output_tokens=4) for name, at_s in asked
        )
    )
    cluster = Cluster(num_engines=2, num_nodes=num_nodes)
    outcome = simulate(trace, cluster, router=AffinityRouter(), scheduler=ByTheClock())
    assert [(swap.instance, swap.model, swap.tier) for swap in outcome.swaps] == [
        ("e0", "a", "disk"),
        ("e0", "b", "disk"),
        ("e0", "a", "host"),
        ("e1", "a", last),
    ]


def test_progress_counts_requests_to_the_last() -> None:
    told: list[tuple[int, int]] = []
    trace = mixed(seconds=10)
    simulate(
        trace,
        CLUSTER,
        router=AffinityRouter(),
        scheduler=SWAP,
        progress=lambda done, of: told.append((done, of)),
    )
    assert told == [(n, len(trace.requests)) for n in range(1, len(trace.requests) + 1)]


def test_policies_see_the_views_of_a_production_fleet() -> None:
    """The scheduler is asked by `Fleet` itself, about everything that its view has."""
    seen: list[FleetView] = []

    class Watching(WeightedLoadSwap):
        def plan(self, fleet: FleetView):  # type: ignore[no-untyped-def]
            seen.append(fleet)
            return super().plan(fleet)

    simulate(mixed(seconds=10), CLUSTER, router=LeastLoadedRouter(), scheduler=Watching(t1=2, t2=50, b=1.5))
    assert Fleet.__module__.startswith("hotswap.runtime")
    assert any(view.waiting for view in seen)
    assert any(view.running for view in seen)
    assert {len(view.instances) for view in seen} == {3}


@pytest.mark.parametrize(("reporting", "held"), [("live", [3, 3]), ("by_step", [1, 5])])
def test_requests_that_come_within_a_step_are_spread_only_where_loads_are_live(
    reporting: Reporting, held: list[int]
) -> None:
    """Two engines have one request each when four more come within four milliseconds."""
    times_s = (5.0, 5.5, 10.0, 10.001, 10.002, 10.003)
    outcome = simulate(
        Trace(tuple(TraceRequest(arrive_s=at_s, prompt_tokens=200, output_tokens=400) for at_s in times_s)),
        Cluster(num_engines=2, profile="a10-llama-7b", min_replicas=2, reporting=reporting),
        router=FreenessRouter(Freeness("artifact")),
        scheduler=RestoreMinReplicas(),
        driver="events",
    )
    assert sorted(s.num_requests for s in outcome.samples if s.at_s == 10.5) == held


@pytest.mark.parametrize(
    "make",
    [
        lambda: Cluster(num_engines=0),
        lambda: Cluster(profile="abacus"),
        lambda: Cluster(token_budget=0),
        lambda: Cluster(max_requests=0),
        lambda: Cluster(host_bytes=-1),
        lambda: Cluster(disk_bytes_per_s=0.0),
        lambda: Cluster(losses=((float("nan"), "e0"),)),
        lambda: Cluster(num_engines=4, num_nodes=3),
        lambda: Cluster(num_engines=4, num_nodes=-1),
        lambda: Cluster(reporting="daily"),  # type: ignore[arg-type]
        lambda: Cluster(num_engines=1, losses=((1.0, "e7"),)),
        lambda: played(Trace(())),
    ],
)
def test_what_cannot_be_simulated_is_refused(make) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ConfigError):
        make()
